"""Launches for up to some hundred rows, whose tiles have 16 or 32 rows.

Where few blocks of columns come to each multiprocessor, each is a program of its own, with its part
of B on its way while the shrink runs. Of a wide layer not all of these would run at once: there a
program computes several blocks, whose loads overlap. The constants were measured on an H200, and
are those of every family: docs/benchmarks.md has the figures.
"""

from __future__ import annotations

from dataclasses import dataclass

from lorakernels.dense.one_wave import FEW_RANKS, Work, best_group

# most programs on a multiprocessor that compute one block each, for tiles of 16 and of 32 rows
_MOST_OF_16_ROWS = 4.5
_MOST_OF_32_ROWS = 2
# from so many programs on, those of four warps have more of B on its way, with so many ranks
_FEWEST_OF_FOUR_WARPS = 2
_RANKS_OF_FOUR_WARPS = range(17, 65)
# beyond, a block of 256 columns takes too many registers, and a stage too much shared memory
_RANKS_OF_WIDE_BLOCKS = 64
_RANKS_OF_STAGES = 128
# numbers of split-K partials; what a value of a partial costs an expand, over what a value of x or
# A costs the shrink; and ranks and rows that take as long as what a partial takes besides its own
_SPLITS = (1, 2, 4, 8, 16, 32)
_COST_OF_A_PARTIAL = 0.8
_RANKS_BESIDES = 16
_ROWS_BESIDES = 8


@dataclass(frozen=True, slots=True)
class Columns:
    """What a program of the expand computes: `group` blocks of `block` columns."""

    block: int
    group: int
    num_warps: int
    num_stages: int


def best_columns(work: Work) -> Columns:
    """work: tiles of 16 or 32 rows."""
    return _of_16_rows(work) if work.height == 16 else _of_32_rows(work)


def _of_16_rows(work: Work) -> Columns:
    block = 256 if work.rank <= _RANKS_OF_WIDE_BLOCKS else 128
    share = work.share(block)
    if share > _MOST_OF_16_ROWS and work.rank <= _RANKS_OF_STAGES:
        return Columns(128, best_group(work, 128, (4, 8)), 4, 3)
    takes_four_warps = work.rank in _RANKS_OF_FOUR_WARPS and share > _FEWEST_OF_FOUR_WARPS
    return Columns(block, 1, 4 if takes_four_warps else 8, 1)


def _of_32_rows(work: Work) -> Columns:
    if work.share(256) <= _MOST_OF_32_ROWS:
        return Columns(256, 1, 8, 1)
    group = best_group(work, 64, (2, 4) if work.rank <= FEW_RANKS else (2, 4, 8, 16))
    return Columns(64, group, 4 if work.rank <= _RANKS_OF_STAGES else 8, 3)


def best_splits(work: Work, rows: float, block_ranks: int, columns: int) -> int:
    """Split-K partials of a shrink with blocks of so many ranks. rows: those of a tile. columns:
    those of a program of the expand, each of which reads all partials."""
    turns = max(1.0, work.share(columns))

    def cost(splits: int) -> float:
        computed = (rows + block_ranks) * work.in_features / splits
        values = (rows + _ROWS_BESIDES) * (work.rank + _RANKS_BESIDES) * splits
        return computed + _COST_OF_A_PARTIAL * values * turns

    return min(_SPLITS, key=cost)
