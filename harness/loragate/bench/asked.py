"""Rows that a user asks for in place of a table: layers of another model, or points that a seed
draws. Pure.

A dense layer is written as 8192x1024+128+128, its in_features and the widths of its slices; a
product of experts as 2048x768+768/128/8, with its experts and how many of them a token takes, and
/pair behind it where x has a row for each of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from loragate.bench.moe_rows import DeltaRow, projection_of
from loragate.bench.rows import DenseRow, linear_of
from loragate.bench.streams_draw import LAYERS, RANKS, draw, drawn_tokens
from loragate.core.drawn import drawn_number

_RANK = 16
_MOST_DRAWN = 10_000
# with fewer tokens than two to this power
_EXPERT_SIZE_CLASSES = 12
# hidden and intermediate size of an expert, experts, experts of a token
_EXPERTS = (
    (4096, 14336, 8, 2),  # Mixtral-8x7B
    (2048, 768, 128, 8),  # Qwen3-30B-A3B
    (2048, 512, 512, 10),  # Qwen3-Next-80B-A3B
    (2048, 1408, 64, 6),  # DeepSeek-V2-Lite
    (2880, 2880, 32, 4),  # GPT-OSS-20B
    (4096, 1408, 128, 8),  # GLM-4.5-Air
    (2048, 1024, 64, 8),  # OLMoE-1B-7B
)

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks for. `drawn`: how many points, of `seed`; without shapes; None if
    that was not said."""

    shapes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    drawn: int | None = None
    seed: int | None = None

    def check(self) -> None:
        """Raises ValueError that names the option."""
        if self.drawn is not None and (self.shapes or self.ranks or self.tokens):
            raise ValueError("--drawn draws shapes, ranks and tokens; leave out the others")
        if self.seed is not None and self.drawn is None:
            raise ValueError("--seed is that of drawn points; say how many with --drawn")
        if (self.ranks or self.tokens) and not self.shapes:
            raise ValueError("--rank and --tokens are those of layers; name one with --shape")
        # beyond that there may be no other points to draw, and none could be waited for
        if self.drawn is not None and not 1 <= self.drawn <= _MOST_DRAWN:
            raise ValueError(f"--drawn must be from 1 to {_MOST_DRAWN} (got {self.drawn})")
        for option, values in (("--rank", self.ranks), ("--tokens", self.tokens)):
            if min(values, default=1) < 1:
                raise ValueError(f"{option} must be at least 1 (got {min(values)})")

    def __bool__(self) -> bool:
        return self != Asked()


def dense_asked(asked: Asked, tokens: Sequence[int]) -> tuple[DenseRow, ...]:
    """Rows of dense layers; `tokens` where the user names none. Raises ValueError."""
    asked.check()
    if asked.drawn is not None:
        points = draw(asked.seed or 0, asked.drawn)
        return tuple(DenseRow(str(LAYERS[p.layer]), p.tokens, p.rank) for p in points)
    return _all_of(asked, tokens, lambda shape, m, rank: DenseRow(str(linear_of(shape)), m, rank))


def moe_asked(asked: Asked, tokens: Sequence[int]) -> tuple[DeltaRow, ...]:
    """Rows of products of experts, those with the same adapters beside each other. ValueError."""
    asked.check()
    if asked.drawn is not None:
        return _drawn_experts(asked.seed or 0, asked.drawn)
    return _all_of(
        asked, tokens, lambda shape, m, rank: DeltaRow(str(projection_of(shape)), rank, m)
    )


def _all_of(
    asked: Asked, tokens: Sequence[int], row: Callable[[str, int, int], _Row]
) -> tuple[_Row, ...]:
    sizes = product(asked.shapes, asked.ranks or (_RANK,), asked.tokens or tokens)
    # an option that is given twice asks for nothing more
    return tuple(dict.fromkeys(row(shape, m, rank) for shape, rank, m in sizes))


def _drawn_experts(seed: int, size: int) -> tuple[DeltaRow, ...]:
    rows: dict[DeltaRow, None] = {}
    index = 0
    while len(rows) < size:
        rows[_draw_experts(seed, index)] = None
        index += 1
    return tuple(sorted(rows, key=lambda row: (row.projection, row.rank, row.tokens)))


def _draw_experts(seed: int, index: int) -> DeltaRow:
    def below(limit: int, what: str) -> int:
        return drawn_number(f"{seed}/{index}/experts/{what}", limit)

    hidden, intermediate, experts, top_k = _EXPERTS[below(len(_EXPERTS), "model")]
    routing = f"/{experts}/{top_k}"
    of_pairs = below(2, "product")
    first = f"{hidden}x{intermediate}+{intermediate}{routing}"
    second = f"{intermediate}x{hidden}{routing}/pair"
    rank = RANKS[below(len(RANKS), "rank")]
    return DeltaRow(second if of_pairs else first, rank, drawn_tokens(below, _EXPERT_SIZE_CLASSES))
