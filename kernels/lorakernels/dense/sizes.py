"""Sizes of what a batch keeps in the workspace, and of the largest ones of all batches."""

from __future__ import annotations

import math
from dataclasses import replace

from lorakernels.batch.metadata import MIN_TILE_ROWS, max_tiles
from lorakernels.common.sizes import remembered
from lorakernels.dense.plan import plan_shrink
from lorakernels.dense.shape import DenseShape


@remembered
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
    # a batch of few rows has a tile for each of them, which leaves it fewer partials; and those of
    # least cost may change with each row
    few_rows = max(num_slots, shape.tuning.dense.rows_of_height_32)
    sizes += range(1, min(max_rows, few_rows) + 1)
    plans = (plan_shrunk(replace(shape, num_rows=size), num_slots) for size in sizes)
    return max((splits + exchanged_copies) * rows * ranks for splits, rows, ranks in plans)


def stored_delta(shape: DenseShape) -> tuple[int, int]:
    """[rows, out_features] of a delta that is stored before it is added."""
    return (shape.num_rows, sum(shape.slice_widths))


def may_store(shape: DenseShape) -> bool:
    """Whether a delta is so small that storing it and adding it later is faster than a product
    behind the base product. Never where all batches have one plan, of which some are large."""
    tuning = shape.tuning.dense
    return not tuning.planned_rows and math.prod(stored_delta(shape)) <= tuning.stored_values


def largest_stored(shape: DenseShape, max_rows: int) -> int:
    """Values of the largest delta that is stored, over all batches of at most `max_rows` rows."""
    tuning = shape.tuning.dense
    largest = math.prod(stored_delta(replace(shape, num_rows=max_rows)))
    return 0 if tuning.planned_rows else min(largest, tuning.stored_values)
