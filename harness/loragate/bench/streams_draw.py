"""Rows of `bench streams` that no table lists: layers of real models, drawn from a seed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from types import MappingProxyType

from loragate.bench.rows import Linear
from loragate.core.drawn import drawn_number

# largest ranks that servers are configured with
RANKS = (8, 16, 32, 64, 128)
# batches have less than two to this power rows
SIZE_CLASSES = 12


@dataclass(frozen=True, slots=True)
class _Model:
    """Widths of a decoder: hidden, all query heads, all key heads, intermediate."""

    hidden: int
    query: int
    key: int
    intermediate: int

    @property
    def linears(self) -> dict[str, Linear]:
        return {
            "qkv": Linear(self.hidden, (self.query, self.key, self.key)),
            "o": Linear(self.query, (self.hidden,)),
            "gate_up": Linear(self.hidden, (self.intermediate, self.intermediate)),
            "down": Linear(self.intermediate, (self.hidden,)),
        }


_MODELS = MappingProxyType(
    {
        "gemma2_9b": _Model(3584, 4096, 2048, 14336),
        "llama3_8b": _Model(4096, 4096, 1024, 14336),
        "llama3_70b": _Model(8192, 8192, 1024, 28672),
        "mistral_nemo": _Model(5120, 4096, 1024, 14336),
        "qwen2_5_7b": _Model(3584, 3584, 512, 18944),
        "qwen3_0_6b": _Model(1024, 2048, 1024, 3072),
        "qwen3_32b": _Model(5120, 8192, 1024, 25600),
    }
)
LAYERS = MappingProxyType(
    {f"{name}.{site}": x for name, model in _MODELS.items() for site, x in model.linears.items()}
)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A layer of LAYERS, an odd number of rows, and a rank."""

    layer: str
    tokens: int
    rank: int


def draw(seed: int, size: int) -> tuple[Drawn, ...]:
    """`size` different rows; a larger draw from a seed begins with the smaller one."""
    return tuple(islice(_different(seed), size))


def _different(seed: int) -> Iterator[Drawn]:
    seen: set[Drawn] = set()
    for index in count():
        drawn = _draw_one(seed, index)
        if drawn not in seen:
            seen.add(drawn)
            yield drawn


def _draw_one(seed: int, index: int) -> Drawn:
    def below(limit: int, what: str) -> int:
        return drawn_number(f"{seed}/{index}/{what}", limit)

    layer = list(LAYERS)[below(len(LAYERS), "layer")]
    tokens = drawn_tokens(below, SIZE_CLASSES)
    return Drawn(layer, tokens, RANKS[below(len(RANKS), "rank")])


def drawn_tokens(below: Callable[[int, str], int], size_classes: int) -> int:
    """An odd number of rows below two to the power `size_classes`; as many small batches as large
    ones. `below` draws a number below its first argument."""
    smallest = 1 << below(size_classes, "class")
    return smallest + below(smallest, "tokens") | 1
