"""Blocks of the expand of a prefill, whose tiles have 128 rows, and the columns of its programs.

Larger blocks read B and the split-K partials less often, and leave fewer programs. The limits were
measured on an H200; docs/benchmarks.md has the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STAGES = 3
_TALL_ROWS, _TALL_COLUMNS, _TALL_GROUP = 128, 128, 16
_TALL_RANKS, _ITEMSIZE = 128, 2
# in each stage a block of the output and one of B, and once the ranks of the rows
BYTES_OF_TALL_BLOCKS = _ITEMSIZE * (
    STAGES * _TALL_COLUMNS * (_TALL_ROWS + _TALL_RANKS) + _TALL_ROWS * _TALL_RANKS
)
# multiprocessors that have a program of tall blocks at all times, from which these are faster: a
# few programs more than there are multiprocessors take as long as a second one of each
_FEWEST_TALL = 0.7
# programs of 64 rows and 1024 columns, over those that fill the device, from which blocks of 128
# columns are faster than those of 64
_FEWEST_WIDE = 0.75
_MOST_WIDE_BLOCKS = 12


@dataclass(frozen=True, slots=True)
class Blocks:
    """What a program computes: `group` blocks, one after the other."""

    rows: int
    columns: int
    group: int
    num_warps: int


def tall_blocks(widths: Sequence[int], tiles: int, multiprocessors: int) -> Blocks | None:
    """Blocks of all rows of a tile, for up to 128 ranks, or None where they leave multiprocessors
    idle: each has memory for one program."""
    programs = _programs(widths, _TALL_COLUMNS * _TALL_GROUP) * tiles
    turns = -(-programs // multiprocessors)
    if programs < _FEWEST_TALL * turns * multiprocessors:
        return None
    return Blocks(_TALL_ROWS, _TALL_COLUMNS, _TALL_GROUP, 8)


def wide_blocks(widths: Sequence[int], rows: int, programs: int) -> Blocks | None:
    """Blocks of 128 columns, or None where they are too few. programs: those that fill the
    device."""
    parts = -(-rows // 64)
    if _programs(widths, 1024) * parts < _FEWEST_WIDE * programs:
        return None
    group = -(-_programs(widths, 128) * parts // programs)
    return Blocks(64, 128, min(_MOST_WIDE_BLOCKS, group), 4)


def small_blocks(widths: Sequence[int], rows: int, multiprocessors: int, num_warps: int) -> Blocks:
    """Blocks of 64 columns. A program begins with the sum of the partials, which takes as long as
    about two blocks; all of them are done when the busiest multiprocessor is."""
    parts = -(-rows // 64)

    def cost(group: int) -> float:
        turns = -(-_programs(widths, 64 * group) * parts // multiprocessors)
        # of equal ones the group with more programs hides more latency
        return turns * (group + 2) + group / 4

    return Blocks(64, 64, min((2, 4, 8, 16), key=cost), num_warps)


def _programs(widths: Sequence[int], columns: int) -> int:
    """Programs of so many columns for each part of the rows: none computes two slices."""
    return sum(-(-width // columns) for width in widths)
