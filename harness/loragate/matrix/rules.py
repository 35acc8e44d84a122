"""Rules beyond the schema: axes that are missing, axes and values of other sites, and axes that do
not fit together. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass
from itertools import product
from typing import Any

from loragate.core.verdict import OracleName
from loragate.matrix.case import (
    AXES,
    MOE_SITES,
    Activation,
    Beside,
    Bias,
    Cut,
    GateUp,
    Parallel,
    Placement,
    Quantisation,
    RouterWeights,
    Sharding,
    Site,
    Streams,
)
from loragate.matrix.delta_net import columns_of
from loragate.matrix.document import Document, Loc
from loragate.matrix.engine_case import ENGINE_ORACLES, LEAST_RANKS, Active, Model, Targets
from loragate.matrix.schema import Axes

_UNCHANGED = {
    Model.DENSE: {Targets.EXPERTS},
    Model.MOE: {Targets.MLP},
    # vLLM refuses adapters of the head of such a model
    Model.HYBRID: {Targets.MLP, Targets.LM_HEAD},
}


def check_row(
    row: Axes, defaults: Axes, exclude: Sequence[Axes], site: Site, document: Document
) -> None:
    """Add every problem of a row or an include, given its defaults and its group's exclusions."""
    if not row.is_mapping:
        return
    for axis in missing_axes(row, defaults, site):
        message = f"is missing here and in defaults; allowed: {AXES[axis].allowed(site)}"
        document.problems.append(document.problem((*row.loc, axis), message))
    for relation in _RELATIONS:
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
    row: Axes, defaults: Axes, exclude: Sequence[Axes], relation: _Relation, document: Document
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


def _cut_problems(
    in_features: int, slices: tuple[int, ...], parallel: Parallel, tp: int, cut: Cut, heads: int
) -> Iterator[tuple[str, str]]:
    if parallel is Parallel.REPLICATED and tp > 1:
        yield "tp", f"given {tp} with parallel {parallel}; allowed: 1, or parallel column or row"
    if heads:
        yield from _head_problems(slices, parallel, tp, cut, heads)
        # the columns of other slices are cut by heads
        slices = slices[:1]
    if cut is Cut.PADDED:
        return
    if parallel is Parallel.COLUMN and any(width % tp for width in slices):
        yield "slices", f"given {list(slices)} with tp {tp}; allowed: widths that tp divides"
    if parallel is Parallel.ROW and in_features % tp:
        yield "in_features", f"given {in_features} with tp {tp}; allowed: a width that tp divides"


def _head_problems(
    slices: tuple[int, ...], parallel: Parallel, tp: int, cut: Cut, heads: int
) -> Iterator[tuple[str, str]]:
    if parallel is not Parallel.COLUMN or cut is not Cut.EVEN:
        yield "heads", f"given {heads} with {parallel} and {cut}; allowed: with column and even"
    if any(width % heads for width in slices[1:]):
        yield "heads", f"given {heads} with {list(slices)}; allowed: a divisor of widths 2 to last"
    if heads % tp and tp % heads:
        yield "heads", f"given {heads} with tp {tp}; allowed: a multiple or a divisor of tp"


def _sharding_problems(
    slices: tuple[int, ...], parallel: Parallel, tp: int, streams: Streams, sharding: Sharding
) -> Iterator[tuple[str, str]]:
    if sharding is Sharding.BASE:
        return
    if parallel is Parallel.REPLICATED:
        yield "sharding", f"given {sharding} with {parallel}; allowed: with column or row"
    if streams is Streams.DUAL:
        yield "sharding", f"given {sharding} with streams {streams}; allowed: with sequential"
    if parallel is Parallel.ROW and (len(slices) > 1 or slices[0] < tp):
        message = f"given {sharding} with {parallel}, {list(slices)} and tp {tp}"
        yield "sharding", f"{message}; allowed: one slice of tp columns or more"


def _beside_problems(streams: Streams, beside: Beside) -> Iterator[tuple[str, str]]:
    if beside is not Beside.SHRINK and streams is not Streams.DUAL:
        yield "beside", f"given {beside} with streams {streams}; allowed: with dual"


def _embedding_problems(
    in_features: int, slices: tuple[int, ...], tp: int, cut: Cut
) -> Iterator[tuple[str, str]]:
    if len(slices) > 1:
        yield "slices", f"given {list(slices)}; allowed: one slice, the width"
    if cut is Cut.EVEN and in_features % tp:
        message = f"given {in_features} with tp {tp}; allowed: a vocabulary that tp divides"
        yield "in_features", f"{message}, or cut {Cut.PADDED}"


