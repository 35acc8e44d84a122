"""The axes of the matrix and their values: a case is one point of their product. No torch.

An axis is declared once, as a field of `Case`; see `loragate.matrix.axis` for what follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Annotated

from loragate.core.verdict import OracleName
from loragate.matrix.axis import Axis, DeclaredAxis, Unstated, declared_axes

MAX_RANK = 512
MAX_SLOTS = 256
# the largest tensor-parallel and expert-parallel sizes
MAX_PARALLEL = 64
MAX_EXPERTS = 1024
MAX_TOP_K = 64


class Site(StrEnum):
    """An operation that can be checked."""

    DENSE_DELTA = "dense_delta"
    LORA_LINEAR = "lora_linear"
    MOE_DELTA = "moe_delta"
    # a whole MoE layer with adapters on both of its products
    MOE_LAYER = "moe_layer"
    # the input projections of a gated delta net, qkvz and ba, with adapters on either or both
    GDN_IN_PROJ = "gdn_in_proj"


# sites whose tokens are routed to experts, and sites that write to the output of the batch
MOE_SITES = frozenset({Site.MOE_DELTA, Site.MOE_LAYER})
IN_PLACE_SITES = frozenset({Site.DENSE_DELTA, Site.MOE_DELTA})
# sites that add the delta of a row to base products of their own
LINEAR_SITES = frozenset({Site.LORA_LINEAR, Site.GDN_IN_PROJ})
_DENSE, _LINEAR = frozenset({Site.DENSE_DELTA}), frozenset({Site.LORA_LINEAR})
_DELTA, _LAYER = frozenset({Site.MOE_DELTA}), frozenset({Site.MOE_LAYER})
_GDN = frozenset({Site.GDN_IN_PROJ})


class Tier(StrEnum):
    SMOKE = "smoke"
    PREMERGE = "premerge"
    NIGHTLY = "nightly"


class Dtype(StrEnum):
    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"


class Mix(StrEnum):
    """Which row of the batch uses which slot."""

    # ragged runs: base rows and every slot, including the last, except one that has no tokens
    RAGGED = "ragged"
    # the same population as RAGGED in a random order of rows
    SHUFFLED = "shuffled"
    # every row uses the same slot
    SINGLE = "single"
    # base rows and the last slot only
    LAST_SLOT = "last_slot"
    ALL_BASE = "all_base"


class Layout(StrEnum):
    """How the input and the output lie in memory."""

    CONTIGUOUS = "contiguous"
    # input and output are columns of wider tensors: row stride > width, offset != 0
    COLUMN_SLICE = "column_slice"
    # padding follows the live rows, as in a batch padded to a captured size
    PADDED_ROWS = "padded_rows"
    # the input's columns are strided: x is a transposed view
    TRANSPOSED = "transposed"


class Execution(StrEnum):
    EAGER = "eager"
    # captured once into a CUDA graph, then replayed
    GRAPH = "graph"


class Streams(StrEnum):
    """What a layer runs on. Without a GPU dual streams are modelled."""

    SEQUENTIAL = "sequential"
    # the work of the adapters on a stream beside that of the base layer
    DUAL = "dual"


class Products(StrEnum):
    """How gdn_in_proj computes its base products."""

    # the subject chooses
    PLAN = "plan"
    # qkvz and ba each on their own
    TWO = "two"
    # one product of all columns
    ONE = "one"


class Parallel(StrEnum):
    """How a LoRA linear layer is cut over tensor-parallel ranks."""

    REPLICATED = "replicated"
    COLUMN = "column"
    ROW = "row"


class Cut(StrEnum):
    """How a width is cut over tensor-parallel ranks."""

    # tp divides it
    EVEN = "even"
    # the base layer is padded to a multiple of tp, adapters are not: the last ranks hold less
    PADDED = "padded"


class Bias(StrEnum):
    """Of the base layer of lora_linear."""

    PRESENT = "present"
    ABSENT = "absent"


class Ranks(StrEnum):
    """Live ranks of the adapters in the slots, given the rank of the buffers."""

    # every adapter fills its slot
    FULL = "full"
    # ranks differ from slot to slot and from slice to slice; one slice of one slot is absent
    MIXED = "mixed"


class Source(StrEnum):
    """What a row of x is at an MoE site. Token-expert pair p is choice p % top_k of token
    p // top_k."""

    # x [tokens, in_features]: all pairs of a token read one row, as in w13
    TOKEN = "token"
    # x [tokens * top_k, in_features]: each pair has its own row, as in w2
    PAIR = "pair"


class Routing(StrEnum):
    """Which experts the tokens choose; the experts of one token are always distinct."""

    # the last local expert always has pairs, another one has none where that is possible
    UNIFORM = "uniform"
    # one hot expert is chosen by nearly every token, half of the experts by none
    SKEWED = "skewed"


class ExpertMap(StrEnum):
    """Where the chosen experts are."""

    # all of them on this rank
    LOCAL = "local"
    # expert parallelism: as many experts are elsewhere, and a map from global to local ids has -1
    # for those; some pairs have no expert at all (-1)
    PARALLEL = "parallel"


class Ids(StrEnum):
    """The ids by which tokens choose experts."""

    # those of one token are all different, and each of them is that of an expert, or -1
    DISTINCT = "distinct"
    # a token may choose one expert more than once
    REPEATED = "repeated"
    # some are beyond the last expert or below -1: such a pair has no expert
    UNKNOWN = "unknown"


