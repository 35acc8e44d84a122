"""The rows of `bench graphs`: decode steps that are captured and replayed. Pure; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

LAYERS = 4
RANK = 16
SLOTS = 8
TOKENS = (1, 4, 16, 64)
ADAPTERS = (1, 8)
HOST_SLOTS = (2, 64)
MAX_TOKENS = max(TOKENS)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The linear layers of a decoder layer; `experts` of `intermediate`, of which a token uses
    `top_k`, or none: then the layer has one gate, up and down."""

    hidden: int
    qkv: tuple[int, int, int]
    intermediate: int
    experts: int = 0
    top_k: int = 0


MODELS = MappingProxyType(
    {
        "qwen3_8b": ModelShape(4096, (4096, 1024, 1024), 12288),
        "qwen3_30b_a3b": ModelShape(2048, (4096, 512, 512), 768, experts=128, top_k=8),
    }
)


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """The replay of a step of `tokens` rows with so many different adapters."""

    model: str
    tokens: int
    adapters: int

    @property
    def id(self) -> str:
        return f"replay.{self.model}.m{self.tokens}.a{self.adapters}"

    @property
    def token_slots(self) -> tuple[int, ...]:
        """The rows take the adapters in turns."""
        return tuple(row % self.adapters for row in range(self.tokens))


@dataclass(frozen=True, slots=True)
class HostRow:
    """What the host does between two replays, with so many slots."""

    model: str
    slots: int

    @property
    def id(self) -> str:
        return f"host.{self.model}.s{self.slots}"


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """The memory that adapters need beside their weights."""

    model: str

    @property
    def id(self) -> str:
        return f"memory.{self.model}"


GraphRow = ReplayRow | HostRow | MemoryRow


def graph_rows() -> tuple[GraphRow, ...]:
    """Rows of one model are adjacent."""
    found: list[GraphRow] = []
    for model in MODELS:
        found += [
            ReplayRow(model, tokens, adapters)
            for tokens in TOKENS
            for adapters in ADAPTERS
            if adapters <= tokens
        ]
        found += [HostRow(model, slots) for slots in HOST_SLOTS]
        found.append(MemoryRow(model))
    return tuple(found)
