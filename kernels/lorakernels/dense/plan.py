"""Launch parameters of the dense kernels, from shapes and measured constants alone: the same for
every replay of a graph, whatever adapters a batch has. Those of the expand are in
`expand_plan.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lorakernels.batch.metadata import MIN_TILE_ROWS
from lorakernels.common.sizes import power_of_2, power_of_2_below, remembered
from lorakernels.dense.expand_plan import plan_expand
from lorakernels.dense.few_rows import best_splits
from lorakernels.dense.one_wave import best_wave, may_start_early
from lorakernels.dense.registers import reads_all_ranks, registers_of_shrink
from lorakernels.dense.shape import MODERATE_RANKS, DenseShape
from lorakernels.runtime.tuning import DenseTuning

# numbers of split-K partials of a prefill: each is a variant of the expand, which is compiled
_SPLITS_OF_A_WAVE = (1, 2, 3, 4, 6, 8)
# values of A that a program of a look-up has in flight
_LOOKED_UP = 2048


@dataclass(frozen=True, slots=True)
class ShrinkPlan:
    block_n: int
    block_k: int
    splits: int
    # whether the expand may start at once, which hides latency, or when the shrink is done:
    # before that it would only take up multiprocessors and bandwidth
    trigger_early: bool
    num_warps: int
    num_stages: int
    # whether A is read at all ranks of the buffers, before it is known how many an adapter has
    reads_all_ranks: bool = False
    # most registers of a thread; None: the compiler chooses
    registers: int | None = None


@dataclass(frozen=True, slots=True)
class AddPlan:
    block_m: int
    block_n: int
    num_warps: int


# of a decode batch most tiles have few rows
ADD_PLAN = AddPlan(block_m=4, block_n=256, num_warps=4)


@remembered
def tile_programs(shape: DenseShape, capacity: int) -> int:
    """Size of a grid's tile axis; `capacity` is the number of tiles that the tables can hold."""
    full = -(-shape.num_rows // shape.height)
    return min(shape.num_rows, full + shape.tuning.dense.partial_tiles, capacity)


def looked_up_ranks(shape: DenseShape) -> int:
    """Ranks that a program of a look-up takes."""
    return min(_LOOKED_UP // shape.height, max(16, power_of_2(shape.rank)))


@remembered
def plan_shrink(shape: DenseShape) -> ShrinkPlan:
    shape = shape.planned
    if shape.is_one_wave and not shape.beside:
        return _shrink_of_a_wave(shape)
    tuning, height = shape.tuning.dense, shape.height
    block = _shrink_block(shape)
    chunks, full_tiles = -(-shape.ranks_of_all_slices // block.n), -(-shape.num_rows // height)
    steps = -(-shape.in_features // block.k)
    if shape.beside:
        # no more than the shrink has that nothing hides: it is what the workspace is planned for
        most = plan_shrink(replace(shape, beside=False)).splits
        most = max(1, min(most, _most_splits_beside(shape, tuning, full_tiles, chunks)))
    else:
        most = _most_splits(shape, block, chunks)
    splits = _number_of_splits(min(most, steps), block)
    work, registers = shape.fewest_work, None
    if shape.may_limit_registers and not shape.beside:
        registers = registers_of_shrink(work, chunks * splits, block.num_warps)
    return ShrinkPlan(
        block_n=block.n,
        block_k=block.k,
        splits=splits,
        trigger_early=height < tuning.prefill_height,
        num_warps=block.num_warps,
        num_stages=block.num_stages,
        reads_all_ranks=reads_all_ranks(work, registers),
        registers=registers,
    )


def _shrink_of_a_wave(shape: DenseShape) -> ShrinkPlan:
    work, expand = shape.work, plan_expand(shape)
    wave = best_wave(work)
    return ShrinkPlan(
        block_n=wave.ranks,
        block_k=wave.features,
        splits=wave.splits,
        trigger_early=expand.group == 1 or may_start_early(work, expand.block_n * expand.group),
        num_warps=4,
        num_stages=wave.num_stages,
    )


def _number_of_splits(most: int, block: _ShrinkBlock) -> int:
    if block.resident is None:
        return power_of_2_below(most)
    return max(number for number in _SPLITS_OF_A_WAVE if number <= max(1, most))


@dataclass(frozen=True, slots=True)
class _ShrinkBlock:
    """What a program of the shrink computes: `n` ranks, `k` features in each step."""

    n: int
    k: int
    num_warps: int
    num_stages: int
    # programs that one multiprocessor holds, by their shared memory; None: no such wave is filled,
    # because latency counts
    resident: int | None = None


def _shrink_block(shape: DenseShape) -> _ShrinkBlock:
    tuning, ranks = shape.tuning.dense, shape.ranks_of_all_slices
    prefill = shape.height >= tuning.prefill_height
    n = max(16, min(16 if shape.rank <= 16 and not prefill else 32, power_of_2(ranks)))
    if shape.itemsize == 4:
        # fp32 has no tensor-core path: smaller blocks avoid spills
        return _ShrinkBlock(n, 32, 8 if shape.height >= 64 else 4, 3)
    if prefill:
        return _prefill_block(shape, ranks)
    if shape.beside and shape.height > MIN_TILE_ROWS and ranks <= tuning.dual_ranks:
        # it is done with as many programs before the base product is, in few long steps
        return _ShrinkBlock(max(16, min(32, power_of_2(ranks))), 256, 4, 3)
    return _ShrinkBlock(n, 256 if shape.is_deep else 128, 4, 3)


def _prefill_block(shape: DenseShape, ranks: int) -> _ShrinkBlock:
    if ranks <= 32:
        return _ShrinkBlock(max(16, power_of_2(ranks)), 128, 8, 3, resident=1)
    # of 129 to 192 ranks, the second block of 128 would be idle for the most part
    n = 64 if ranks <= 64 or 128 < ranks <= 192 else 128
    programs = shape.usual_tiles * -(-ranks // n)
    if 8 * programs <= 7 * shape.tuning.dense.multiprocessors:
        # many thin stages hide more latency in less shared memory than few thick ones
        return _ShrinkBlock(n, 64, 8, 5, resident=1)
    # close to a wave of such programs, a few tiles more would take as long as a second one
    return _ShrinkBlock(n, 64, 4, 4 if n == 64 else 3, resident=2)


def _most_splits(shape: DenseShape, block: _ShrinkBlock, chunks: int) -> int:
    """The number of split-K partials beyond which the expand, which reads them once for each
    group of columns, loses what the shrink gains."""
    tuning = shape.tuning.dense
    if block.resident is not None:
        # one wave: the programs of a second one would take as long again
        programs = shape.usual_tiles * chunks
        most = max(2, shape.in_features // (10 * shape.ranks_of_all_slices))
        return min(8, most, tuning.multiprocessors * block.resident // programs)
    full_tiles = -(-shape.num_rows // shape.height)
    several = tuning.programs // max(1, full_tiles * chunks)
    if shape.height >= tuning.prefill_height:
        return min(8, 512 // shape.ranks_of_all_slices, several)
    if shape.itemsize == 2 and (shape.height > MIN_TILE_ROWS or shape.rank > MODERATE_RANKS):
        return min(several, _splits_of_few_rows(shape, block))
    if shape.height > MIN_TILE_ROWS:
        return min(several, shape.in_features // (1024 if shape.is_wide else 512))
    return min(several, 32 if shape.is_deep and shape.rank <= 16 else 16)


def _splits_of_few_rows(shape: DenseShape, block: _ShrinkBlock) -> int:
    # a step may have no rows at all
    expand, rows = plan_expand(shape), max(1, shape.num_rows) / shape.tuning.dense.usual_slots
    # those of a tile, if all adapters have equally many
    rows = max(1.0, rows / math.ceil(rows / shape.height))
    return best_splits(shape.work_of_few_rows, rows, block.n, expand.block_n * expand.group)


def _most_splits_beside(
    shape: DenseShape, tuning: DenseTuning, full_tiles: int, chunks: int
) -> int:
    """The number of split-K partials of a shrink that is hidden: as many programs as finish in
    time, because more of them delay the base product and leave the expand more to read."""
    tiles = max(1, full_tiles, min(shape.num_rows, tuning.usual_slots))
    programs = min(tuning.most_programs_beside, tuning.programs_beside * tiles)
    return min(tuning.splits_beside * tiles, programs // (tiles * chunks))
