"""Arithmetic on sizes that the plans of all kernels share. Pure."""

from __future__ import annotations

import math


def power_of_2(value: int) -> int:
    """The smallest power of two that is not below `value`, at least 1."""
    # plans call this in every launch, and triton.next_power_of_2 takes over ten times as long
    return 1 << (max(1, value) - 1).bit_length()


def power_of_2_below(value: int) -> int:
    """The largest power of two that is not above `value`, at least 1."""
    return 1 << (max(1, value).bit_length() - 1)


def rank_vector(rank: int) -> int:
    """B is read in vectors of this many ranks; `rank` is that of the buffers. What an adapter's
    last vector holds past its live rank is multiplied by zero and must be finite, as a reset
    leaves it; vectors after that one are not read."""
    return math.gcd(16, rank)
