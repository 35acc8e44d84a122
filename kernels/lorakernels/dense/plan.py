"""Launch parameters of the dense kernels, from shapes and measured constants alone: the same for
every replay of a graph, whatever adapters a batch has."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lorakernels.batch.metadata import MIN_TILE_ROWS, max_tiles, tile_height
from lorakernels.common.sizes import power_of_2, power_of_2_below
from lorakernels.runtime.tuning import DEFAULT, DenseTuning, Tuning

# values of A that a program of a look-up has in flight
_LOOKED_UP = 2048


@dataclass(frozen=True, slots=True)
class DenseShape:
    """What a plan depends on: the sizes of a batch and a layer, and the constants measured on
    the family of their GPU."""

    num_rows: int
    in_features: int
    slice_widths: tuple[int, ...]
    rank: int
    # bytes of one element of x, A, B and out
    itemsize: int
    tuning: Tuning = field(default=DEFAULT, repr=False)
    # whether the shrink runs beside the base product, which hides it
    beside: bool = False

    @property
    def ranks_of_all_slices(self) -> int:
        return len(self.slice_widths) * self.rank

    @property
    def height(self) -> int:
        return tile_height(self.num_rows, self.tuning)

    @property
    def planned(self) -> DenseShape:
        """The shape whose plan this one takes: itself, unless all batches take one plan."""
        rows = self.tuning.dense.planned_rows
        return self if rows is None else replace(self, num_rows=rows)


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


@dataclass(frozen=True, slots=True)
class ExpandPlan:
    block_m: int
    block_n: int
    block_r: int
    # column blocks that one program computes one after the other
    group: int
    num_warps: int
    num_stages: int


def tile_programs(shape: DenseShape, capacity: int) -> int:
    """Size of a grid's tile axis; `capacity` is the number of tiles that the tables can hold."""
    full = -(-shape.num_rows // shape.height)
    return min(shape.num_rows, full + shape.tuning.dense.partial_tiles, capacity)


def looked_up_ranks(shape: DenseShape) -> int:
    """Ranks that a program of a look-up takes."""
    return min(_LOOKED_UP // shape.height, max(16, power_of_2(shape.rank)))


def plan_shrink(shape: DenseShape) -> ShrinkPlan:
    shape = shape.planned
    tuning = shape.tuning.dense
    ranks, height = shape.ranks_of_all_slices, shape.height
    prefill = height >= tuning.prefill_height
    if prefill:
        block_n = min(64 if ranks < 256 else 128, power_of_2(ranks))
        block_k = 128 if block_n <= 32 else 64
    else:
        block_n = min(16 if shape.rank <= 16 else 32, power_of_2(ranks))
        block_k = 256 if _is_deep(shape) else 128
    block_n = max(16, block_n)
    if shape.itemsize == 4:
        # fp32 has no tensor-core path: smaller tiles avoid spills
        block_n, block_k = min(block_n, 32), 32
    chunks, full_tiles = -(-ranks // block_n), -(-shape.num_rows // height)
    splits = min(
        _most_splits(shape, tuning),
        tuning.programs // max(1, full_tiles * chunks),
        -(-shape.in_features // block_k),
    )
    if shape.beside:
        splits = max(1, min(splits, _most_splits_beside(shape, tuning, full_tiles, chunks)))
    return ShrinkPlan(
        block_n=block_n,
        block_k=block_k,
        splits=power_of_2_below(splits),
        trigger_early=not prefill,
        num_warps=8 if prefill else 4,
        # many thin stages hide more latency in less shared memory than few thick ones
        num_stages=5 if prefill and (block_n, block_k) == (64, 64) else 3,
    )


def _most_splits(shape: DenseShape, tuning: DenseTuning) -> int:
    """The number of split-K partials beyond which the expand, which reads them once for each
    group of columns, loses what the shrink gains."""
    if shape.height >= tuning.prefill_height:
        return min(8, 512 // shape.ranks_of_all_slices)
    if shape.height > MIN_TILE_ROWS:
        return shape.in_features // (1024 if _is_wide(shape) else 512)
    return 32 if _is_deep(shape) and shape.rank <= 16 else 16


def _most_splits_beside(
    shape: DenseShape, tuning: DenseTuning, full_tiles: int, chunks: int
) -> int:
    """The number of split-K partials of a shrink that is hidden: as many programs as finish in
    time, because more of them delay the base product and leave the expand more to read."""
    tiles = max(1, full_tiles, min(shape.num_rows, tuning.usual_slots))
    programs = min(tuning.most_programs_beside, tuning.programs_beside * tiles)
    return min(tuning.splits_beside * tiles, programs // (tiles * chunks))


def plan_expand(shape: DenseShape) -> ExpandPlan:
    shape = shape.planned
    height = shape.height
    block_r = min(128, max(16, power_of_2(shape.rank)))
    if shape.itemsize == 4:
        return ExpandPlan(min(height, 32), 64, min(block_r, 32), 1, 4, 1)
    if height == 32 and 64 < shape.rank <= block_r:
        group = min(8, _group_of_a_wave(shape, height, 64))
        if group > 1:
            return ExpandPlan(height, 64, block_r, group, 4, 3)
    if shape.rank > 64:
        # a wide block of B does not fit into registers beside the output's, and a rank beyond
        # one block cannot stay on chip while columns stream by
        return ExpandPlan(min(height, 64), 64 if height == 32 else 128, block_r, 1, 8, 1)
    if height == MIN_TILE_ROWS:
        return ExpandPlan(height, 256, block_r, 1, 8, 1)
    if height < shape.tuning.dense.prefill_height:
        if _is_wide(shape):
            group = min(8, _group_of_a_wave(shape, height, 64))
            return ExpandPlan(height, 64, block_r, group, 4, 3)
        return ExpandPlan(height, 128, block_r, 2 if _is_deep(shape) else 1, 4, 3)
    if _is_wide(shape):
        return ExpandPlan(64, 128, block_r, min(12, _group_of_a_wave(shape, 64, 128)), 4, 3)
    return ExpandPlan(64, 64, block_r, 8, 4, 3)


def _group_of_a_wave(shape: DenseShape, block_m: int, block_n: int) -> int:
    """Column blocks for each program if all programs are to run at once."""
    blocks = sum(-(-width // block_n) for width in shape.slice_widths)
    programs = blocks * -(-shape.num_rows // block_m)
    return max(1, -(-programs // shape.tuning.dense.programs))


def _is_deep(shape: DenseShape) -> bool:
    return shape.in_features >= shape.tuning.dense.deep


def _is_wide(shape: DenseShape) -> bool:
    return max(shape.slice_widths) > shape.tuning.dense.wide


def plan_shrunk(shape: DenseShape, num_slots: int) -> tuple[int, int, int]:
    """[splits, padded rows of all tiles, slices * rank] of the shrink output of a batch."""
    padded_rows = max_tiles(shape.num_rows, num_slots, shape.height) * shape.height
    return (plan_shrink(shape).splits, padded_rows, shape.ranks_of_all_slices)


def largest_shrunk(
    shape: DenseShape, num_slots: int, max_rows: int, exchanged_copies: int = 0
) -> int:
    """Values of the largest shrink output over all batches of at most `max_rows` rows, with so many
    copies of the sum of its split-K partials."""
    # beyond this size there is a single split-K partial, and the shrink output just grows with
    # the batch
    tallest = replace(shape, num_rows=max_rows).height
    several_splits = min(max_rows, shape.tuning.dense.programs * tallest)
    sizes = [*range(1, several_splits, MIN_TILE_ROWS), several_splits, max_rows]
    sizes += [size - 1 for size in sizes if size > 1]
    plans = (plan_shrunk(replace(shape, num_rows=size), num_slots) for size in sizes)
    return max((splits + exchanged_copies) * rows * ranks for splits, rows, ranks in plans)
