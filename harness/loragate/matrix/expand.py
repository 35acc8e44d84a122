"""Rows of a group to cases: product, exclusions, inclusions, sample. Pure.

A group without `sample` is a full product and may have at most MAX_BLIND cases: a larger one is
either a mistake or nobody's reading matter, so it has to say how far it may be sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from loragate.matrix.case import Case, Site
from loragate.matrix.document import Document, Loc
from loragate.matrix.problems import Problem
from loragate.matrix.rules import case_defaults
from loragate.matrix.sample import Exclusion, full_product, pairwise
from loragate.matrix.schema import Axes, GroupModel

MAX_BLIND = 128


@dataclass(frozen=True, slots=True)
class Group:
    """A sound group: `rows` and `include` already carry the file's defaults."""

    loc: Loc
    site: Site
    model: GroupModel
    rows: tuple[Axes, ...]
    exclude: tuple[Axes, ...]
    include: tuple[Axes, ...]


def with_defaults(entry: Axes, defaults: Axes, site: Site) -> Axes:
    values = case_defaults(site) | defaults.values | entry.values
    return replace(entry, values=dict(sorted(values.items())))


def expand(group: Group, document: Document) -> list[tuple[Case, Loc]]:
    """The cases of a group, each with the entry it comes from; problems go to the document."""
    points: list[tuple[dict[str, Any], Loc]] = []
    if not _is_bounded(group, document):
        return []
    for row in group.rows:
        of_row = list(_row_points(group, row))
        if not of_row:
            document.problems.append(document.problem(row.loc, "every point of it is excluded"))
        points += [(point, row.loc) for point in of_row]
    if not _is_sized(group, len(points), document):
        return []
    for entry in group.include:
        points.append(({axis: value for axis, (value,) in entry.values.items()}, entry.loc))
    return [(_case(group, point), loc) for point, loc in points]


def _row_points(group: Group, row: Axes) -> Iterator[dict[str, Any]]:
    axes = list(row.values)
    exclusions = _by_index(group.exclude, row)
    sizes = [len(row.values[axis]) for axis in axes]
    choose = pairwise if group.model.sample else full_product
    for indices in choose(sizes, exclusions):
        yield {axis: row.values[axis][i] for axis, i in zip(axes, indices, strict=True)}


def _by_index(exclude: Sequence[Axes], row: Axes) -> list[Exclusion]:
    """The exclusions in terms of the row's axes, without those about axes of other sites; one
    that cannot match has an axis of nothing."""
    axes = list(row.values)
    return [
        {
            axes.index(axis): frozenset(
                i for i, value in enumerate(row.values[axis]) if value in values
            )
            for axis, values in entry.values.items()
        }
        for entry in exclude
        if entry.values.keys() <= row.values.keys()
    ]


def _is_bounded(group: Group, document: Document) -> bool:
    """Refuse a product that is far too large before anybody walks through it."""
    if group.model.sample is not None:
        return True
    size = sum(prod(len(values) for values in row.values.values()) for row in group.rows)
    # exclusions may bring a product down to the bound, but they have to walk through it
    if size <= 64 * MAX_BLIND:
        return True
    document.problems.append(_too_blind(group, size, document))
    return False


def _is_sized(group: Group, size: int, document: Document) -> bool:
    sample = group.model.sample
    if sample is None and size > MAX_BLIND:
        document.problems.append(_too_blind(group, size, document))
        return False
    if sample is not None and size > sample.limit:
        message = f"given {sample.limit}; allowed: at least {size}, which pairwise coverage takes"
        document.problems.append(document.problem((*group.loc, "sample", "limit"), message))
        return False
    return True


def _too_blind(group: Group, size: int, document: Document) -> Problem:
    message = (
        f"given a product of {size} cases; allowed: at most {MAX_BLIND}, "
        "or a pairwise sample of it: `sample: {limit: N}`"
    )
    return document.problem((*group.loc, "rows"), message)


def _case(group: Group, point: dict[str, Any]) -> Case:
    return Case(
        site=group.site,
        tier=group.model.tier,
        oracles=group.model.oracles,
        timeout_s=group.model.timeout_s,
        **point,
    )
