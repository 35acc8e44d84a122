"""The rows of `bench dense` and the bytes that no implementation can avoid. Pure; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from loragate.bench.select import equal_runs
from loragate.matrix.case import Case, Dtype, Mix, Ranks, Site

# of the calls of a row: the base product, and what LoRA adds behind it
BASE, BEHIND_BASE = "base", "base and delta"
SLOTS = 4
TOKENS = (1, 16, 64, 256, 2048)
RANKS = (16, 64)
_BYTES_PER_ELEMENT = 2


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer of a real model: in_features, and the width of each packed slice."""

    in_features: int
    slices: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.in_features}x{'+'.join(map(str, self.slices))}"


# Qwen3-8B
LINEARS = MappingProxyType(
    {
        "qkv": Linear(4096, (4096, 1024, 1024)),
        "gate_up": Linear(4096, (12288, 12288)),
        "down": Linear(12288, (4096,)),
    }
)


def linear_of(name: str) -> Linear:
    """A layer of LINEARS, or one that is written as 8192x1024+128+128. ValueError."""
    if name in LINEARS:
        return LINEARS[name]
    try:
        return Linear(*widths_of(name))
    except ValueError:
        raise ValueError(
            f"shape must be like 8192x1024+128+128, in_features x widths of slices, or one of "
            f"{', '.join(LINEARS)} (got {name!r})"
        ) from None


def widths_of(text: str) -> tuple[int, tuple[int, ...]]:
    """in_features, and the widths of the slices. ValueError."""
    before, _, after = text.partition("x")
    in_features, slices = int(before), tuple(map(int, after.split("+")))
    if min(in_features, *slices) < 1:
        raise ValueError("sizes are positive")
    return in_features, slices


def case_of(shape: Linear, tokens: int, rank: int) -> Case:
    """A step of a layer in bf16 with SLOTS adapters that fill their rank."""
    return Case(
        site=Site.DENSE_DELTA,
        tokens=tokens,
        in_features=shape.in_features,
        slices=shape.slices,
        rank=rank,
        slots=SLOTS,
        dtype=Dtype.BF16,
        mix=Mix.RAGGED,
        ranks=Ranks.FULL,
    )


@dataclass(frozen=True, slots=True)
class DenseRow:
    """One row of the table: bf16, all SLOTS adapters fill the rank of their buffers. `linear` is a
    name that `linear_of` takes."""

    linear: str
    tokens: int
    rank: int

    @property
    def id(self) -> str:
        return f"{self.linear}.m{self.tokens}.r{self.rank}"

    @property
    def case(self) -> Case:
        return case_of(linear_of(self.linear), self.tokens, self.rank)

    @property
    def token_slots(self) -> tuple[int, ...]:
        return equal_runs(self.tokens, SLOTS)

    @property
    def floor_bytes(self) -> int:
        """A and B of the used slots read once, x read once, the output read and written once."""
        shape = linear_of(self.linear)
        out_features = sum(shape.slices)
        touched = len(set(self.token_slots))
        a = touched * len(shape.slices) * self.rank * shape.in_features
        b = touched * out_features * self.rank
        x = self.tokens * shape.in_features
        return _BYTES_PER_ELEMENT * (a + b + x + 2 * self.tokens * out_features)


def dense_rows() -> tuple[DenseRow, ...]:
    return tuple(
        DenseRow(linear, tokens, rank) for linear in LINEARS for tokens in TOKENS for rank in RANKS
    )
