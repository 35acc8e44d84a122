"""The rows of `bench moe` and a lower bound for the time of each. Pure; no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

from loragate.bench.bars import REFERENCE_BYTES_PER_S
from loragate.bench.rows import widths_of
from loragate.bench.select import equal_runs
from loragate.matrix.case import Case, Dtype, Path, Ranks, RouterWeights, Site, Source

SLOTS = 4
TOKENS = (1, 16, 64, 256, 1024, 4096)
RANKS = (16, 64)
ALIGN_TOKENS = (1, 64, 1024, 8192)
# 40 to 640 pairs, on both sides of the 256 that one program sorts alone
EXPERTS_TOKENS = (4, 12, 25, 32, 51, 64)
FEW_EXPERTS, MANY_EXPERTS = 64, 512
LAYER_TOKENS = (1, 16, 256, 2048, 8192)
LAYER_RANK = 16
# rate of a bf16 product of random data on an H200
REFERENCE_FLOPS = 780e12
# beyond this, one program per token-expert pair reads the factors far too often
_MOST_TOKENS_WITHOUT_TILES = 64
_BYTES_PER_ELEMENT = 2


@dataclass(frozen=True, slots=True)
class Projection:
    """One product of the experts of a real model. `source`: whether x has a row for each token
    or for each token-expert pair."""

    in_features: int
    slices: tuple[int, ...]
    experts: int
    top_k: int
    source: Source = Source.TOKEN

    def __str__(self) -> str:
        widths = "+".join(map(str, self.slices))
        pairs = "/pair" if self.source is Source.PAIR else ""
        return f"{self.in_features}x{widths}/{self.experts}/{self.top_k}{pairs}"

    @property
    def out_features(self) -> int:
        return sum(self.slices)

    @property
    def factor_elements(self) -> int:
        """Elements of A and B of one expert of one adapter, for each rank."""
        return len(self.slices) * self.in_features + self.out_features


PROJECTIONS = MappingProxyType(
    {
        "mixtral": Projection(4096, (7168, 7168), 8, 2),
        "qwen3moe": Projection(2048, (1408, 1408), 64, 8),
        "qwen3_30b_w13": Projection(2048, (768, 768), 128, 8),
        "qwen3_30b_w2": Projection(768, (2048,), 128, 8, Source.PAIR),
    }
)
# w13 of Qwen3-Next-80B-A3B; it is aligned with fewer experts as well
QWEN3_NEXT_W13 = Projection(2048, (512, 512), MANY_EXPERTS, 10)


def projection_of(name: str) -> Projection:
    """A product of PROJECTIONS, or one that is written as 2048x768+768/128/8. ValueError."""
    if name in PROJECTIONS:
        return PROJECTIONS[name]
    widths, *numbers = name.removesuffix("/pair").split("/")
    try:
        experts, top_k = map(int, numbers)
        found = Projection(*widths_of(widths), experts, top_k)
    except ValueError:
        found = None
    if found is None or not 1 <= found.top_k <= found.experts:
        raise ValueError(
            f"shape must be like 2048x768+768/128/8, in_features x widths of slices / experts / "
            f"experts of a token, with /pair behind it where x has a row for each pair, or one of "
            f"{', '.join(PROJECTIONS)} (got {name!r})"
        )
    return replace(found, source=Source.PAIR) if name.endswith("/pair") else found


@dataclass(frozen=True, slots=True)
class DeltaRow:
    """One row of the table of deltas: bf16, in place, all SLOTS adapters fill their rank, rows
    in equal runs over the slots, experts drawn uniformly, those of a token distinct. `projection`
    is a name that `projection_of` takes."""

    projection: str
    rank: int
    tokens: int

    @property
    def id(self) -> str:
        return f"{self.projection}.m{self.tokens}.r{self.rank}"

    @property
    def case(self) -> Case:
        shape = projection_of(self.projection)
        of_pairs = shape.source is Source.PAIR
        return Case(
            site=Site.MOE_DELTA,
            tokens=self.tokens,
            in_features=shape.in_features,
            slices=shape.slices,
            rank=self.rank,
            slots=SLOTS,
            dtype=Dtype.BF16,
            ranks=Ranks.FULL,
            experts=shape.experts,
            top_k=shape.top_k,
            source=shape.source,
            # a server applies the router weights to the output of w2
            router=RouterWeights.OUTPUT if of_pairs else RouterWeights.NONE,
        )

    @property
    def token_slots(self) -> tuple[int, ...]:
        return equal_runs(self.tokens, SLOTS)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The paths that are timed at this size."""
        few = self.tokens <= _MOST_TOKENS_WITHOUT_TILES
        return tuple(path for path in Path if few or path is not Path.SMALL_BATCH)

    def floor_us(self, buckets: int, bytes_per_s: float = REFERENCE_BYTES_PER_S) -> float:
        """The larger of the times of bytes and of operations. `buckets`: combinations of slot and
        expert that have rows; their A and B are read once, x once, the output is read and written
        once."""
        shape, case = projection_of(self.projection), self.case
        factors = buckets * self.rank * shape.factor_elements
        x, out = case.x_rows * case.in_features, case.out_rows * case.out_features
        moved = _BYTES_PER_ELEMENT * (factors + x + 2 * out)
        flops = 2 * case.out_rows * self.rank * shape.factor_elements
        return max(moved / bytes_per_s, flops / REFERENCE_FLOPS) * 1e6


