"""Axes whose values must fit together, for each site. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from loragate.matrix.case import (
    MOE_SITES,
    Activation,
    Beside,
    Bias,
    Cut,
    GateUp,
    Ids,
    Parallel,
    Placement,
    Quantisation,
    RouterWeights,
    Sharding,
    Site,
    Streams,
)
from loragate.matrix.delta_net import columns_of
from loragate.matrix.engine_case import LEAST_RANKS, MOST_ADAPTERS, Active, Model, Targets

_UNCHANGED = {
    Model.DENSE: {Targets.EXPERTS},
    Model.MOE: {Targets.MLP},
    # vLLM refuses adapters of the head of such a model
    Model.HYBRID: {Targets.MLP, Targets.LM_HEAD},
}


@dataclass(frozen=True, slots=True)
class Relation:
    """Axes that must fit together. `problems` takes a value of each of them by its name and
    yields the axis to blame and a message."""

    sites: frozenset[Site]
    axes: tuple[str, ...]
    problems: Callable[..., Iterator[tuple[str, str]]]


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
    slices: tuple[int, ...], parallel: Parallel, tp: int, sharding: Sharding
) -> Iterator[tuple[str, str]]:
    if sharding is Sharding.BASE:
        return
    if parallel is Parallel.REPLICATED:
        yield "sharding", f"given {sharding} with {parallel}; allowed: with column or row"
    if parallel is Parallel.ROW and (len(slices) > 1 or slices[0] < tp):
        message = f"given {sharding} with {parallel}, {list(slices)} and tp {tp}"
        yield "sharding", f"{message}; allowed: one slice of tp columns or more"


def _sharded_layer_problems(
    in_features: int, tp: int, sharding: Sharding
) -> Iterator[tuple[str, str]]:
    # each rank has some columns of B of down
    if sharding is Sharding.RANK and in_features < tp:
        message = f"given {sharding} with in_features {in_features} and tp {tp}"
        yield "sharding", f"{message}; allowed: tp hidden features or more"


def _exchange_problems(streams: Streams, sharding: Sharding) -> Iterator[tuple[str, str]]:
    if sharding is Sharding.RANK and streams is Streams.DUAL:
        yield "sharding", f"given {sharding} with streams {streams}; allowed: with sequential"


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


def _repeated_problems(top_k: int, ids: Ids) -> Iterator[tuple[str, str]]:
    if ids is Ids.REPEATED and top_k == 1:
        yield "ids", f"given {ids} with top_k {top_k}; allowed: with two choices or more"


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
    most = MOST_ADAPTERS - (active is Active.BEYOND_SLOTS)
    if slots > most:
        message = f"up to {most}, because a checkpoint has up to {MOST_ADAPTERS} adapters"
        yield "slots", f"given {slots} with active {active}; allowed: {message}"


RELATIONS = (
    Relation(
        frozenset({Site.LORA_LINEAR}),
        ("in_features", "slices", "parallel", "tp", "cut", "heads"),
        _cut_problems,
    ),
    Relation(
        frozenset({Site.LORA_LINEAR}),
        ("slices", "parallel", "tp", "sharding"),
        _sharding_problems,
    ),
    Relation(
        frozenset({Site.LORA_LINEAR, Site.MOE_LAYER}), ("streams", "sharding"), _exchange_problems
    ),
    Relation(
        frozenset({Site.EMBEDDING}), ("in_features", "slices", "tp", "cut"), _embedding_problems
    ),
    Relation(frozenset({Site.LORA_LINEAR}), ("streams", "beside"), _beside_problems),
    Relation(MOE_SITES, ("experts", "top_k"), _routing_problems),
    Relation(MOE_SITES, ("top_k", "ids"), _repeated_problems),
    Relation(
        frozenset({Site.ENGINE}), ("model", "slots", "active", "targets", "rank"), _engine_problems
    ),
    Relation(frozenset({Site.GDN_IN_PROJ}), ("slices", "key_heads", "tp"), _delta_net_problems),
    Relation(
        frozenset({Site.MOE_LAYER}),
        ("slices", "experts", "ep", "tp", "quantisation"),
        _layer_problems,
    ),
    Relation(
        frozenset({Site.MOE_LAYER}), ("in_features", "tp", "sharding"), _sharded_layer_problems
    ),
    Relation(frozenset({Site.MOE_LAYER}), ("placement", "ep"), _placement_problems),
    Relation(
        frozenset({Site.MOE_LAYER}),
        ("slices", "activation", "gate_up", "expert_bias", "router"),
        _gate_problems,
    ),
)
