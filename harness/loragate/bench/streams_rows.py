"""The rows of `bench streams`: linear layers, input projections of a gated delta net, and MoE
layers. Pure; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from loragate.bench import streams_draw
from loragate.bench.moe_rows import LayerRow
from loragate.bench.rows import LINEARS, SLOTS, Linear, case_of, dense_rows
from loragate.bench.select import equal_runs
from loragate.matrix.case import Case

SEED = 1
NUM_DRAWN = 30
GDN_TOKENS = (1, 8, 16, 64, 256, 1024, 2048, 8192)
GDN_RANK = 16
MOE_TOKENS = (1, 8, 32, 128, 512, 2048, 8192)

# forms as lorakernels names them; the first ones run on one stream
SINGLE_STREAM_FORMS = ("single", "ahead")
DUAL_STREAM_FORMS = ("dual", "stored")
LINEAR_FORMS = (*SINGLE_STREAM_FORMS, *DUAL_STREAM_FORMS)
GDN_FORMS = ("serial", "dual", "merged", "beside")
MOE_SINGLE = "single"
MOE_FORMS = (MOE_SINGLE, "beside", "dual")


@dataclass(frozen=True, slots=True)
class LinearRow:
    """A linear layer: bf16, SLOTS adapters that fill their rank, rows in equal runs over the slots.
    `seed` is what the row was drawn from, None for a row of the table of `bench dense`."""

    layer: str
    shape: Linear
    tokens: int
    rank: int
    seed: int | None = None

    @property
    def id(self) -> str:
        prefix = "" if self.seed is None else "drawn."
        return f"{prefix}{self.layer}.m{self.tokens}.r{self.rank}"

    @property
    def case(self) -> Case:
        return case_of(self.shape, self.tokens, self.rank)

    @property
    def token_slots(self) -> tuple[int, ...]:
        return equal_runs(self.tokens, SLOTS)


@dataclass(frozen=True, slots=True)
class GDNShape:
    """The input projection of a gated delta net. `grouped`: an adapter has one module for qkvz and
    one for ba; otherwise one each for qkv, z, b and a."""

    in_features: int
    key_heads: int
    value_heads: int
    head_size: int
    grouped: bool

    @property
    def qkvz(self) -> tuple[int, ...]:
        """The widths of the modules of qkvz."""
        keys, values = self.key_heads * self.head_size, self.value_heads * self.head_size
        return (2 * keys + 2 * values,) if self.grouped else (2 * keys + values, values)

    @property
    def ba(self) -> tuple[int, ...]:
        """The widths of the modules of ba."""
        return (2 * self.value_heads,) if self.grouped else (self.value_heads, self.value_heads)


GDN_SHAPES = MappingProxyType(
    {
        "qwen3_next": GDNShape(2048, 16, 32, 128, grouped=True),
        # 9B
        "qwen3_5": GDNShape(4096, 16, 32, 128, grouped=False),
    }
)


class Adapted(StrEnum):
    """Which projections the adapters of a batch have factors for. NONE: no row has an adapter."""

    NONE = "none"
    QKVZ = "qkvz"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class GDNRow:
    """An input projection: bf16, SLOTS adapters of rank GDN_RANK, rows in equal runs over them."""

    model: str
    adapted: Adapted
    tokens: int

    @property
    def id(self) -> str:
        return f"gdn.{self.model}.{self.adapted}.m{self.tokens}"

    @property
    def case(self) -> Case:
        """A slice for each module, those of qkvz first."""
        shape = GDN_SHAPES[self.model]
        whole = Linear(shape.in_features, shape.qkvz + shape.ba)
        return case_of(whole, self.tokens, GDN_RANK)

    @property
    def token_slots(self) -> tuple[int, ...]:
        if self.adapted is Adapted.NONE:
            return (-1,) * self.tokens
        return equal_runs(self.tokens, SLOTS)


@dataclass(frozen=True, slots=True)
class MoERow:
    """The layer of `bench moe`. `shared`: with a shared expert, as wide as a routed one and without
    adapters."""

    shared: bool
    tokens: int

    @property
    def id(self) -> str:
        return f"moe.{'shared' if self.shared else 'routed'}.m{self.tokens}"

    @property
    def layer(self) -> LayerRow:
        return LayerRow(self.tokens)

    @property
    def case(self) -> Case:
        """The delta of w13."""
        return self.layer.deltas[0].case


StreamRow = LinearRow | GDNRow | MoERow


def stream_rows(seed: int = SEED) -> tuple[StreamRow, ...]:
    """Rows of one projection with the same adapters are adjacent."""
    gdn = [
        GDNRow(model, adapted, tokens)
        for model in GDN_SHAPES
        for adapted in Adapted
        for tokens in GDN_TOKENS
    ]
    moe = [MoERow(shared, tokens) for shared in (False, True) for tokens in MOE_TOKENS]
    return (*listed_rows(), *drawn_rows(seed), *gdn, *moe)


def listed_rows() -> tuple[LinearRow, ...]:
    """The rows of `bench dense`."""
    return tuple(
        LinearRow(row.linear, LINEARS[row.linear], row.tokens, row.rank) for row in dense_rows()
    )


def drawn_rows(seed: int) -> tuple[LinearRow, ...]:
    return tuple(
        LinearRow(one.layer, streams_draw.LAYERS[one.layer], one.tokens, one.rank, seed)
        for one in streams_draw.draw(seed, NUM_DRAWN)
    )