@dataclass(frozen=True, slots=True)
class AlignRow:
    """Sorting the routed pairs of a step: Qwen3-30B-A3B's 128 experts, top-8, SLOTS slots."""

    tokens: int

    @property
    def id(self) -> str:
        return f"align.m{self.tokens}"

    @property
    def delta(self) -> DeltaRow:
        """The delta that the alignment is for; it shows whether the alignment is right."""
        return DeltaRow("qwen3_30b_w13", 16, self.tokens)


@dataclass(frozen=True, slots=True)
class ExpertsRow:
    """Sorting the routed pairs of a small step with FEW_EXPERTS and with MANY_EXPERTS: as many
    tokens and SLOTS slots, top-10."""

    tokens: int

    @property
    def id(self) -> str:
        return f"align.experts.m{self.tokens}"

    @property
    def deltas(self) -> tuple[DeltaRow, DeltaRow]:
        """With few and with many experts: what the alignments are for, as in AlignRow."""
        few, many = (
            DeltaRow(str(replace(QWEN3_NEXT_W13, experts=experts)), 16, self.tokens)
            for experts in (FEW_EXPERTS, MANY_EXPERTS)
        )
        return few, many


@dataclass(frozen=True, slots=True)
class LayerRow:
    """A whole layer of Qwen3-30B-A3B, alignment included: bf16, without adapters and with one of
    rank LAYER_RANK on every expert of each of SLOTS slots."""

    tokens: int

    @property
    def id(self) -> str:
        return f"layer.m{self.tokens}"

    @property
    def deltas(self) -> tuple[DeltaRow, DeltaRow]:
        """Of w13 and of w2."""
        w13, w2 = "qwen3_30b_w13", "qwen3_30b_w2"
        return DeltaRow(w13, LAYER_RANK, self.tokens), DeltaRow(w2, LAYER_RANK, self.tokens)


MoERow = DeltaRow | AlignRow | ExpertsRow | LayerRow


def deltas_of(row: MoERow) -> tuple[DeltaRow, ...]:
    """The deltas that a subject must be able to compute."""
    match row:
        case DeltaRow():
            return (row,)
        case AlignRow():
            return (row.delta,)
        case ExpertsRow() | LayerRow():
            return row.deltas


def moe_rows() -> tuple[MoERow, ...]:
    """Rows of one projection and rank are adjacent: they share their adapters."""
    deltas = [
        DeltaRow(projection, rank, tokens)
        for projection in PROJECTIONS
        for rank in RANKS
        for tokens in TOKENS
    ]
    aligns, experts = map(AlignRow, ALIGN_TOKENS), map(ExpertsRow, EXPERTS_TOKENS)
    return (*deltas, *aligns, *experts, *map(LayerRow, LAYER_TOKENS))
