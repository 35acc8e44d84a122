"""What no single field can tell: axes that are missing, and axes that do not fit together. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from itertools import product
from typing import Any

from loragate.matrix.case import Case, Parallel, Site
from loragate.matrix.document import Document
from loragate.matrix.schema import Axes, AxesModel, allowed_values

# an axis that `Case` gives no default must be named
REQUIRED_AXES = tuple(
    f.name for f in fields(Case) if f.default is MISSING and f.name in AxesModel.model_fields
)
_LINEAR_AXES = ("parallel", "tp")
_CUT_AXES = ("in_features", "slices", *_LINEAR_AXES)


def check_row(
    row: Axes, defaults: Axes, exclude: Sequence[Axes], site: Site, document: Document
) -> None:
    """Add every problem of a row or an include, given its defaults and its group's exclusions."""
    if not row.is_mapping:
        return
    for axis in missing_axes(row, defaults):
        message = f"is missing here and in defaults; allowed: {allowed_values(AxesModel, (axis,))}"
        document.problems.append(document.problem((*row.loc, axis), message))
    if site is Site.LORA_LINEAR:
        _check_cut(row, defaults, exclude, document)


def missing_axes(entry: Axes, defaults: Axes) -> list[str]:
    return [axis for axis in REQUIRED_AXES if axis not in defaults.named | entry.named]


def check_linear_axes(entry: Axes, site: Site, document: Document) -> None:
    """Only a linear layer is cut over tensor-parallel ranks."""
    for axis in _LINEAR_AXES:
        if axis in entry.named and site is not Site.LORA_LINEAR:
            message = f"given for site {site}; allowed: for site {Site.LORA_LINEAR} only"
            document.problems.append(document.problem((*entry.loc, axis), message))


def check_single(entry: Axes, why: str, document: Document) -> None:
    """A default and an include are one point, not a product."""
    for axis, values in entry.values.items():
        if len(values) > 1:
            message = f"given {len(values)} values; allowed: one value, {why}"
            document.problems.append(document.problem((*entry.loc, axis), message))


def check_exclusion(entry: Axes, rows: Sequence[Axes], defaults: Axes, document: Document) -> None:
    """An exclusion that leaves nothing out is a typing error or a leftover."""
    if entry.is_mapping and not entry.named:
        document.problems.append(document.problem(entry.loc, "names no axis; allowed: one or more"))
    elif entry.named and not any(_may_match(entry, row, defaults) for row in rows):
        message = "leaves nothing out; allowed: values that some row of the group has"
        document.problems.append(document.problem(entry.loc, message))


def matches(exclusion: Axes, point: dict[str, Any]) -> bool:
    """True if the point has one of the exclusion's values on each of its axes."""
    return all(point.get(axis) in values for axis, values in exclusion.values.items())


def _may_match(entry: Axes, row: Axes, defaults: Axes) -> bool:
    have, unsound = _merged(row, defaults)
    return all(
        axis in unsound or set(values) & set(have.get(axis, ()))
        for axis, values in entry.values.items()
    )


def _merged(row: Axes, defaults: Axes) -> tuple[dict[str, tuple[Any, ...]], frozenset[str]]:
    """Values of a row with its defaults, and the axes whose values are not known."""
    unsound = (row.named - row.values.keys()) | (
        defaults.named - defaults.values.keys() - row.named
    )
    return case_defaults() | defaults.values | row.values, unsound


def case_defaults() -> dict[str, tuple[Any, ...]]:
    """The axes that a row need not name, each with its one value."""
    return {
        f.name: (f.default,)
        for f in fields(Case)
        if f.default is not MISSING and f.name in AxesModel.model_fields
    }


def _check_cut(row: Axes, defaults: Axes, exclude: Sequence[Axes], document: Document) -> None:
    have, unsound = _merged(row, defaults)
    if unsound & set(_CUT_AXES) or not set(_CUT_AXES) <= have.keys():
        return
    told = set[tuple[str, str]]()
    for values in product(*(have[axis] for axis in _CUT_AXES)):
        point = dict(zip(_CUT_AXES, values, strict=True))
        if any(matches(entry, point) for entry in exclude):
            continue
        for axis, message in _cut_problems(**point):
            if (axis, message) not in told:
                told.add((axis, message))
                document.problems.append(document.problem((*row.loc, axis), message))


def _cut_problems(
    in_features: int, slices: tuple[int, ...], parallel: Parallel, tp: int
) -> Iterator[tuple[str, str]]:
    if parallel is Parallel.REPLICATED and tp > 1:
        yield "tp", f"given {tp} with parallel {parallel}; allowed: 1, or parallel column or row"
    if parallel is Parallel.COLUMN and any(width % tp for width in slices):
        yield "slices", f"given {list(slices)} with tp {tp}; allowed: widths that tp divides"
    if parallel is Parallel.ROW and in_features % tp:
        yield "in_features", f"given {in_features} with tp {tp}; allowed: a width that tp divides"
