"""Which way a MoE delta takes and its launch parameters, from shapes alone: the same for every
replay of a graph, whatever adapters a batch has. Measured on an H200; docs/benchmarks.md has the
figures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto

from lorakernels.metadata import MIN_TILE_ROWS
from lorakernels.moe.tiles import max_tiles, tile_height


class MoEPath(Enum):
    """How a delta is computed.

    TWO_KERNEL takes any shape. ONE_SHOT and SMALL_BATCH take ranks up to `MAX_FUSED_RANK`, and
    SMALL_BATCH adds up in fp32 what the other two round to the weights' dtype between the two
    products: there, and only there, results differ in the last bits.
    """

    TWO_KERNEL = auto()
    ONE_SHOT = auto()
    SMALL_BATCH = auto()


# beyond it the ranks of a tile no longer fit beside the output into registers
MAX_FUSED_RANK = 128
# pairs beyond which a program of its own for each pair and block of columns reads too much twice
_SMALL_PAIRS = 32


@dataclass(frozen=True, slots=True)
class MoEShape:
    num_pairs: int
    num_experts: int
    in_features: int
    slice_widths: tuple[int, ...]
    rank: int
    # bytes of one element of x, A, B and out
    itemsize: int

    @property
    def ranks_of_all_slices(self) -> int:
        return len(self.slice_widths) * self.rank

    @property
    def height(self) -> int:
        return tile_height(self.num_pairs, self.num_experts)


@dataclass(frozen=True, slots=True)
class ShrinkPlan:
    block_n: int
    block_k: int
    planes: int
    # let the expand start at once, or when the work is done
    trigger_early: bool
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpandPlan:
    block_n: int
    block_r: int
    # column blocks that one program does one after the other
    group: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class OneShotPlan:
    block_n: int
    block_k: int
    block_r: int
    # programs that share the columns of a slice; each repeats the shrink
    parts: int
    # one program holds both of two slices of equal width, and reads x once for them
    paired: bool
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class SmallBatchPlan:
    block_n: int
    block_k: int
    block_r: int
    num_warps: int


# four programs on each of an H200's 132 SMs: more hide no more latency
_PROGRAMS = 528


def plan_path(shape: MoEShape, wanted: MoEPath | None) -> MoEPath:
    """The way that `shape` takes; `wanted` where it can."""
    if shape.rank > MAX_FUSED_RANK:
        return MoEPath.TWO_KERNEL
    if wanted is not None:
        return wanted
    if shape.num_pairs <= _SMALL_PAIRS and shape.rank <= 64:
        return MoEPath.SMALL_BATCH
    return MoEPath.TWO_KERNEL


def tile_programs(shape: MoEShape, capacity: int) -> int:
    """Size of a grid's tile axis; `capacity` is what the tile tables can hold. Most tiles exist
    only if the pairs are spread that far; a stride loop takes what is beyond."""
    return max(1, min(capacity, expected_tiles(shape)))


def expected_tiles(shape: MoEShape) -> int:
    """Tiles of a batch of four adapters whose pairs spread evenly over the experts."""
    return max_tiles(shape.num_pairs, 4 * shape.num_experts, shape.height)


def plan_shrink(shape: MoEShape) -> ShrinkPlan:
    ranks = shape.ranks_of_all_slices
    height = shape.height
    block_n = max(16, min(64 if height < 64 else 128, _power_of_2(ranks)))
    block_k = 128 if height < 64 else 64
    if shape.itemsize == 4:
        # fp32 has no tensor-core path: smaller tiles keep it out of spills
        block_n, block_k = min(block_n, 32), 32
    programs = tile_programs(shape, expected_tiles(shape)) * -(-ranks // block_n)
    planes = min(8, _PROGRAMS // programs, -(-shape.in_features // block_k))
    return ShrinkPlan(
        block_n=block_n,
        block_k=block_k,
        planes=_power_of_2_below(planes),
        trigger_early=height < 64,
        num_warps=4,
        num_stages=3,
    )


def plan_expand(shape: MoEShape) -> ExpandPlan:
    block_r = min(128, max(16, _power_of_2(shape.rank)))
    if shape.itemsize == 4:
        return ExpandPlan(64, min(block_r, 32), 1, 4, 1)
    if shape.rank > 64:
        return ExpandPlan(128, block_r, 1, 8 if shape.height > 32 else 4, 1)
    if shape.height == MIN_TILE_ROWS:
        return ExpandPlan(256, block_r, 1, 4, 1)
    return ExpandPlan(128, block_r, 4, 4, 3)


def plan_one_shot(shape: MoEShape) -> OneShotPlan:
    block_r = max(16, _power_of_2(shape.rank))
    block_k = 32 if shape.itemsize == 4 else 128
    block_n = 64 if shape.itemsize == 4 else 128
    programs = tile_programs(shape, expected_tiles(shape)) * len(shape.slice_widths)
    widest = -(-max(shape.slice_widths) // block_n)
    parts = max(1, min(_PROGRAMS // programs, widest, 8))
    return OneShotPlan(
        block_n,
        block_k,
        block_r,
        parts,
        len(set(shape.slice_widths)) == 1 and len(shape.slice_widths) == 2,
        4,
        3,
    )


def plan_small_batch(shape: MoEShape) -> SmallBatchPlan:
    block_r = max(1, _power_of_2(shape.rank))
    block_k = max(32, min(1024, 16384 // block_r, _power_of_2(shape.in_features)))
    return SmallBatchPlan(128, block_k, block_r, 4)


def rank_vector(rank: int) -> int:
    """B is read in vectors of this many ranks; see dense/plan.py."""
    return math.gcd(16, rank)


def bridge_shape(shape: MoEShape) -> tuple[int, int, int]:
    """[planes, pairs, slices * rank] of the bridge of a batch."""
    return (plan_shrink(shape).planes, shape.num_pairs, shape.ranks_of_all_slices)


def _power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _power_of_2_below(value: int) -> int:
    return 1 << (max(1, value).bit_length() - 1)