def _layer_problems(
    slices: tuple[int, ...], experts: int, ep: int, tp: int, quantisation: Quantisation
) -> Iterator[tuple[str, str]]:
    if len(slices) > 2 or len(set(slices)) > 1:
        yield "slices", f"given {list(slices)}; allowed: gate and up of one width, or up alone"
    if tp > min(slices):
        yield "tp", f"given {tp} with {list(slices)}; allowed: at most the intermediate size"
    if ep > experts:
        yield "ep", f"given {ep} with {experts} experts; allowed: at most as many as experts"
    if quantisation is not Quantisation.NONE and slices[0] % tp:
        # each rank quantises its own columns, so that its part has to be known
        message = f"given {tp} with quantisation {quantisation} and {list(slices)}"
        yield "tp", f"{message}; allowed: a divisor of the intermediate size"


def _gate_problems(
    slices: tuple[int, ...],
    activation: Activation,
    gate_up: GateUp,
    expert_bias: Bias,
    router: RouterWeights,
) -> Iterator[tuple[str, str]]:
    alone = len(slices) == 1
    if alone and activation is not Activation.SILU:
        yield "activation", f"given {activation} without a gate; allowed: {Activation.SILU}"
    if alone and gate_up is not GateUp.HALVES:
        yield "gate_up", f"given {gate_up} without a gate; allowed: {GateUp.HALVES}"
    if expert_bias is Bias.PRESENT and router is RouterWeights.INPUT:
        message = f"given {expert_bias} with router {router}"
        yield "expert_bias", f"{message}; allowed: {Bias.ABSENT}, a weighted input has no bias"


def _placement_problems(placement: Placement, ep: int) -> Iterator[tuple[str, str]]:
    if placement is Placement.ROUND_ROBIN and ep == 1:
        yield "placement", f"given {placement} with ep {ep}; allowed: with two ranks or more"


def _routing_problems(experts: int, top_k: int) -> Iterator[tuple[str, str]]:
    if top_k > experts:
        yield "top_k", f"given {top_k} with {experts} experts; allowed: at most as many as experts"


def _delta_net_problems(
    slices: tuple[int, ...], key_heads: int, tp: int
) -> Iterator[tuple[str, str]]:
    try:
        kinds = columns_of(slices, key_heads)
    except ValueError as error:
        yield "slices", f"given {list(slices)}; {error}"
        return
    for heads in dict.fromkeys(kind.heads for part in kinds for kind in part):
        if heads % tp and tp % heads:
            yield "tp", f"given {tp} with {heads} heads; allowed: a divisor or a multiple of them"


def _engine_problems(
    model: Model, slots: int, active: Active, targets: Targets, rank: int
) -> Iterator[tuple[str, str]]:
    if targets in _UNCHANGED[model]:
        message = f"given {targets} with model {model}; allowed: what adapters of the model change"
        yield "targets", message
    if rank < LEAST_RANKS[model]:
        yield "rank", f"given {rank} with model {model}; allowed: {LEAST_RANKS[model]} or more"
    if active is Active.SOME and slots < 2:
        yield "active", f"given {active} with {slots} slot; allowed: with two slots or more"


@dataclass(frozen=True, slots=True)
class _Relation:
    """Axes that must fit together. `problems` takes a value of each of them by its name and
    yields the axis to blame and a message."""

    sites: frozenset[Site]
    axes: tuple[str, ...]
    problems: Callable[..., Iterator[tuple[str, str]]]


_RELATIONS = (
    _Relation(
        frozenset({Site.LORA_LINEAR}),
        ("in_features", "slices", "parallel", "tp", "cut", "heads"),
        _cut_problems,
    ),
    _Relation(
        frozenset({Site.LORA_LINEAR}),
        ("slices", "parallel", "tp", "streams", "sharding"),
        _sharding_problems,
    ),
    _Relation(frozenset({Site.LORA_LINEAR}), ("streams", "beside"), _beside_problems),
    _Relation(
        frozenset({Site.EMBEDDING}), ("in_features", "slices", "tp", "cut"), _embedding_problems
    ),
    _Relation(MOE_SITES, ("experts", "top_k"), _routing_problems),
    _Relation(
        frozenset({Site.ENGINE}), ("model", "slots", "active", "targets", "rank"), _engine_problems
    ),
    _Relation(frozenset({Site.GDN_IN_PROJ}), ("slices", "key_heads", "tp"), _delta_net_problems),
    _Relation(
        frozenset({Site.MOE_LAYER}),
        ("slices", "experts", "ep", "tp", "quantisation"),
        _layer_problems,
    ),
    _Relation(frozenset({Site.MOE_LAYER}), ("placement", "ep"), _placement_problems),
    _Relation(
        frozenset({Site.MOE_LAYER}),
        ("slices", "activation", "gate_up", "expert_bias", "router"),
        _gate_problems,
    ),
)
