"""Arithmetic of sizes that the plans of all kernels share. Pure."""

from __future__ import annotations

import math


def power_of_2(value: int) -> int:
    """The smallest one that is not below `value`, at least 1."""
    return 1 << (max(1, value) - 1).bit_length()


def power_of_2_below(value: int) -> int:
    """The largest one that is not above `value`, at least 1."""
    return 1 << (max(1, value).bit_length() - 1)


def rank_vector(rank: int) -> int:
    """B is read in vectors of this many ranks, `rank` being that of the buffers. What is dead
    in an adapter's last vector is multiplied by zero and must be finite, as a reset leaves it;
    vectors behind it are not read."""
    return math.gcd(16, rank)
