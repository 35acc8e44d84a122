"""What a subject says it can do on a machine, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from loragate.matrix.case import (
    Case,
    Dtype,
    Execution,
    ExpertMap,
    Layout,
    Parallel,
    Path,
    Quantisation,
    RouterWeights,
    Sharing,
    Site,
    Source,
    Write,
)


class Guard(StrEnum):
    """Bad input that a subject promises to refuse: with a ValueError that names what was given,
    before anything is changed."""

    X_DTYPE = "x_dtype"
    X_WIDTH = "x_width"
    # as many rows as were prepared
    ROWS = "rows"
    # sites that work in place
    OUT_DTYPE = "out_dtype"
    OUT_WIDTH = "out_width"
    # out starts where x starts
    ALIASED_OUT = "aliased_out"
    # out starts inside of x
    OVERLAPPING_OUT = "overlapping_out"
    MAPPING_DTYPE = "mapping_dtype"
    # more rows than the instance was sized for
    MAPPING_LENGTH = "mapping_length"
    # a slot that does not exist, in a mapping on the host
    SLOT_RANGE = "slot_range"
    ADAPTER_RANK = "adapter_rank"
    ADAPTER_SHAPE = "adapter_shape"
    # load or unload of a slot that does not exist
    SLOT = "slot"
    # sites with experts: ids of int64, ids or weights of another shape than prepared
    TOPK_DTYPE = "topk_dtype"
    TOPK_SHAPE = "topk_shape"
    ROUTER_SHAPE = "router_shape"
    # an adapter for another number of experts
    ADAPTER_EXPERTS = "adapter_experts"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a subject supports on a machine; whatever is missing is a counted skip."""

    sites: frozenset[Site]
    dtypes: frozenset[Dtype]
    max_rank: int
    executions: frozenset[Execution]
    parallel: frozenset[Parallel] = frozenset({Parallel.REPLICATED})
    layouts: frozenset[Layout] = frozenset(Layout)
    # the same input gives the same bits from run to run
    deterministic: bool = True
    # dense_delta: a row's bits depend neither on its place in the batch nor on its slot's number
    place_invariant: bool = False
    # reads live ranks only; otherwise dead ranks must be zero
    skips_dead_ranks: bool = False
    # live ranks may differ between the slices of one slot, each with its own scale
    rank_per_slice: bool = False
    # B holds scale * B, rounded once to the weights' dtype when an adapter is loaded; a
    # comparison in that dtype must fold as well, or it blames the kernel for that rounding
    folds_scale_into_weights: bool = False
    guards: frozenset[Guard] = frozenset()
    # torch.compile traces apply() into one graph
    traceable: bool = False
    # sites with experts
    max_experts: int = 1024
    paths: frozenset[Path] = frozenset({Path.PLAN})
    expert_maps: frozenset[ExpertMap] = frozenset(ExpertMap)
    sharings: frozenset[Sharing] = frozenset(Sharing)
    sources: frozenset[Source] = frozenset(Source)
    routers: frozenset[RouterWeights] = frozenset(RouterWeights)
    writes: frozenset[Write] = frozenset(Write)
    quantisations: frozenset[Quantisation] = frozenset({Quantisation.NONE})
    # why a case cannot run although each of its values alone could, or None
    refuses: Callable[[Case], str | None] | None = None


def unsupported(case: Case, have: Capabilities) -> str | None:
    """The reason why a case is skipped for a subject, or None if it runs."""
    wants: Sequence[tuple[str, object, frozenset[object]]] = (
        ("site", case.site, frozenset(have.sites)),
        ("dtype", case.dtype, frozenset(have.dtypes)),
        ("execution", case.execution, frozenset(have.executions)),
        ("parallel", case.parallel, frozenset(have.parallel)),
        ("layout", case.layout, frozenset(have.layouts)),
        # these have their defaults where they do not apply
        ("path", case.path, frozenset(have.paths | {Path.PLAN})),
        ("expert_map", case.expert_map, frozenset(have.expert_maps | {ExpertMap.LOCAL})),
        ("sharing", case.sharing, frozenset(have.sharings | {Sharing.PER_EXPERT})),
        ("source", case.source, frozenset(have.sources | {Source.TOKEN})),
        ("router", case.router, frozenset(have.routers | {RouterWeights.NONE})),
        ("write", case.write, frozenset(have.writes | {Write.ADD})),
        ("quantisation", case.quantisation, frozenset(have.quantisations)),
    )
    for axis, wanted, supported in wants:
        if wanted not in supported:
            return f"{axis} {wanted} is not supported"
    if case.rank > have.max_rank:
        return f"rank {case.rank} is above the limit of {have.max_rank}"
    if case.experts > have.max_experts:
        return f"{case.experts} experts are above the limit of {have.max_experts}"
    return have.refuses(case) if have.refuses else None
