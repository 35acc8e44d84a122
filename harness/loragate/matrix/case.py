"""The words of the matrix: a case is one point of the product of these axes. Pure; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loragate.verdict import OracleName


class Site(StrEnum):
    """An operation that can be checked."""

    DENSE_DELTA = "dense_delta"
    LORA_LINEAR = "lora_linear"


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

    # ragged runs: base rows, every slot incl. the last, but one enabled slot without tokens
    RAGGED = "ragged"
    # the same population as RAGGED in random row order
    SHUFFLED = "shuffled"
    # every row uses one and the same slot
    SINGLE = "single"
    # base rows and the last slot only
    LAST_SLOT = "last_slot"
    ALL_BASE = "all_base"


class Layout(StrEnum):
    """How the input and the output lie in memory."""

    CONTIGUOUS = "contiguous"
    # input and output are columns cut out of wider tensors: row stride > width, offset != 0
    COLUMN_SLICE = "column_slice"
    # rows beyond the live ones follow, as in a batch padded to a captured size
    PADDED_ROWS = "padded_rows"
    # the input's columns are strided: x is a transposed view
    TRANSPOSED = "transposed"


class Execution(StrEnum):
    EAGER = "eager"
    # captured once into a CUDA graph, then replayed
    GRAPH = "graph"


class Parallel(StrEnum):
    """How a LoRA linear layer is cut over tensor-parallel ranks."""

    REPLICATED = "replicated"
    COLUMN = "column"
    ROW = "row"


class Ranks(StrEnum):
    """Live ranks of the adapters in the slots, given the rank of the buffers."""

    # every adapter fills its slot
    FULL = "full"
    # ranks differ from slot to slot and from slice to slice; one slice of one slot is absent
    MIXED = "mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One check of one operation, for any subject.

    Shapes: x [tokens, in_features], A [slots, slices, rank, in_features],
    B [slots, sum(slices), rank], out [tokens, sum(slices)].
    `rank` is the rank of the slot buffers; an adapter's live rank may be smaller.
    """

    site: Site
    tokens: int
    in_features: int
    slices: tuple[int, ...]
    rank: int
    slots: int
    dtype: Dtype
    mix: Mix = Mix.RAGGED
    ranks: Ranks = Ranks.MIXED
    layout: Layout = Layout.CONTIGUOUS
    execution: Execution = Execution.EAGER
    # lora_linear only
    parallel: Parallel = Parallel.REPLICATED
    tp: int = 1
    # how the case is run, not what it is: these do not enter the id
    tier: Tier = Tier.SMOKE
    oracles: tuple[OracleName, ...] = (OracleName.REFERENCE,)
    timeout_s: float = 60.0

    @property
    def out_features(self) -> int:
        return sum(self.slices)
