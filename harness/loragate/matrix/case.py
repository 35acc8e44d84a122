"""The axes of the matrix and their values: a case is one point of their product. No torch.

An axis is declared once, as a field of `Case`; see `loragate.matrix.axis` for what follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from loragate.core.verdict import OracleName
from loragate.matrix.axis import Axis, DeclaredAxis, Unstated, declared_axes
from loragate.matrix.axis_values import (
    IN_PLACE_SITES,
    LAYER_SITES,
    LINEAR_SITES,
    MAX_EXPERTS,
    MAX_PARALLEL,
    MAX_RANK,
    MAX_SLOTS,
    MAX_TOP_K,
    MOE_SITES,
    OPERATIONS,
    Activation,
    Base,
    Beside,
    Bias,
    Buffers,
    Cut,
    Dtype,
    Execution,
    ExpertMap,
    GateUp,
    Ids,
    Layout,
    Loading,
    Mix,
    Parallel,
    Path,
    Placement,
    Plans,
    Products,
    Quantisation,
    Ranks,
    RouterWeights,
    Routing,
    Sharding,
    Sharing,
    Site,
    Source,
    Streams,
    Tier,
    Write,
)
from loragate.matrix.engine_case import EngineAxes

# what callers of this module use beside it
__all__ = [
    "AXES",
    "IN_PLACE_SITES",
    "LAYER_SITES",
    "LINEAR_SITES",
    "MAX_EXPERTS",
    "MAX_PARALLEL",
    "MAX_RANK",
    "MAX_SLOTS",
    "MAX_TOP_K",
    "MOE_SITES",
    "OPERATIONS",
    "Activation",
    "Base",
    "Beside",
    "Bias",
    "Buffers",
    "Case",
    "Cut",
    "Dtype",
    "Execution",
    "ExpertMap",
    "GateUp",
    "Ids",
    "Layout",
    "Loading",
    "Mix",
    "Parallel",
    "Path",
    "Placement",
    "Plans",
    "Products",
    "Quantisation",
    "Ranks",
    "RouterWeights",
    "Routing",
    "Sharding",
    "Sharing",
    "Site",
    "Source",
    "Streams",
    "Tier",
    "Write",
]

_DENSE, _LINEAR = frozenset({Site.DENSE_DELTA}), frozenset({Site.LORA_LINEAR})
_DELTA, _LAYER = frozenset({Site.MOE_DELTA}), frozenset({Site.MOE_LAYER})
_GDN, _ENGINE = frozenset({Site.GDN_IN_PROJ}), frozenset({Site.ENGINE})
_EMBEDDING = frozenset({Site.EMBEDDING})

# the axes that ids and samples have contained from the start; a new axis is declared by `Axis`
_first = partial(Axis, original=True)
_ALL, _ERROR = Unstated.ALL, Unstated.ERROR
# a result in a new tensor is no part of a wider one
_LAYOUTS_OF_NEW_TENSORS = dict.fromkeys(
    OPERATIONS - IN_PLACE_SITES,
    tuple(layout for layout in Layout if layout is not Layout.OUTPUT_SLICE),
)
# of operations alone
_shape = partial(_first, sites=OPERATIONS, required_at=OPERATIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(EngineAxes):
    """One check of one operation, for any subject.

    Shapes: x [tokens, in_features], A [slots, slices, rank, in_features],
    B [slots, sum(slices), rank], out [tokens, sum(slices)]. moe_delta: x as `source` says,
    A [slots, experts, ...], B [slots, experts, ...], out [tokens * top_k, sum(slices)].
    moe_layer: `in_features` is the hidden size, `slices` are gate and up, or up alone, each as
    wide as the intermediate size; out [tokens, in_features].
    gdn_in_proj: `slices` are in_proj_qkvz and in_proj_ba, where the columns of a key head stand
    together, or in_proj_qkv, in_proj_z, in_proj_b and in_proj_a, one kind of columns after the
    other; see matrix/delta_net.py. All are cut by heads over tp.
    embedding: `in_features` are the ids of the vocabulary, which are cut over tp, and the only
    slice is the width; x [tokens, 1] are ids.
    engine: no shapes; the model and how it is served are axes of matrix/engine_case.py. `slots` are
    the adapters that may be resident at a time.
    `rank` is the rank of the slot buffers; an adapter's live rank may be smaller.
    """

    site: Site
    tokens: Annotated[int, _shape(minimum=0, unstated=_ALL)] = 0
    in_features: Annotated[int, _shape(id_name="in", unstated=_ALL)] = 1
    slices: Annotated[tuple[int, ...], _shape(unstated=_ALL)] = (1,)
    rank: Annotated[int, _first(maximum=MAX_RANK, unstated=_ERROR)]
    slots: Annotated[int, _first(maximum=MAX_SLOTS, unstated=_ALL)]
    dtype: Annotated[Dtype, _first(unstated=_ERROR)]
    mix: Annotated[Mix, _first(sites=OPERATIONS, unstated=_ALL)] = Mix.RAGGED
    ranks: Annotated[Ranks, _first(sites=OPERATIONS, unstated=_ALL)] = Ranks.MIXED
    layout: Annotated[
        Layout, _first(sites=OPERATIONS, values=_LAYOUTS_OF_NEW_TENSORS, unstated=_ALL)
    ] = Layout.CONTIGUOUS
    execution: Annotated[Execution, _first(id_name="exec", sites=OPERATIONS, unstated=_ERROR)] = (
        Execution.EAGER
    )
    parallel: Annotated[Parallel, _first(sites=_LINEAR, constant_at=_DENSE | MOE_SITES)] = (
        Parallel.REPLICATED
    )
    # ranks that the intermediate size of moe_layer is cut into, or lora_linear as `parallel` says,
    # or the heads of gdn_in_proj, or the ids of embedding
    tp: Annotated[
        int,
        _first(
            sites=_LINEAR | _LAYER | _GDN | _EMBEDDING,
            constant_at=_DENSE | _DELTA,
            maximum=MAX_PARALLEL,
            unstated=_ALL,
        ),
    ] = 1
    # on this rank: with a parallel `expert_map` there are as many elsewhere
    experts: Annotated[
        int,
        _first(
            sites=MOE_SITES,
            required_at=MOE_SITES,
            maximum=MAX_EXPERTS,
            unstated=_ALL,
            phrase="{} experts are",
        ),
    ] = 1
    top_k: Annotated[
        int,
        _first(
            id_name="topk", sites=MOE_SITES, required_at=MOE_SITES, maximum=MAX_TOP_K, unstated=_ALL
        ),
    ] = 1
    source: Annotated[Source, _first(sites=_DELTA, unstated=_ALL)] = Source.TOKEN
    routing: Annotated[Routing, _first(sites=MOE_SITES, unstated=_ALL)] = Routing.UNIFORM
    expert_map: Annotated[ExpertMap, _first(id_name="map", sites=_DELTA, unstated=_ALL)] = (
        ExpertMap.LOCAL
    )
    sharing: Annotated[
        Sharing,
        _first(
            sites=MOE_SITES,
            values={
                Site.MOE_DELTA: (Sharing.PER_EXPERT, Sharing.SHARED_A, Sharing.SHARED_B),
                Site.MOE_LAYER: (Sharing.PER_EXPERT, Sharing.SHARED_OUTER),
            },
            unstated=_ALL,
        ),
    ] = Sharing.PER_EXPERT
    router: Annotated[
        RouterWeights,
        _first(
            sites=MOE_SITES,
            # a layer has router weights in any case
            required_at=_LAYER,
            values={
                Site.MOE_DELTA: (RouterWeights.NONE, RouterWeights.OUTPUT),
                Site.MOE_LAYER: (RouterWeights.OUTPUT, RouterWeights.INPUT),
            },
            unstated=_ALL,
        ),
    ] = RouterWeights.NONE
    write: Annotated[Write, _first(sites=_DELTA, unstated=_ALL)] = Write.ADD
    path: Annotated[Path, _first(sites=_DELTA)] = Path.PLAN
    # ranks that share the experts; each share is cut over `tp` ranks
    ep: Annotated[int, _first(sites=_LAYER, maximum=MAX_PARALLEL, unstated=_ALL)] = 1
    quantisation: Annotated[Quantisation, _first(id_name="quant", sites=_LAYER)] = Quantisation.NONE
    ids: Annotated[
        Ids,
        Axis(sites=MOE_SITES | _EMBEDDING, values={Site.EMBEDDING: (Ids.DISTINCT, Ids.UNKNOWN)}),
    ] = Ids.DISTINCT
    bias: Annotated[Bias, Axis(sites=_LINEAR)] = Bias.PRESENT
    base: Annotated[Base, Axis(sites=_LINEAR)] = Base.WEIGHT
    buffers: Annotated[Buffers, Axis(sites=_DENSE)] = Buffers.OWN
    loading: Annotated[Loading, Axis(sites=_DENSE)] = Loading.HOST
    cut: Annotated[Cut, Axis(sites=_LINEAR | _EMBEDDING)] = Cut.EVEN
    # of each slice but the first, whose heads are as many as ranks; 0: any columns may be cut.
    # Where there are fewer heads than ranks, several ranks hold the same one
    heads: Annotated[int, Axis(sites=_LINEAR, minimum=0)] = 0
    sharding: Annotated[Sharding, Axis(sites=_LINEAR | _LAYER)] = Sharding.BASE
    # dimensions of x: [rows, in_features], or [2 or 1, rows, in_features]; embedding: of its result
    input_dims: Annotated[
        int,
        Axis(id_name="dims", sites=_LINEAR | _LAYER | _GDN | _EMBEDDING, minimum=2, maximum=3),
    ] = 2
    # rows that an instance can take beyond those of the batch: its buffers are larger than needed
    spare_rows: Annotated[int, Axis(id_name="spare", sites=OPERATIONS, minimum=0)] = 0
    streams: Annotated[Streams, Axis(sites=_LINEAR | _GDN | _LAYER | _ENGINE)] = Streams.SEQUENTIAL
    beside: Annotated[Beside, Axis(sites=_LINEAR)] = Beside.SHRINK
    key_heads: Annotated[int, Axis(sites=_GDN, required_at=_GDN, unstated=_ALL)] = 1
    products: Annotated[Products, Axis(sites=_GDN)] = Products.PLAN
    activation: Annotated[Activation, Axis(id_name="act", sites=_LAYER)] = Activation.SILU
    gate_up: Annotated[GateUp, Axis(id_name="gateup", sites=_LAYER)] = GateUp.HALVES
    placement: Annotated[Placement, Axis(id_name="place", sites=_LAYER)] = Placement.RUNS
    # of both products of the experts
    expert_bias: Annotated[Bias, Axis(id_name="ebias", sites=_LAYER)] = Bias.ABSENT
    plans: Annotated[Plans, Axis(sites=_DENSE | MOE_SITES)] = Plans.BATCH
    # how the case is run, not what it is: these do not enter the id
    tier: Tier = Tier.SMOKE
    oracles: tuple[OracleName, ...] = (OracleName.REFERENCE,)
    timeout_s: float = 60.0

    @property
    def out_slices(self) -> tuple[int, ...]:
        """Widths of the parts of an output row that have a delta of their own."""
        return (self.in_features,) if self.site is Site.MOE_LAYER else self.slices

    @property
    def max_tokens(self) -> int:
        """Rows that an instance is sized for."""
        return max(1, self.tokens + self.spare_rows)

    @property
    def out_features(self) -> int:
        return sum(self.out_slices)

    @property
    def global_experts(self) -> int:
        return self.experts * (2 if self.expert_map is ExpertMap.PARALLEL else 1)

    @property
    def x_rows(self) -> int:
        return self.tokens * (self.top_k if self.source is Source.PAIR else 1)

    @property
    def x_columns(self) -> int:
        return 1 if self.site is Site.EMBEDDING else self.in_features

    @property
    def out_rows(self) -> int:
        """Rows of the output: tokens, or the pairs of moe_delta."""
        return self.tokens * (1 if self.site is Site.MOE_LAYER else self.top_k)


AXES: Mapping[str, DeclaredAxis] = declared_axes(Case)
