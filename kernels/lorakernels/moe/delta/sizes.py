"""Sizes of what an MoE delta keeps between its two products."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from lorakernels.moe.delta.plan import MoEShape, plan_shrink


def shrunk_shape(shape: MoEShape) -> tuple[int, int, int]:
    """[splits, pairs, slices * rank] of the shrink output of a batch."""
    return (plan_shrink(shape).splits, shape.num_pairs, shape.ranks_of_all_slices)


@cache
def largest_shrunk(shape: MoEShape) -> int:
    """Values of the largest shrink output over all batches of at most as many pairs."""
    # beyond this size there is only one split-K partial
    several = min(shape.num_pairs, shape.tuning.moe.programs * shape.height)
    sizes = (*_last_sizes(shape, several), shape.num_pairs)
    return max(math.prod(shrunk_shape(_at(shape, size))) for size in sizes)


def _last_sizes(shape: MoEShape, several: int) -> Iterator[int]:
    """Of the batches of 1 to `several` pairs, the largest with each number of split-K partials. It
    rises where tiles get higher and where decode ends; in between it falls, so that its steps are
    found by bisection."""
    sizes = range(1, several + 1)

    def regime(size: int) -> tuple[int, bool]:
        return _at(shape, size).height, size > shape.tuning.moe.decode_pairs

    def partials(size: int) -> int:
        return -plan_shrink(_at(shape, size)).splits

    start = 0
    while start < several:
        end = bisect_right(sizes, regime(sizes[start]), lo=start, key=regime)
        while start < end:
            start = bisect_right(sizes, partials(sizes[start]), lo=start, hi=end, key=partials)
            yield sizes[start - 1]


def _at(shape: MoEShape, num_pairs: int) -> MoEShape:
    return replace(shape, num_pairs=num_pairs)