class Sharing(StrEnum):
    """The factors that all experts of an adapter share."""

    PER_EXPERT = "per_expert"
    # moe_delta: the outer factor of gate and up, or that of down
    SHARED_A = "shared_a"
    SHARED_B = "shared_b"
    # moe_layer: A of gate and up, and B of down
    SHARED_OUTER = "shared_outer"


class RouterWeights(StrEnum):
    # moe_delta
    NONE = "none"
    # the delta, or the output, of each pair is multiplied by its router weight
    OUTPUT = "output"
    # moe_layer: gate and up are multiplied by it, before the activation
    INPUT = "input"


class Quantisation(StrEnum):
    """Of the base weights of moe_layer and of their inputs, but not of the inputs of adapters."""

    NONE = "none"
    # float8_e4m3fn with a scale for each row
    FP8 = "fp8"


class Write(StrEnum):
    """What happens to the output of a pair that has a delta; other pairs keep their bits."""

    ADD = "add"
    STORE = "store"


class Path(StrEnum):
    """Which kernels of a subject run."""

    # the subject chooses
    PLAN = "plan"
    TWO_KERNEL = "two_kernel"
    ONE_SHOT = "one_shot"
    SMALL_BATCH = "small_batch"


# the axes that ids and samples have contained from the start; a new axis is declared by `Axis`
_first = partial(Axis, original=True)
_ALL, _ERROR = Unstated.ALL, Unstated.ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One check of one operation, for any subject.

    Shapes: x [tokens, in_features], A [slots, slices, rank, in_features],
    B [slots, sum(slices), rank], out [tokens, sum(slices)]. moe_delta: x as `source` says,
    A [slots, experts, ...], B [slots, experts, ...], out [tokens * top_k, sum(slices)].
    moe_layer: `in_features` is the hidden size, `slices` are gate and up, or up alone, each as
    wide as the intermediate size; out [tokens, in_features].
    gdn_in_proj: `slices` are in_proj_qkvz and in_proj_ba, where the columns of a key head stand
    together, or in_proj_qkv, in_proj_z, in_proj_b and in_proj_a, one kind of columns after the
    other; see matrix/delta_net.py. All are cut by heads over tp.
    `rank` is the rank of the slot buffers; an adapter's live rank may be smaller.
    """

    site: Site
    tokens: Annotated[int, _first(minimum=0, unstated=_ALL)]
    in_features: Annotated[int, _first(id_name="in", unstated=_ALL)]
    slices: Annotated[tuple[int, ...], _first(unstated=_ALL)]
    rank: Annotated[int, _first(maximum=MAX_RANK, unstated=_ERROR)]
    slots: Annotated[int, _first(maximum=MAX_SLOTS, unstated=_ALL)]
    dtype: Annotated[Dtype, _first(unstated=_ERROR)]
    mix: Annotated[Mix, _first(unstated=_ALL)] = Mix.RAGGED
    ranks: Annotated[Ranks, _first(unstated=_ALL)] = Ranks.MIXED
    layout: Annotated[Layout, _first(unstated=_ALL)] = Layout.CONTIGUOUS
    execution: Annotated[Execution, _first(id_name="exec", unstated=_ERROR)] = Execution.EAGER
    parallel: Annotated[Parallel, _first(sites=_LINEAR, constant_at=_DENSE | MOE_SITES)] = (
        Parallel.REPLICATED
    )
    # ranks that the intermediate size of moe_layer is cut into, or lora_linear as `parallel` says,
    # or the heads of gdn_in_proj
    tp: Annotated[
        int,
        _first(
            sites=_LINEAR | _LAYER | _GDN,
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
    ids: Annotated[Ids, Axis(sites=MOE_SITES)] = Ids.DISTINCT
    bias: Annotated[Bias, Axis(sites=_LINEAR)] = Bias.PRESENT
    cut: Annotated[Cut, Axis(sites=_LINEAR)] = Cut.EVEN
    # of each slice but the first, whose heads are as many as ranks; 0: any columns may be cut.
    # Where there are fewer heads than ranks, several ranks hold the same one
    heads: Annotated[int, Axis(sites=_LINEAR, minimum=0)] = 0
    # dimensions of x: [rows, in_features], or [2 or 1, rows, in_features]
    input_dims: Annotated[
        int, Axis(id_name="dims", sites=_LINEAR | _LAYER | _GDN, minimum=2, maximum=3)
    ] = 2
    # rows that an instance can take beyond those of the batch: its buffers are larger than needed
    spare_rows: Annotated[int, Axis(id_name="spare", minimum=0)] = 0
    streams: Annotated[Streams, Axis(sites=_LINEAR | _GDN | _LAYER)] = Streams.SEQUENTIAL
    key_heads: Annotated[int, Axis(sites=_GDN, required_at=_GDN, unstated=_ALL)] = 1
    products: Annotated[Products, Axis(sites=_GDN)] = Products.PLAN
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
    def out_rows(self) -> int:
        """Rows of the output: tokens, or the pairs of moe_delta."""
        return self.tokens * (1 if self.site is Site.MOE_LAYER else self.top_k)


AXES: Mapping[str, DeclaredAxis] = declared_axes(Case)
