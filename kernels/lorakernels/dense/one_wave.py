"""Launches for 129 to 2047 rows, between decode and prefill: a shrink whose programs all run at
once, and an expand of few turns.

More split-K partials make the shrink shorter and the expand longer, which reads all of them once
for each group of columns; narrow blocks of ranks read x more often. Both are counted in values that
a program waits for. The constants of these costs were measured on an H200, and are those of every
family: docs/benchmarks.md has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

# ranks and features of a block of the shrink, and as many stages as keep the memory of a
# multiprocessor busy: A comes from DRAM, because the base product has driven it out of the L2 cache
_BLOCKS = ((16, 128, 6), (32, 128, 6), (64, 128, 5), (128, 64, 6))
# each number of partials is a variant of the expand, which has to be compiled
_SPLITS = (1, 2, 3, 4, 6, 8, 16)
# what a value of a partial costs an expand, over what a value of x or A costs the shrink, and ranks
# that take as long as what a partial takes besides its values
_COST_OF_A_PARTIAL = 3.5
_RANKS_BESIDES = 16
# columns of a usual program of the expand
_COLUMNS = 1024
# so many partials are loaded at once, which takes the registers of programs beside this one: that
# counts from so many turns on
_LOADED_AT_ONCE = (3, 4)
_CROWDED_TURNS = 1.4
# programs of an expand on a multiprocessor: with fewer nothing hides latency, and more take turns
_FEWEST, _MOST = 1.3, 3
# ranks of which many programs fit beside each other
FEW_RANKS = 32


@dataclass(frozen=True, slots=True)
class Wave:
    """What a program of the shrink computes: `ranks`, and `features` in each step."""

    ranks: int
    features: int
    num_stages: int
    splits: int


@dataclass(frozen=True, slots=True)
class Work:
    """The products of a batch: tiles of `height` rows, the ranks of each slice."""

    tiles: int
    height: int
    rank: int
    in_features: int
    slice_widths: tuple[int, ...]
    multiprocessors: int

    def share(self, columns: int) -> float:
        """Programs of an expand on each multiprocessor, of so many columns each."""
        groups = sum(-(-width // columns) for width in self.slice_widths)
        return self.tiles * groups / self.multiprocessors


def best_wave(work: Work) -> Wave:
    """The block and the number of split-K partials of the least cost."""
    ranks = work.rank * len(work.slice_widths)
    # a block of twice the ranks would be idle for the most part
    blocks = [block for block in _BLOCKS if block[0] < max(32, 2 * ranks)]
    choices = (Wave(*block, splits) for block, splits in product(blocks, _SPLITS))
    allowed = (wave for wave in choices if wave.splits == 1 or _may_split(wave, work))
    return min(allowed, key=lambda wave: _cost_of_wave(wave, work))


def _programs(wave: Wave, work: Work) -> int:
    chunks = -(-work.rank * len(work.slice_widths) // wave.ranks)
    return work.tiles * chunks * wave.splits


def _may_split(wave: Wave, work: Work) -> bool:
    """Whether each partial has a step, and all programs run at once: those of a second wave would
    take as long again."""
    steps = -(-work.in_features // wave.features)
    return wave.splits <= steps and _programs(wave, work) <= work.multiprocessors


def _cost_of_wave(wave: Wave, work: Work) -> float:
    waves = -(-_programs(wave, work) // work.multiprocessors)
    loaded = (work.height + wave.ranks) * work.in_features / wave.splits
    turns = max(1.0, work.tiles * sum(work.slice_widths) / (_COLUMNS * work.multiprocessors))
    values = work.height * (work.rank + _RANKS_BESIDES) * wave.splits * turns
    is_crowded = turns > _CROWDED_TURNS and wave.splits in _LOADED_AT_ONCE
    return waves * loaded + (2 if is_crowded else 1) * _COST_OF_A_PARTIAL * values


def best_group(work: Work, block_columns: int, groups: Iterable[int]) -> int:
    """Blocks of columns for each program of the expand, one of `groups`. A program begins with the
    sum of the partials: that takes as long as 64 or 128 columns, and longer with more ranks."""

    def cost(group: int) -> float:
        share = work.share(block_columns * group)
        last = math.ceil(share) if share <= _MOST else _MOST * math.ceil(share / _MOST)
        # the busiest multiprocessor has the bandwidth that others have left
        turns = max(_FEWEST, (last + share) / 2)
        # of equal ones the group with more programs hides more latency
        blocks = group * block_columns / 64
        return turns * (blocks + 1.5 + work.rank / 128) + blocks / 8

    return min(groups, key=cost)


def may_start_early(work: Work, columns: int) -> bool:
    """Whether an expand of so many columns a program may start beside the shrink. A few programs
    would all start where the shrink has none, and leave the others idle when it is done."""
    return work.share(columns) > _FEWEST
