"""Pairwise sampling of a large product. Pure and deterministic: the same axes, the same points.

Every pair of values of two axes that occurs in an allowed point occurs in the sample. covertable is
used because allpairspy lost allowed pairs in 180 of 200 random products with exclusions: it stops
at the first point that adds no new pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import product

import covertable

# axis -> values: a point that has one of them on each of these axes is left out
Exclusion = Mapping[int, frozenset[int]]


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
    sorted_exclusions = tuple(tuple(sorted(exclusion.items())) for exclusion in exclusions)
    return list(_sampled(tuple(sizes), sorted_exclusions))


# the samples of the shipped cases take seconds, and some processes load these cases several times
@cache
def _sampled(
    sizes: tuple[int, ...], exclusions: tuple[tuple[tuple[int, frozenset[int]], ...], ...]
) -> tuple[tuple[int, ...], ...]:
    factors = {str(axis): list(range(size)) for axis, size in enumerate(sizes)}
    rows = covertable.make(
        factors,
        sorter=covertable.sorters.hash,
        constraints=[_constraint(exclusion) for exclusion in exclusions],
    )
    # with constraints on axes of one value covertable repeats rows
    return tuple(dict.fromkeys(tuple(row[axis] for axis in factors) for row in rows))


def _constraint(exclusion: Iterable[tuple[int, frozenset[int]]]) -> dict[str, object]:
    conditions = [
        {"operator": "in", "left": str(axis), "values": sorted(values)}
        for axis, values in exclusion
    ]
    return {"operator": "not", "condition": {"operator": "and", "conditions": conditions}}
