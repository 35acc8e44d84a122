"""Pairwise sampling of a large product. Pure and deterministic: the same axes, the same points.

Every pair of values of two axes that occurs in an allowed point occurs in the sample. covertable is
used because allpairspy lost allowed pairs in 180 of 200 random products with exclusions: it stops
at the first point that adds no new pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations, product
from pathlib import Path

import covertable

from loragate.matrix.sample_cache import Points, kept

# pairs of values from which on a sample takes longer than reading a file
_MANY_PAIRS = 400

# axis -> values: a point that has one of them on each of these axes is left out
Exclusion = Mapping[int, frozenset[int]]
# the same as sorted pairs, whose text is the same in every process
Conditions = tuple[tuple[int, tuple[int, ...]], ...]


def is_excluded(point: Sequence[int], exclusions: Sequence[Exclusion]) -> bool:
    return any(
        all(point[axis] in values for axis, values in exclusion.items()) for exclusion in exclusions
    )


def full_product(sizes: Sequence[int], exclusions: Sequence[Exclusion]) -> list[tuple[int, ...]]:
    """Every allowed point, the last axis running fastest."""
    points = product(*map(range, sizes))
    return [point for point in points if not is_excluded(point, exclusions)]


def pairwise(sizes: Sequence[int], exclusions: Sequence[Exclusion]) -> list[tuple[int, ...]]:
    """A few allowed points that cover every allowed pair; none where no point is allowed.

    `sizes` are the numbers of values of two axes or more.
    """
    conditions = tuple(
        tuple((axis, tuple(sorted(values))) for axis, values in sorted(exclusion.items()))
        for exclusion in exclusions
    )
    return list(_sampled(tuple(sizes), conditions))


# some processes load the same cases several times
@cache
def _sampled(sizes: tuple[int, ...], exclusions: tuple[Conditions, ...]) -> Points:
    if sum(a * b for a, b in combinations(sizes, 2)) < _MANY_PAIRS:
        return _computed(sizes, exclusions)
    return kept(sizes, exclusions, Path(__file__), lambda: _computed(sizes, exclusions))


def _computed(sizes: tuple[int, ...], exclusions: tuple[Conditions, ...]) -> Points:
    rows = covertable.make(
        # axes without names, which it would take apart at dots
        [list(range(size)) for size in sizes],
        sorter=covertable.sorters.hash,
        constraints=[_constraint(exclusion) for exclusion in exclusions],
    )
    # with constraints on axes of one value covertable repeats rows
    return tuple(dict.fromkeys(map(tuple, rows)))


def _constraint(exclusion: Conditions) -> dict[str, object]:
    conditions = [
        {"operator": "in", "left": axis, "values": list(values)} for axis, values in exclusion
    ]
    return {"operator": "not", "condition": {"operator": "and", "conditions": conditions}}
