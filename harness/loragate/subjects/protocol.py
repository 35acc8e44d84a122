"""What an implementation shows to the harness. Read docs/subjects.md to add your own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias, cast

from torch import Tensor

from loragate.machine import Machine
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


@dataclass(frozen=True, slots=True)
class Pool:
    """The adapters that are resident in the slots, before any implementation has seen them.

    `a[slot, slice]` is [rank, in_features], `b[slice][slot]` is [slice width, rank]. Only the
    first `ranks[slot][slice]` ranks are live, the rest is dead: zero, or NaN for a subject
    that promises not to read it. Delta of a row x with slot s: `scale * (x @ A.T) @ B.T`.

    With experts: `a[slot, expert, slice]` is [rank, in_features], `b[slice][slot, expert]` is
    [slice width, rank]. The axis of experts has length 1 where they share the factor. Ranks and
    scales are those of the adapter, the same for all experts.

    moe_layer: these are gate and up, or up alone, and `down` is a pool of one slice, from the
    intermediate to the hidden size, with ranks and scales of its own.
    """

    a: Tensor
    b: tuple[Tensor, ...]
    ranks: tuple[tuple[int, ...], ...]
    scales: tuple[tuple[float, ...], ...]
    down: Pool | None = None

    @property
    def num_slots(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Routes:
    """What the router chose for a step, on the machine's device.

    `topk_ids` int32 [tokens, top_k]: the experts of each token, all different; negative where
    a pair has no expert. `expert_map` int32 [global experts]: the local id of each expert, -1
    for one that is not here; without it the ids are local already. `weights` fp32 [tokens,
    top_k]: what the delta of each pair is multiplied by; None: nothing. In moe_layer the output
    of each pair is, or gate and up are (case.router), and ids are those of the whole layer.
    """

    topk_ids: Tensor
    expert_map: Tensor | None = None
    weights: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. `token_slots` is int32 [tokens] on the CPU, -1 for a base row.

    `out` [tokens, out_features] holds the base layer's output; an in-place site adds to it.
    With experts there are `routes`, and `out` has a row for each pair: row p is choice
    p % top_k of token p // top_k. x has a row for each token, or for each pair. In moe_layer
    both have a row for each token.
    """

    x: Tensor
    token_slots: Tensor
    out: Tensor
    routes: Routes | None = None


@dataclass(frozen=True, slots=True)
class BaseLayer:
    """The layer without adapters, for lora_linear: weight [out_features, in_features]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class BaseExperts(BaseLayer):
    """The whole layer without adapters, for moe_layer: weight [experts, sum(slices), in_features],
    gate above up, down [experts, in_features, intermediate], no bias.

    `scales` of quantised weights, weight and down: fp32 [experts, rows]; a weight is then
    value * scale.
    """

    down: Tensor
    scales: tuple[Tensor, Tensor] | None = None


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


class Resident(Protocol):
    """One resident pool of adapters; its state lives from step to step like in a server."""

    def load(self, slot: int, pool: Pool) -> None:
        """Put adapter `slot` of `pool` into the same slot here, replacing what was there."""

    def unload(self, slot: int) -> None:
        """Empty a slot."""

    def prepare(self, token_slots: Tensor) -> None:
        """Once a step: tell which token uses which slot. May sync, is never captured."""


class Instance(Resident, Protocol):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        """The operation itself. dense_delta adds to `out` in place and returns it;
        lora_linear ignores `out` and returns a new tensor. Never syncs."""


class MoEInstance(Resident, Protocol):
    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        """The operation itself, alignment of the pairs included: a server captures both.

        moe_delta adds to `out` in place, or stores (case.write), and returns it. Rows of pairs
        without a delta keep their bits: base rows, experts that are not here, and slices that
        the adapter does not have. moe_layer ignores `out` and returns a new tensor. Never
        syncs."""


AnyInstance: TypeAlias = Instance | MoEInstance


def apply_step(instance: AnyInstance, batch: Batch) -> Tensor:
    """Run a prepared step."""
    if batch.routes is None:
        return cast(Instance, instance).apply(batch.x, batch.out)
    return cast(MoEInstance, instance).apply(batch.x, batch.out, batch.routes)


class Subject(Protocol):
    name: str

    def version(self) -> str:
        """Version of the implementation, for the report."""

    def capabilities(self, machine: Machine) -> Capabilities | str:
        """What it can do here, or a sentence that says why it can do nothing."""

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> AnyInstance:
        """A fresh instance with empty slots, sized for the case; `base` for lora_linear, and for
        moe_layer where it is a BaseExperts. A MoEInstance for a site with experts."""


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
