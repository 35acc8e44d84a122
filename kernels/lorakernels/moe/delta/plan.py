"""Which path a MoE delta takes and its launch parameters, from shapes and measured constants alone:
the same for every replay of a graph, whatever adapters a batch has."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from lorakernels.batch.metadata import MIN_TILE_ROWS
from lorakernels.common.sizes import MAX_GRID_Y, power_of_2, power_of_2_below, remembered
from lorakernels.moe.tiles import tile_height
from lorakernels.runtime.tuning import DEFAULT, Tuning


class MoEPath(Enum):
    """How a delta is computed.

    TWO_KERNEL takes any shape. ONE_SHOT and SMALL_BATCH take ranks up to `MAX_FUSED_RANK`.
    SMALL_BATCH keeps in fp32 what the other two round to the weights' dtype between the two
    products. Each path, and each way to split K, adds up in an order of its own.
    """

    TWO_KERNEL = auto()
    ONE_SHOT = auto()
    SMALL_BATCH = auto()


# beyond this rank the ranks of a tile no longer fit into registers beside the output
MAX_FUSED_RANK = 128


@dataclass(frozen=True, slots=True)
class MoEShape:
    """What a plan depends on: the sizes of a batch and a projection, and the constants measured
    on the family of their GPU."""

    num_pairs: int
    num_experts: int
    in_features: int
    slice_widths: tuple[int, ...]
    rank: int
    # bytes of one element of x, A, B and out
    itemsize: int
    # compared, but left out of the hash, which it would make slow
    tuning: Tuning = field(default=DEFAULT, repr=False, hash=False)

    @property
    def ranks_of_all_slices(self) -> int:
        return len(self.slice_widths) * self.rank

    @property
    def height(self) -> int:
        return tile_height(self.num_pairs, self.num_experts, self.tuning)

    @property
    def planned(self) -> MoEShape:
        """The shape whose plan this one takes: itself, unless all batches take one plan."""
        pairs = self.tuning.moe.planned_pairs
        return self if pairs is None else replace(self, num_pairs=pairs)


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
    # column blocks that one program computes one after the other
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


@remembered
def plan_path(shape: MoEShape, wanted: MoEPath | None) -> MoEPath:
    """The path that `shape` takes: `wanted` if that path supports it."""
    if shape.rank > MAX_FUSED_RANK:
        return MoEPath.TWO_KERNEL
    if wanted is not None:
        return wanted
    shape = shape.planned
    tuning = shape.tuning.moe
    reads = shape.num_pairs * shape.in_features
    is_shallow = shape.in_features <= tuning.small_in_features
    if shape.rank <= 16 and is_shallow and reads <= tuning.small_reads:
        return MoEPath.SMALL_BATCH
    # with few tiles, or high ones, the ranks are better split among several programs
    enough = tuning.many_tiles_of_high_rank if shape.rank > 16 else tuning.many_tiles
    if max(shape.slice_widths) <= tuning.most_columns and expected_tiles(shape) >= enough:
        return MoEPath.ONE_SHOT
    return MoEPath.TWO_KERNEL


@remembered
def tile_programs(shape: MoEShape, capacity: int) -> int:
    """Size of a grid's tile axis; `capacity` is the number of tiles that the tables can hold. Most
    tiles exist only if the pairs are spread that far; a stride loop takes what is beyond."""
    expected, pairs = expected_tiles(shape), _pairs_of_a_bucket(shape)
    # one tile more than programs would double the time of a launch whose programs have one each
    if pairs + 3 * math.sqrt(pairs) > _tiles_of_a_bucket(shape) * shape.height:
        expected += -(-expected // 16)
    return max(1, min(capacity, expected, MAX_GRID_Y))


def expected_tiles(shape: MoEShape) -> int:
    """Tiles of a batch of the usual number of adapters, whose pairs spread at random over the
    experts. A program without a tile is not free: it occupies a multiprocessor until the launch
    before it is done."""
    return _buckets(shape) * _tiles_of_a_bucket(shape)


def _buckets(shape: MoEShape) -> int:
    return min(shape.tuning.moe.usual_slots * shape.num_experts, shape.num_pairs)


def _pairs_of_a_bucket(shape: MoEShape) -> float:
    return shape.num_pairs / max(1, _buckets(shape))


def _tiles_of_a_bucket(shape: MoEShape) -> int:
    pairs = _pairs_of_a_bucket(shape)
    return math.ceil((pairs + math.sqrt(pairs)) / shape.height)


@remembered
def plan_shrink(shape: MoEShape) -> ShrinkPlan:
    shape = shape.planned
    tuning = shape.tuning.moe
    ranks, height = shape.ranks_of_all_slices, shape.height
    few, low = ranks <= 32, height == MIN_TILE_ROWS
    decode = not few and shape.num_pairs <= tuning.decode_pairs
    block_n = max(16, min(32 if height < 64 else 64, power_of_2(ranks)))
    block_k = 128 if block_n <= 32 else 64
    if low and few and shape.in_features >= 4096 and shape.num_pairs > tuning.decode_pairs:
        block_k = 64
    if shape.itemsize == 4:
        # fp32 has no tensor-core path: smaller tiles avoid spills
        block_n, block_k = min(block_n, 32), 32
    programs = expected_tiles(shape) * -(-ranks // block_n)
    most = 8 if low else 4 if few else 2
    wanted = tuning.programs_of_low_rank if few else tuning.programs
    if decode:
        wanted = tuning.programs_of_decode
    # a split-K partial of few steps is over before its loads are under way
    steps = 4 if shape.in_features > 1024 else 2
    splits = min(most, wanted // max(1, programs), shape.in_features // (block_k * steps))
    # with low tiles and wide blocks, three stages leave space for another program
    three = shape.itemsize == 4 or (low and block_k > 64 and not decode)
    if few and height > 32 and shape.itemsize < 4 and programs >= 2 * tuning.programs:
        # several waves of programs: more of them at a time hide more than long steps do
        block_k, three = 64, True
    return ShrinkPlan(block_n, block_k, power_of_2_below(splits), 4, 3 if three else 4)


@remembered
def plan_expand(shape: MoEShape) -> ExpandPlan:
    shape = shape.planned
    tuning = shape.tuning.moe
    block_r = min(128, max(16, power_of_2(shape.rank)))
    if shape.itemsize == 4:
        return ExpandPlan(64, min(block_r, 32), 1, 4, 1)
    if shape.rank > 64:
        # a wide block of B does not fit into registers beside the output's
        return ExpandPlan(128, block_r, 1, 8 if shape.height > 32 else 4, 1)
    widest = power_of_2(max(shape.slice_widths))
    low = shape.height == MIN_TILE_ROWS
    # a program computes several blocks one after the other where there are programs enough
    wide = widest > tuning.most_columns and _programs(shape, 128) >= 2 * tuning.programs
    if wide and shape.height <= 32:
        if low and block_r <= 16 and not _has_tiles_of_one_pair(shape):
            return ExpandPlan(256, block_r, _group(shape, 256), 8, 3)
        return ExpandPlan(128, block_r, 2 if low and block_r > 16 else _group(shape, 128), 4, 3)
    block_n = min(256 if low else 128, max(16, widest))
    waves = _programs(shape, block_n) // tuning.programs
    spare = min(4 if low else 8, widest // block_n, waves)
    if low and spare < 4:
        spare = 1
    return ExpandPlan(
        block_n,
        block_r,
        # with fewer programs to spare, such large groups would leave multiprocessors idle
        _group(shape, block_n) if spare > 5 else power_of_2_below(spare),
        8 if shape.height > 32 and block_r <= 16 else 4,
        3,
    )


def _group(shape: MoEShape, block_n: int) -> int:
    """Blocks of columns for each program, chosen so that the last program has hardly fewer; seven
    comes before eight because it measured better where both divide."""
    blocks = -(-max(shape.slice_widths) // block_n)
    return min((7, 8, 6, 5), key=lambda group: -blocks % group)


def _has_tiles_of_one_pair(shape: MoEShape) -> bool:
    """Whether latency counts more than bandwidth."""
    return shape.num_pairs <= expected_tiles(shape)


def _programs(shape: MoEShape, block_n: int) -> int:
    """Programs of an expand that compute one block of columns each."""
    return expected_tiles(shape) * sum(-(-width // block_n) for width in shape.slice_widths)


@remembered
def plan_one_shot(shape: MoEShape) -> OneShotPlan:
    shape = shape.planned
    tuning = shape.tuning.moe
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
        if block_r > 16 or expected_tiles(shape) < tuning.many_tiles:
            return OneShotPlan(128, 128, block_r, 1, False, 4, 3, 3)
        if slices > 1 and programs >= tuning.many_programs:
            return OneShotPlan(64, 128, block_r, 1, False, 1, 3, 3)
        return OneShotPlan(128, 128, block_r, 1, False, 2, 3, 3)
    if block_r > 16:
        return _one_shot_of_high_rank(shape, block_r)
    parts = _parts(shape)
    # a warp has so little to do that a second pair of warps only adds instructions
    if _has_tiles_of_one_pair(shape) or (slices > 1 and programs < tuning.many_programs):
        return OneShotPlan(128, 128, block_r, parts, False, 2, 4, 3)
    if slices == 1:
        return OneShotPlan(256, 128, block_r, parts, False, 2, 4, 3)
    return OneShotPlan(64, 128, block_r, 1, False, 1, 3, 3)


def _one_shot_of_high_rank(shape: MoEShape, block_r: int) -> OneShotPlan:
    tuning = shape.tuning.moe
    is_single = len(shape.slice_widths) == 1
    if block_r == 64 and is_single and expected_tiles(shape) >= tuning.narrow_block_tiles:
        # how far each of many small programs fetches ahead decides how many of them fit
        stages = 4 if shape.num_pairs < tuning.deep_pipeline_pairs else 3
        return OneShotPlan(64, 128, block_r, 1, False, 2, stages, stages)
    return OneShotPlan(128, 128, block_r, _parts(shape), False, 4, 3, 3)


def _parts(shape: MoEShape) -> int:
    """Programs that share a slice's columns where tiles alone would not fill the device."""
    programs = expected_tiles(shape) * len(shape.slice_widths)
    share = shape.tuning.moe.part_programs // max(1, programs)
    return max(1, min(8, share, max(shape.slice_widths) // 256))


@remembered
def plan_small_batch(shape: MoEShape) -> SmallBatchPlan:
    block_r = power_of_2(shape.rank)
    deep = shape.in_features > 1024
    block_k = min(512 if deep else 256, 16384 // block_r, power_of_2(shape.in_features))
    return SmallBatchPlan(256 if block_r <= 16 else 128, block_k, block_r, 8 if deep else 4)
