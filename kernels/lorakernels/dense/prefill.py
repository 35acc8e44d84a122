"""Columns of a program of the expand of a prefill, whose tiles have 128 rows in two parts."""

from __future__ import annotations

from collections.abc import Sequence


def cheapest_group(widths: Sequence[int], parts: int, multiprocessors: int) -> int:
    """Blocks of 64 columns for each program. A program begins with the sum of the partials, which
    takes as long as about two blocks; all of them are done when the busiest multiprocessor is."""

    def cost(group: int) -> float:
        groups = sum(-(-width // (64 * group)) for width in widths)
        turns = -(-groups * parts // multiprocessors)
        # of equal ones the group with more programs hides more latency
        return turns * (group + 2) + group / 4

    return min((2, 4, 8, 16), key=cost)


def group_of_a_wave(widths: Sequence[int], parts: int, block_columns: int, programs: int) -> int:
    """Column blocks for each program if there are to be at most so many programs."""
    blocks = sum(-(-width // block_columns) for width in widths)
    return max(1, -(-blocks * parts // programs))
