"""How the expand is launched: blocks of columns, of which a program may compute several."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lorakernels.common.sizes import power_of_2, remembered
from lorakernels.dense.few_rows import best_columns
from lorakernels.dense.one_wave import FEW_RANKS, best_group
from lorakernels.dense.prefill import (
    BYTES_OF_TALL_BLOCKS,
    STAGES,
    Blocks,
    small_blocks,
    tall_blocks,
    wide_blocks,
)
from lorakernels.dense.registers import registers_of_expand
from lorakernels.dense.shape import MODERATE_RANKS, DenseShape

# ranks of the shrink output that a program of the expand keeps while columns stream by
_MOST_RANKS_ON_CHIP = 256


@dataclass(frozen=True, slots=True)
class ExpandPlan:
    block_m: int
    block_n: int
    block_r: int
    # column blocks that one program computes one after the other
    group: int
    num_warps: int
    num_stages: int
    registers: int | None = None


@remembered
def plan_expand(shape: DenseShape) -> ExpandPlan:
    shape = shape.planned
    plan = _plan_expand(shape)
    if plan.group > 1 or not shape.may_limit_registers:
        return plan
    registers = registers_of_expand(shape.fewest_work, plan.block_n, plan.num_warps)
    return replace(plan, registers=registers)


def _plan_expand(shape: DenseShape) -> ExpandPlan:
    height, rank = shape.height, shape.rank
    block_r = max(16, power_of_2(rank))
    if shape.itemsize == 4:
        return ExpandPlan(min(height, 32), 64, min(block_r, 32), 1, 4, 1)
    if rank > _MOST_RANKS_ON_CHIP:
        # a rank beyond one block cannot stay on chip while columns stream by
        block_n = 64 if height == 32 else 128
        return ExpandPlan(min(height, 64), block_n, min(128, block_r), 1, 8, 1)
    if shape.is_one_wave:
        return _expand_of_a_wave(shape, block_r)
    if height < shape.tuning.dense.prefill_height:
        return _expand_of_few_rows(shape, block_r)
    return _expand_of_prefill(shape, block_r)


def _expand_of_prefill(shape: DenseShape, block_r: int) -> ExpandPlan:
    blocks = _large_blocks(shape, block_r)
    if blocks is None:
        multiprocessors, num_warps = shape.tuning.dense.multiprocessors, 4 if block_r <= 128 else 8
        blocks = small_blocks(shape.slice_widths, shape.num_rows, multiprocessors, num_warps)
    sizes = blocks.rows, blocks.columns, block_r, blocks.group
    return ExpandPlan(*sizes, blocks.num_warps, STAGES)


def _large_blocks(shape: DenseShape, block_r: int) -> Blocks | None:
    tuning, widths = shape.tuning.dense, shape.slice_widths
    if shape.rank <= MODERATE_RANKS:
        return wide_blocks(widths, shape.num_rows, tuning.programs)
    if block_r <= 128 and tuning.shared_bytes >= BYTES_OF_TALL_BLOCKS:
        return tall_blocks(widths, shape.usual_tiles, tuning.multiprocessors)
    return None


def _expand_of_few_rows(shape: DenseShape, block_r: int) -> ExpandPlan:
    columns = best_columns(shape.work_of_few_rows)
    # more ranks than a stage holds are added up in blocks where columns do not stream by
    block_r = min(128, block_r) if columns.group == 1 and shape.height == 16 else block_r
    sizes = columns.block, block_r, columns.group, columns.num_warps, columns.num_stages
    return ExpandPlan(shape.height, *sizes)


def _expand_of_a_wave(shape: DenseShape, block_r: int) -> ExpandPlan:
    work, rank = shape.work, shape.rank
    if rank <= 64 and work.share(128) <= (4 if rank <= 32 else 3):
        # all programs run at once, and what they add to is on its way while the shrink runs
        return ExpandPlan(64, 128, block_r, 1, 4 if rank <= 32 else 8, 1)
    block_n, num_stages = (64, 3) if block_r <= 128 else (32, 4)
    groups = (2, 4) if rank <= FEW_RANKS else (2, 4, 8, 16)
    return ExpandPlan(64, block_n, block_r, best_group(work, block_n, groups), 4, num_stages)
