"""From the rows of a group to its cases: product, exclusions, inclusions, sample. Pure.

A group without `sample` is a full product and may have at most MAX_PRODUCT cases: a larger one is
a mistake, or has to say how far it may be sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from loragate.matrix.case import AXES, Case, Site
from loragate.matrix.document import Document, Loc
from loragate.matrix.problems import Problem
from loragate.matrix.rules import case_defaults
from loragate.matrix.sample import Exclusion, full_product, pairwise
from loragate.matrix.schema import Axes, GroupModel

MAX_PRODUCT = 128


@dataclass(frozen=True, slots=True)
class Group:
    """A valid group: `rows` and `include` already carry the file's defaults."""

    loc: Loc
    site: Site
    model: GroupModel
    rows: tuple[Axes, ...]
    exclude: tuple[Axes, ...]
    include: tuple[Axes, ...]


def with_defaults(entry: Axes, defaults: Axes, site: Site) -> Axes:
    return replace(entry, values=case_defaults(site) | defaults.values | entry.values)


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
    axes = _drawn_axes(row)
    fixed = {name: values[0] for name, values in row.values.items() if name not in axes}
    exclusions = _by_index(group.exclude, row, axes)
    if {} in exclusions:
        # one of them holds for every point
        return
    sizes = [len(row.values[axis]) for axis in axes]
    choose = pairwise if group.model.sample else full_product
    for indices in choose(sizes, exclusions):
        drawn = {axis: row.values[axis][i] for axis, i in zip(axes, indices, strict=True)}
        yield fixed | drawn


def _drawn_axes(row: Axes) -> list[str]:
    """The axes over which points are drawn, in the order that a sample depends on: an axis that
    came later follows the original ones, and only where it has several values."""
    original = sorted(name for name in row.values if AXES[name].original)
    later = sorted(
        name for name, values in row.values.items() if name not in original and len(values) > 1
    )
    return original + later


def _by_index(exclude: Sequence[Axes], row: Axes, axes: Sequence[str]) -> list[Exclusion]:
    """The exclusions in terms of the axes that are drawn: without those that name an axis of
    another site or do not hold for an axis of one value that is not drawn. One that cannot match
    has an axis without values."""
    exclusions: list[Exclusion] = []
    for entry in exclude:
        if not entry.values.keys() <= row.values.keys():
            continue
        if all(
            row.values[axis][0] in values
            for axis, values in entry.values.items()
            if axis not in axes
        ):
            exclusions.append(
                {
                    axes.index(axis): frozenset(
                        i for i, value in enumerate(row.values[axis]) if value in values
                    )
                    for axis, values in entry.values.items()
                    if axis in axes
                }
            )
    return exclusions


def _is_bounded(group: Group, document: Document) -> bool:
    """Refuse a product that is far too large before it is enumerated."""
    if group.model.sample is not None:
        return True
    size = sum(prod(len(values) for values in row.values.values()) for row in group.rows)
    # exclusions may bring a product down to the bound, which takes an enumeration to find out
    if size <= 64 * MAX_PRODUCT:
        return True
    document.problems.append(_too_large(group, size, document))
    return False


def _is_sized(group: Group, size: int, document: Document) -> bool:
    sample = group.model.sample
    if sample is None and size > MAX_PRODUCT:
        document.problems.append(_too_large(group, size, document))
        return False
    if sample is not None and size > sample.limit:
        message = f"given {sample.limit}; allowed: at least {size}, which pairwise coverage takes"
        document.problems.append(document.problem((*group.loc, "sample", "limit"), message))
        return False
    return True


def _too_large(group: Group, size: int, document: Document) -> Problem:
    message = (
        f"given a product of {size} cases; allowed: at most {MAX_PRODUCT}, "
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
