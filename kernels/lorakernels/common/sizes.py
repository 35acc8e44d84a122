"""Arithmetic on sizes that the plans of all kernels share. Pure."""

from __future__ import annotations

import math
from functools import cache, lru_cache

import triton

# most programs that CUDA launches along the second or the third axis of a grid
MAX_GRID_Y = 65535

# Remembers plans: making one takes longer than looking it up, and a step that no graph replays asks
# for the same ones in every layer. A server meets more sizes of steps than are worth the memory
remembered = lru_cache(maxsize=1 << 12)


# plans call these in every launch, and triton's own function takes over a microsecond
@cache
def power_of_2(value: int) -> int:
    """The smallest power of two that is not below `value`, at least 1."""
    return int(triton.next_power_of_2(max(1, value)))


@cache
def power_of_2_below(value: int) -> int:
    """The largest power of two that is not above `value`, at least 1."""
    return 1 << max(1, value).bit_length() - 1


def rank_vector(rank: int) -> int:
    """B is read in vectors of this many ranks; `rank` is that of the buffers. What an adapter's
    last vector holds past its live rank is multiplied by zero and must be finite, as a reset
    leaves it; vectors after that one are not read."""
    return math.gcd(16, rank)
