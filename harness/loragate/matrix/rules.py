"""What no single field can tell: axes that are missing, and axes that do not fit together. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields
from itertools import product
from types import MappingProxyType
from typing import Any

from loragate.matrix.case import (
    MOE_SITES,
    Case,
    Parallel,
    Quantisation,
    RouterWeights,
    Sharing,
    Site,
)
from loragate.matrix.document import Document
from loragate.matrix.schema import Axes, AxesModel, allowed_values

# an axis that `Case` gives no default must be named
REQUIRED_AXES = tuple(
    f.name for f in fields(Case) if f.default is MISSING and f.name in AxesModel.model_fields
)
_MOE_REQUIRED = ("experts", "top_k")
_LINEAR, _DELTA, _LAYER = ({site} for site in (Site.LORA_LINEAR, Site.MOE_DELTA, Site.MOE_LAYER))
# axes that only some sites have
_SITES_OF = MappingProxyType(
    {
        "parallel": _LINEAR,
        "tp": _LINEAR | _LAYER,
        **dict.fromkeys((*_MOE_REQUIRED, "routing", "sharing", "router"), MOE_SITES),
        **dict.fromkeys(("source", "expert_map", "write", "path"), _DELTA),
        **dict.fromkeys(("ep", "quantisation"), _LAYER),
    }
)
_CUT_AXES = ("in_features", "slices", "parallel", "tp")
_LAYER_AXES = ("slices", "experts", "ep", "tp", "quantisation")
_VALUES_OF_LAYER = MappingProxyType(
    {
        "sharing": (Sharing.PER_EXPERT, Sharing.SHARED_OUTER),
        "router": (RouterWeights.OUTPUT, RouterWeights.INPUT),
    }
)
_VALUES_OF_DELTA = MappingProxyType(
    {
        "sharing": (Sharing.PER_EXPERT, Sharing.SHARED_A, Sharing.SHARED_B),
        "router": (RouterWeights.NONE, RouterWeights.OUTPUT),
    }
)


def check_row(
    row: Axes, defaults: Axes, exclude: Sequence[Axes], site: Site, document: Document
) -> None:
    """Add every problem of a row or an include, given its defaults and its group's exclusions."""
    if not row.is_mapping:
        return
    for axis in missing_axes(row, defaults, site):
        message = f"is missing here and in defaults; allowed: {allowed_values(AxesModel, (axis,))}"
        document.problems.append(document.problem((*row.loc, axis), message))
    if site is Site.LORA_LINEAR:
        _check_points(row, defaults, exclude, _CUT_AXES, _cut_problems, document)
    if site in MOE_SITES:
        _check_points(row, defaults, exclude, _MOE_REQUIRED, _routing_problems, document)
    if site is Site.MOE_LAYER:
        _check_points(row, defaults, exclude, _LAYER_AXES, _layer_problems, document)


def missing_axes(entry: Axes, defaults: Axes, site: Site) -> list[str]:
    required = REQUIRED_AXES + (_MOE_REQUIRED if site in MOE_SITES else ())
    # a layer has router weights in any case
    required += ("router",) if site is Site.MOE_LAYER else ()
    return [axis for axis in required if axis not in defaults.named | entry.named]


def check_site_axes(entry: Axes, site: Site | None, document: Document) -> None:
    """Only some sites are cut over ranks, only some have experts, and those not the same values."""
    for axis, sites in _SITES_OF.items():
        if axis in entry.named and site is not None and site not in sites:
            message = f"given for site {site}; allowed: for site {', '.join(sorted(sites))} only"
            document.problems.append(document.problem((*entry.loc, axis), message))
    allowed = {Site.MOE_LAYER: _VALUES_OF_LAYER, Site.MOE_DELTA: _VALUES_OF_DELTA}
    for axis, values in (allowed.get(site, {}) if site else {}).items():
        for given in entry.values.get(axis, ()):
            if given not in values:
                message = f"given {given} for site {site}; allowed: {', '.join(values)}"
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


def case_defaults(site: Site | None = None) -> dict[str, tuple[Any, ...]]:
    """The axes that a row need not name, each with its one value. Axes of experts only where
    the site may have them: a sample depends on how many axes there are."""
    axes = set(AxesModel.model_fields)
    if site is not None:
        foreign = {axis for axis, sites in _SITES_OF.items() if site not in sites}
        # every site has had these, and samples have been drawn
        axes -= foreign - {"parallel", "tp"}
    return {
        f.name: (f.default,) for f in fields(Case) if f.default is not MISSING and f.name in axes
    }


def _check_points(
    row: Axes,
    defaults: Axes,
    exclude: Sequence[Axes],
    axes: Sequence[str],
    problems_of: Callable[..., Iterator[tuple[str, str]]],
    document: Document,
) -> None:
    """Tell what `problems_of` finds in the points of a row, looking at some of its axes."""
    have, unsound = _merged(row, defaults)
    if unsound & set(axes) or not set(axes) <= have.keys():
        return
    told = set[tuple[str, str]]()
    for values in product(*(have[axis] for axis in axes)):
        point = dict(zip(axes, values, strict=True))
        if any(matches(entry, point) for entry in exclude):
            continue
        for axis, message in problems_of(**point):
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


def _layer_problems(
    slices: tuple[int, ...], experts: int, ep: int, tp: int, quantisation: Quantisation
) -> Iterator[tuple[str, str]]:
    if len(slices) > 2 or len(set(slices)) > 1:
        yield "slices", f"given {list(slices)}; allowed: gate and up of one width, or up alone"
    if tp > min(slices):
        yield "tp", f"given {tp} with {list(slices)}; allowed: at most the intermediate size"
    if ep > experts:
        yield "ep", f"given {ep} with {experts} experts; allowed: at most as many as experts"
    if quantisation is not Quantisation.NONE and tp > 1:
        yield "tp", f"given {tp} with quantisation {quantisation}; allowed: 1"


def _routing_problems(experts: int, top_k: int) -> Iterator[tuple[str, str]]:
    if top_k > experts:
        yield "top_k", f"given {top_k} with {experts} experts; allowed: at most as many as experts"
