"""Which way a MoE delta takes and its launch parameters, from shapes alone: the same for every
replay of a graph, whatever adapters a batch has. Measured on an H200; docs/benchmarks.md has the
figures."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cache

from lorakernels.batch.metadata import MIN_TILE_ROWS
from lorakernels.common.sizes import power_of_2, power_of_2_below
from lorakernels.moe.tiles import USUAL_SLOTS, tile_height


class MoEPath(Enum):
    """How a delta is computed.

    TWO_KERNEL takes any shape. ONE_SHOT and SMALL_BATCH take ranks up to `MAX_FUSED_RANK`, and
    SMALL_BATCH adds up in fp32 what the other two round to the weights' dtype between the two
    products. Each path, and each way to split K, adds up in an order of its own.
    """

    TWO_KERNEL = auto()
    ONE_SHOT = auto()
    SMALL_BATCH = auto()


# beyond it the ranks of a tile no longer fit beside the output into registers
MAX_FUSED_RANK = 128


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
    splits: int
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
    # of the loop over K, and of the one over columns
    num_stages: int
    column_stages: int


@dataclass(frozen=True, slots=True)
class SmallBatchPlan:
    block_n: int
    block_k: int
    block_r: int
    num_warps: int


# programs on an H200's 132 SMs that are enough for a split-K partial, or a block of columns, of its own
_PROGRAMS = 560
_PROGRAMS_OF_LOW_RANK = 300
_PROGRAMS_OF_DECODE = 256
# pairs of a decode batch
_DECODE_PAIRS = 16
# a program of a one-shot kernel that sweeps more columns leaves multiprocessors idle at the end
_MOST_COLUMNS = 4096
# tiles that keep all multiprocessors busy by themselves
_MANY_TILES = 256
# programs of one slice each with so little to do that one warp does it
_MANY_PROGRAMS = 1000
# elements of x that the programs of a small batch may read, each for itself
_SMALL_READS = 1 << 17


def plan_path(shape: MoEShape, wanted: MoEPath | None) -> MoEPath:
    """The way that `shape` takes; `wanted` where it can."""
    if shape.rank > MAX_FUSED_RANK:
        return MoEPath.TWO_KERNEL
    if wanted is not None:
        return wanted
    reads = shape.num_pairs * shape.in_features
    if shape.rank <= 16 and shape.in_features <= 2048 and reads <= _SMALL_READS:
        return MoEPath.SMALL_BATCH
    # with few tiles, or high ones, the ranks are better split among several programs
    enough = 128 if shape.rank > 16 else _MANY_TILES
    if max(shape.slice_widths) <= _MOST_COLUMNS and expected_tiles(shape) >= enough:
        return MoEPath.ONE_SHOT
    return MoEPath.TWO_KERNEL


def tile_programs(shape: MoEShape, capacity: int) -> int:
    """Size of a grid's tile axis; `capacity` is what the tile tables can hold. Most tiles exist
    only if the pairs are spread that far; a stride loop takes what is beyond."""
    expected, pairs = expected_tiles(shape), _pairs_of_a_bucket(shape)
    # one tile more than programs would double the time of a launch whose programs have one each
    if pairs + 3 * math.sqrt(pairs) > _tiles_of_a_bucket(shape) * shape.height:
        expected += -(-expected // 16)
    return max(1, min(capacity, expected))


def expected_tiles(shape: MoEShape) -> int:
    """Tiles of a batch of four adapters whose pairs spread at random over the experts. A program
    without a tile is not free: it holds a place until the launch before it is done."""
    return _buckets(shape) * _tiles_of_a_bucket(shape)


def _buckets(shape: MoEShape) -> int:
    return min(USUAL_SLOTS * shape.num_experts, shape.num_pairs)


def _pairs_of_a_bucket(shape: MoEShape) -> float:
    return shape.num_pairs / max(1, _buckets(shape))


def _tiles_of_a_bucket(shape: MoEShape) -> int:
    pairs = _pairs_of_a_bucket(shape)
    return math.ceil((pairs + math.sqrt(pairs)) / shape.height)


def plan_shrink(shape: MoEShape) -> ShrinkPlan:
    ranks, height = shape.ranks_of_all_slices, shape.height
    few, low = ranks <= 32, height == MIN_TILE_ROWS
    decode = not few and shape.num_pairs <= _DECODE_PAIRS
    block_n = max(16, min(32 if height < 64 else 64, power_of_2(ranks)))
    block_k = 128 if block_n <= 32 else 64
    if low and few and shape.in_features >= 4096 and shape.num_pairs > _DECODE_PAIRS:
        block_k = 64
    if shape.itemsize == 4:
        # fp32 has no tensor-core path: smaller tiles keep it out of spills
        block_n, block_k = min(block_n, 32), 32
    programs = expected_tiles(shape) * -(-ranks // block_n)
    most = 8 if low else 4 if few else 2
    wanted = _PROGRAMS_OF_DECODE if decode else _PROGRAMS_OF_LOW_RANK if few else _PROGRAMS
    # a split-K partial of few steps is over before its loads are under way
    steps = 4 if shape.in_features > 1024 else 2
    splits = min(most, wanted // max(1, programs), shape.in_features // (block_k * steps))
    # with low tiles and wide blocks three stages let another program fit
    three = shape.itemsize == 4 or (low and block_k > 64 and not decode)
    return ShrinkPlan(block_n, block_k, power_of_2_below(splits), 4, 3 if three else 4)


def plan_expand(shape: MoEShape) -> ExpandPlan:
    block_r = min(128, max(16, power_of_2(shape.rank)))
    if shape.itemsize == 4:
        return ExpandPlan(64, min(block_r, 32), 1, 4, 1)
    if shape.rank > 64:
        # a wide block of B would not fit beside the output's into registers
        return ExpandPlan(128, block_r, 1, 8 if shape.height > 32 else 4, 1)
    widest = power_of_2(max(shape.slice_widths))
    low = shape.height == MIN_TILE_ROWS
    # a program does several blocks one after the other where there are programs enough
    wide = widest > _MOST_COLUMNS and _programs(shape, 128) >= 2 * _PROGRAMS
    if wide and shape.height <= 32:
        if low and block_r <= 16 and not _has_tiles_of_one_pair(shape):
            return ExpandPlan(256, block_r, _group(shape, 256), 8, 3)
        return ExpandPlan(128, block_r, 2 if low and block_r > 16 else _group(shape, 128), 4, 3)
    block_n = min(256 if low else 128, max(16, widest))
    spare = min(4 if low else 8, widest // block_n, _programs(shape, block_n) // _PROGRAMS)
    if low and spare < 4:
        spare = 1
    return ExpandPlan(
        block_n,
        block_r,
        # with less to spare, groups that large would leave multiprocessors without a program
        _group(shape, block_n) if spare > 5 else power_of_2_below(spare),
        8 if shape.height > 32 and block_r <= 16 else 4,
        3,
    )


def _group(shape: MoEShape, block_n: int) -> int:
    """Blocks of columns, so many that the last program has hardly fewer; seven before eight,
    which measured better where both divide."""
    blocks = -(-max(shape.slice_widths) // block_n)
    return min((7, 8, 6, 5), key=lambda group: -blocks % group)


def _has_tiles_of_one_pair(shape: MoEShape) -> bool:
    """Latency counts then."""
    return shape.num_pairs <= expected_tiles(shape)


def _programs(shape: MoEShape, block_n: int) -> int:
    """Of an expand whose programs do one block of columns each."""
    return expected_tiles(shape) * sum(-(-width // block_n) for width in shape.slice_widths)


def plan_one_shot(shape: MoEShape) -> OneShotPlan:
    block_r = max(16, power_of_2(shape.rank))
    slices = len(shape.slice_widths)
    programs = expected_tiles(shape) * slices
    if shape.itemsize == 4:
        return OneShotPlan(64, 32, block_r, 1, False, 4, 2, 2)
    if shape.height > 32:
        twin = slices == 2 and shape.slice_widths[0] == shape.slice_widths[1] and block_r <= 32
        stages = 4 if twin or block_r == 16 else 3
        return OneShotPlan(128, 128, block_r, 1, twin, 4, stages, stages)
    if shape.height == 32:
        if block_r > 16 or expected_tiles(shape) < _MANY_TILES:
            return OneShotPlan(128, 128, block_r, 1, False, 4, 3, 3)
        if slices > 1 and programs >= _MANY_PROGRAMS:
            return OneShotPlan(64, 128, block_r, 1, False, 1, 3, 3)
        return OneShotPlan(128, 128, block_r, 1, False, 2, 3, 3)
    if block_r > 16:
        return _one_shot_of_high_rank(shape, block_r)
    parts = _parts(shape)
    # a warp has so little to do that a second pair of them only adds to the instructions
    if _has_tiles_of_one_pair(shape) or (slices > 1 and programs < _MANY_PROGRAMS):
        return OneShotPlan(128, 128, block_r, parts, False, 2, 4, 3)
    if slices == 1:
        return OneShotPlan(256, 128, block_r, parts, False, 2, 4, 3)
    return OneShotPlan(64, 128, block_r, 1, False, 1, 3, 3)


def _one_shot_of_high_rank(shape: MoEShape, block_r: int) -> OneShotPlan:
    if block_r == 64 and len(shape.slice_widths) == 1 and expected_tiles(shape) >= 500:
        # how far each of many small programs may fetch ahead decides how many fit
        stages = 4 if shape.num_pairs < 2048 else 3
        return OneShotPlan(64, 128, block_r, 1, False, 2, stages, stages)
    return OneShotPlan(128, 128, block_r, _parts(shape), False, 4, 3, 3)


def _parts(shape: MoEShape) -> int:
    """Programs that share a slice's columns where tiles alone would not fill the device."""
    programs = expected_tiles(shape) * len(shape.slice_widths)
    return max(1, min(8, 264 // max(1, programs), max(shape.slice_widths) // 256))


def plan_small_batch(shape: MoEShape) -> SmallBatchPlan:
    block_r = power_of_2(shape.rank)
    deep = shape.in_features > 1024
    block_k = min(512 if deep else 256, 16384 // block_r, power_of_2(shape.in_features))
    return SmallBatchPlan(256 if block_r <= 16 else 128, block_k, block_r, 8 if deep else 4)


def shrunk_shape(shape: MoEShape) -> tuple[int, int, int]:
    """[splits, pairs, slices * rank] of the shrink output of a batch."""
    return (plan_shrink(shape).splits, shape.num_pairs, shape.ranks_of_all_slices)


@cache
def largest_shrunk(shape: MoEShape) -> int:
    """Values of the largest shrink output over all batches of at most as many pairs."""
    # split-K partials rise where tiles get higher and where decode ends, and fall in between; beyond this
    # size there is one only
    several = min(shape.num_pairs, _PROGRAMS * shape.height)
    sizes = (*range(1, several + 1), shape.num_pairs)
    return max(math.prod(shrunk_shape(replace(shape, num_pairs=size))) for size in sizes)
