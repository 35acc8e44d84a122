"""Launch parameters of the dense kernels, from shapes alone: the same for every replay of a
graph, whatever adapters a batch has. Measured on an H200; docs/benchmarks.md has the figures."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lorakernels.metadata import MIN_TILE_ROWS, max_tiles, tile_height


@dataclass(frozen=True, slots=True)
class DenseShape:
    num_rows: int
    in_features: int
    slice_widths: tuple[int, ...]
    rank: int
    # bytes of one element of x, A, B and out
    itemsize: int

    @property
    def ranks_of_all_slices(self) -> int:
        return len(self.slice_widths) * self.rank


@dataclass(frozen=True, slots=True)
class ShrinkPlan:
    block_n: int
    block_k: int
    planes: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpandPlan:
    block_m: int
    block_n: int
    block_r: int
    # column blocks that one program does one after the other
    group: int
    num_warps: int


# two programs on each of an H200's 132 SMs
_PROGRAMS = 264
# programs that the tile axis has beyond full tiles: most batches have few partial tiles, the
# rest is taken by the stride loop
_PARTIAL_TILES = 8
MAX_PLANES = 16


def tile_programs(num_rows: int, table_size: int) -> int:
    """Size of the grid's tile axis; `table_size` is what the tile tables can hold."""
    full = -(-num_rows // tile_height(num_rows))
    return min(num_rows, full + _PARTIAL_TILES, table_size)


def plan_shrink(shape: DenseShape) -> ShrinkPlan:
    height = tile_height(shape.num_rows)
    block_n = min(128, max(16, _power_of_2(shape.ranks_of_all_slices)))
    block_k = 128 if shape.itemsize == 2 else 32
    if height == 64:
        block_k = 64 if shape.itemsize == 2 else 32
    chunks = -(-shape.ranks_of_all_slices // block_n)
    tiles = -(-shape.num_rows // height)
    planes = max(1, _PROGRAMS // (tiles * chunks))
    planes = min(planes, MAX_PLANES, -(-shape.in_features // block_k))
    return ShrinkPlan(block_n, block_k, planes, 4, 3)


def plan_expand(shape: DenseShape) -> ExpandPlan:
    block_m = tile_height(shape.num_rows)
    block_r = min(128, max(16, _power_of_2(shape.rank)))
    if shape.itemsize == 4:
        block_r = min(block_r, 32)
    return ExpandPlan(block_m, 128, block_r, 1, 4)


def plan_bridge(shape: DenseShape, num_slots: int) -> tuple[int, int, int]:
    """[planes, padded rows of all tiles, slices * rank] of the bridge of a batch."""
    height = tile_height(shape.num_rows)
    padded_rows = max_tiles(shape.num_rows, num_slots, height) * height
    return (plan_shrink(shape).planes, padded_rows, shape.ranks_of_all_slices)


def largest_bridge(shape: DenseShape, num_slots: int, max_rows: int) -> int:
    """Values of the largest bridge over all batches of at most `max_rows` rows."""
    # beyond this size there is one plane only, and the bridge just grows with the batch
    several_planes = min(max_rows, _PROGRAMS * tile_height(max_rows))
    sizes = [*range(1, several_planes, MIN_TILE_ROWS), several_planes, max_rows]
    sizes += [size - 1 for size in sizes if size > 1]
    return max(
        math.prod(plan_bridge(replace(shape, num_rows=size), num_slots)) for size in sizes
    )


def _power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()
