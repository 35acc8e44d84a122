"""Rules beyond the schema: axes that are missing, axes and values of other sites, and axes that do
not fit together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING
from itertools import product
from typing import Any

from loragate.core.verdict import OracleName
from loragate.matrix.case import AXES, Site
from loragate.matrix.document import Document, Loc
from loragate.matrix.engine_case import ENGINE_ORACLES
from loragate.matrix.relations import RELATIONS, Relation
from loragate.matrix.schema import Axes


def check_row(
    row: Axes, defaults: Axes, exclude: Sequence[Axes], site: Site, document: Document
) -> None:
    """Add every problem of a row or an include, given its defaults and its group's exclusions."""
    if not row.is_mapping:
        return
    for axis in missing_axes(row, defaults, site):
        message = f"is missing here and in defaults; allowed: {AXES[axis].allowed(site)}"
        document.problems.append(document.problem((*row.loc, axis), message))
    for relation in RELATIONS:
        if site in relation.sites:
            _check_points(row, defaults, exclude, relation, document)


def missing_axes(entry: Axes, defaults: Axes, site: Site) -> list[str]:
    """The axes that a row of the site must have and that neither it nor the defaults name."""
    named = defaults.named | entry.named
    return [name for name, axis in AXES.items() if axis.is_required_at(site) and name not in named]


def check_site_axes(entry: Axes, site: Site | None, document: Document) -> None:
    """A site has some of the axes only, and of some axes only some values."""
    if site is None:
        return
    for name in sorted(entry.named & AXES.keys()):
        axis = AXES[name]
        messages = []
        if axis.sites is not None and not axis.at(site):
            sites = ", ".join(sorted(axis.sites))
            messages.append(f"given for site {site}; allowed: for site {sites} only")
        elif site in axis.values:
            messages += [
                f"given {value} for site {site}; allowed: {axis.allowed(site)}"
                for value in entry.values.get(name, ())
                if value not in axis.values[site]
            ]
        for message in messages:
            document.problems.append(document.problem((*entry.loc, name), message))


def check_oracles(
    oracles: Sequence[OracleName], loc: Loc, site: Site | None, document: Document
) -> None:
    """An oracle judges the answers of engines or tensors, not both."""
    if site is None:
        return
    for oracle in oracles:
        if (oracle in ENGINE_ORACLES) is not (site is Site.ENGINE):
            fitting = [o for o in OracleName if (o in ENGINE_ORACLES) is (site is Site.ENGINE)]
            message = f"given {oracle} for site {site}; allowed: {', '.join(fitting)}"
            document.problems.append(document.problem((*loc, "oracles"), message))


def check_single(entry: Axes, why: str, document: Document) -> None:
    """A default and an include are one point, not a product."""
    for axis, values in entry.values.items():
        if len(values) > 1:
            message = f"given {len(values)} values; allowed: one value, {why}"
            document.problems.append(document.problem((*entry.loc, axis), message))


def check_exclusion(entry: Axes, rows: Sequence[Axes], defaults: Axes, document: Document) -> None:
    """An exclusion that leaves nothing out is a typo or a leftover."""
    if entry.is_mapping and not entry.named:
        document.problems.append(document.problem(entry.loc, "names no axis; allowed: one or more"))
    elif entry.named and not any(_may_match(entry, row, defaults) for row in rows):
        message = "leaves nothing out; allowed: values that some row of the group has"
        document.problems.append(document.problem(entry.loc, message))


def matches(exclusion: Axes, point: dict[str, Any]) -> bool:
    """True if the point has one of the exclusion's values on each of its axes."""
    return all(point.get(axis) in values for axis, values in exclusion.values.items())


def _may_match(entry: Axes, row: Axes, defaults: Axes) -> bool:
    have, unknown = _merged(row, defaults)
    return all(
        axis in unknown or set(values) & set(have.get(axis, ()))
        for axis, values in entry.values.items()
    )


def _merged(row: Axes, defaults: Axes) -> tuple[dict[str, tuple[Any, ...]], frozenset[str]]:
    """Values of a row with its defaults, and the axes whose values are invalid."""
    unknown = (row.named - row.values.keys()) | (
        defaults.named - defaults.values.keys() - row.named
    )
    return case_defaults() | defaults.values | row.values, unknown


def case_defaults(site: Site | None = None) -> dict[str, tuple[Any, ...]]:
    """The axes that a row need not name, each with its one value; of a site, only those that
    its samples are drawn over."""
    return {
        name: (axis.default,)
        for name, axis in AXES.items()
        if axis.default is not MISSING and (site is None or axis.is_sampled_at(site))
    }


def _check_points(
    row: Axes, defaults: Axes, exclude: Sequence[Axes], relation: Relation, document: Document
) -> None:
    """Report the points of a row in which the axes of a relation do not fit together."""
    have, unknown = _merged(row, defaults)
    if unknown & set(relation.axes) or not set(relation.axes) <= have.keys():
        return
    reported = set[tuple[str, str]]()
    for values in product(*(have[axis] for axis in relation.axes)):
        point = dict(zip(relation.axes, values, strict=True))
        if any(matches(entry, point) for entry in exclude):
            continue
        for axis, message in relation.problems(**point):
            if (axis, message) not in reported:
                reported.add((axis, message))
                document.problems.append(document.problem((*row.loc, axis), message))
