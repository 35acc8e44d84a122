"""The values that axes of the matrix may have, and which sites there are. No torch."""

from __future__ import annotations

from enum import StrEnum

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
    # the vocabulary embedding of a model, whose adapters are looked up by token id
    EMBEDDING = "embedding"
    # a model that serves requests with adapters, in a process of its own
    ENGINE = "engine"


# all sites but those of whole models: their cases have shapes of tensors
OPERATIONS = frozenset(Site) - {Site.ENGINE}
# sites whose tokens are routed to experts, and sites that write to the output of the batch
MOE_SITES = frozenset({Site.MOE_DELTA, Site.MOE_LAYER})
IN_PLACE_SITES = frozenset({Site.DENSE_DELTA, Site.MOE_DELTA})
# sites that add the delta of a row to base products of their own
LINEAR_SITES = frozenset({Site.LORA_LINEAR, Site.GDN_IN_PROJ})
# sites that are given the weight of one base layer
LAYER_SITES = LINEAR_SITES | {Site.EMBEDDING}


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
    # the input is contiguous, and an output that is changed in place is columns of a wider tensor
    OUTPUT_SLICE = "output_slice"


class Execution(StrEnum):
    EAGER = "eager"
    # captured once into a CUDA graph, then replayed
    GRAPH = "graph"


class Streams(StrEnum):
    """What a layer runs on. Without a GPU dual streams are modelled."""

    SEQUENTIAL = "sequential"
    # the work of the adapters on a stream beside that of the base layer
    DUAL = "dual"


class Beside(StrEnum):
    """What of a linear layer's delta runs beside its base product, with dual streams."""

    # what A gives; B comes behind the base product
    SHRINK = "shrink"
    # all of it; the sum comes behind the base product
    DELTA = "delta"


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


class Sharding(StrEnum):
    """What each rank of a cut LoRA linear layer holds of its adapters."""

    # what its part of the base weight needs: A or B is cut, the other one is whole
    BASE = "base"
    # both are cut, A by its ranks or B by its columns, and the ranks exchange what A gives
    RANK = "rank"


class Base(StrEnum):
    """What a LoRA linear layer is made of."""

    # weight and bias, which it holds
    WEIGHT = "weight"
    # a linear layer that exists and is called, such as one with quantised weights
    CALLABLE = "callable"


class Buffers(StrEnum):
    """Who has allocated the slots of a layer."""

    OWN = "own"
    # the server: one tensor for A and one for B, beside other tensors of its arena
    ARENA = "arena"
    # the server: a tensor for each slice, which it writes to itself when an adapter is loaded
    STACKS = "stacks"


class Loading(StrEnum):
    """Where ranks and scales are when an adapter is loaded."""

    HOST = "host"
    # in tensors on the device, beside factors padded to the rank of the slots
    DEVICE = "device"


class Plans(StrEnum):
    """What the plans of a batch follow from."""

    # its rows, among others
    BATCH = "batch"
    # nothing that differs between batches: a row has the same bits in a batch of any size
    ONE = "one"


class Cut(StrEnum):
    """How a width is cut over tensor-parallel ranks."""

    # tp divides it
    EVEN = "even"
    # the base layer is padded to a multiple of tp, adapters are not: the last ranks hold less
    PADDED = "padded"


class Bias(StrEnum):
    """Of the base layer of lora_linear, or of the experts of moe_layer."""

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


class Placement(StrEnum):
    """Which experts of moe_layer the ranks of expert parallelism hold."""

    # consecutive ones, as many on each as possible, the first ranks one more
    RUNS = "runs"
    # expert e on rank e % ep
    ROUND_ROBIN = "round_robin"
    # in no order, and some on several ranks or twice on one; one replica computes a pair
    REPLICATED = "replicated"


class Ids(StrEnum):
    """The ids by which tokens choose experts, or rows of an embedding."""

    # those of one token are all different, and each of them is that of an expert, or -1; embedding:
    # those of rows that exist
    DISTINCT = "distinct"
    # a token may choose one expert more than once
    REPEATED = "repeated"
    # some are beyond the last expert or below -1: such a pair has no expert. embedding: some are
    # negative or beyond the last row, and the result of such a token is zero
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


class Activation(StrEnum):
    """Between the two products of moe_layer, of gate and up. Without a gate there is SILU alone."""

    SILU = "silu"
    # Gemma
    GELU_TANH = "gelu_tanh"
    # GPT-OSS: (up + 1) * gate * sigmoid(1.702 * gate), gate at most 7 and up within -7 and 7
    SWIGLU_OAI = "swiglu_oai"


class GateUp(StrEnum):
    """How gate and up of moe_layer lie in the base weights and their biases."""

    # gate above up; adapters have factors of each
    HALVES = "halves"
    # the rows of gate and up in turn; adapters have one module for both, so that these share A, the
    # rank and the scale, and its B lies in the same way
    INTERLEAVED = "interleaved"


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
