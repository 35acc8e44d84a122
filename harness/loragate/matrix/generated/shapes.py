"""What a generated case may be: for each site the sizes that belong together, and for every axis of
the matrix its values. Pure.

Sizes are as often small as large, and as often multiples of what a tile holds as not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from loragate.matrix.axis import DeclaredAxis
from loragate.matrix.case import AXES, MAX_RANK, Site, Tier
from loragate.matrix.generated.chance import Chance

Point = dict[str, Any]
# an axis that has a default has another value in one of so many cases
_DEVIATES = 3
_UNITS = (1, 1, 8, 16)
_USUAL_RANKS = (8, 16, 32, 64, 128)
# values of integer axes beside their default
_NUMBERS = MappingProxyType(
    {"tp": (2, 3, 4, 8), "ep": (2, 3, 4), "heads": (1, 2, 4, 8), "input_dims": (3,)}
)


@dataclass(frozen=True, slots=True)
class Scale:
    """The largest sizes, and how many multiplications a step may take: of any case, and of one
    whose graph is replayed for some twenty batches."""

    tokens: int
    width: int
    tile: int
    ids: int
    rank: int
    slots: int
    experts: int
    top_k: int
    heads: int
    work: int
    graph_work: int
    bytes: int


_INTERPRETED = Scale(
    tokens=200,
    width=300,
    tile=8,
    ids=400,
    rank=40,
    slots=5,
    experts=9,
    top_k=4,
    heads=4,
    work=20_000_000,
    graph_work=2_000_000,
    bytes=2 << 30,
)
_COMPILED = Scale(
    tokens=8192,
    width=32768,
    tile=64,
    ids=152_000,
    rank=MAX_RANK,
    slots=16,
    experts=512,
    top_k=16,
    heads=32,
    work=1 << 40,
    graph_work=1 << 40,
    bytes=8 << 30,
)
SCALES: Mapping[Tier, Scale] = MappingProxyType(
    {Tier.SMOKE: _INTERPRETED, Tier.PREMERGE: _COMPILED, Tier.NIGHTLY: _COMPILED}
)


def choices_of(site: Site, chance: Chance) -> Point:
    """A value of each axis that is no size."""
    return {
        name: _value(axis, site, chance)
        for name, axis in AXES.items()
        if axis.at(site) and (axis.members or name in _NUMBERS)
    }


def sizes_of(site: Site, scale: Scale, chance: Chance) -> Point:
    """A value of each axis that is a size."""
    tokens = _tokens(scale, chance)
    spare = chance.size(scale.tokens) if chance.one_in(_DEVIATES) else 0
    common: Point = {"tokens": tokens, "spare_rows": spare}
    common |= {"slots": chance.size(scale.slots), "rank": _rank(scale, chance)}
    return common | _SHAPES[site](scale, chance)


def _value(axis: DeclaredAxis, site: Site, chance: Chance) -> Any:
    values = axis.values.get(site, axis.members) or _NUMBERS[axis.name]
    if axis.is_required_at(site):
        return chance.choice(values)
    others = [value for value in values if value != axis.default]
    return chance.choice(others) if chance.one_in(_DEVIATES) else axis.default


def _tokens(scale: Scale, chance: Chance) -> int:
    """Tiles end at powers of two: every other batch is beside one."""
    tokens = chance.size(scale.tokens)
    if chance.one_in(2):
        tokens = (1 << tokens.bit_length() - 1) + chance.below(3) - 1
    return min(scale.tokens, tokens)


def _rank(scale: Scale, chance: Chance) -> int:
    usual = [rank for rank in _USUAL_RANKS if rank <= scale.rank]
    return chance.choice(usual) if chance.one_in(2) else chance.size(scale.rank)


def _width(scale: Scale, chance: Chance) -> int:
    """Every other one like those of models: large, and a multiple of a tile."""
    if chance.one_in(2):
        return chance.size(scale.width, unit=scale.tile, least=scale.width // 32)
    return chance.size(scale.width, unit=chance.choice(_UNITS))


def _linear(scale: Scale, chance: Chance) -> Point:
    return {"in_features": _width(scale, chance), "slices": _slices(scale, chance)}


def _slices(scale: Scale, chance: Chance) -> tuple[int, ...]:
    """One, gate and up, query, key and value, or several that have nothing in common."""
    width = _width(scale, chance)
    fewer = max(1, width // chance.choice((1, 2, 4, 8)))
    unequal = tuple(_width(scale, chance) for _ in range(2 + chance.below(3)))
    return chance.choice(((width,), (width, width), (width, fewer, fewer), unequal))


def _routed(scale: Scale, chance: Chance) -> Point:
    experts = chance.size(scale.experts)
    return {"experts": experts, "top_k": chance.size(min(experts, scale.top_k))}


def _expert_delta(scale: Scale, chance: Chance) -> Point:
    return _linear(scale, chance) | _routed(scale, chance)


def _expert_layer(scale: Scale, chance: Chance) -> Point:
    gate_up = (_width(scale, chance),) * (1 if chance.one_in(4) else 2)
    return {"in_features": _width(scale, chance), "slices": gate_up} | _routed(scale, chance)


def _delta_net(scale: Scale, chance: Chance) -> Point:
    """Heads and their columns, whose products are the widths; see matrix/delta_net.py."""
    keys = chance.size(scale.heads)
    values = keys * chance.size(4)
    most = max(1, scale.width // (4 * values))
    key_columns, value_columns = chance.size(most), chance.size(most)
    qkv, z = 2 * keys * key_columns + values * value_columns, values * value_columns
    slices = (qkv + z, 2 * values) if chance.one_in(2) else (qkv, z, values, values)
    return {"in_features": _width(scale, chance), "slices": slices, "key_heads": keys}


def _embedding(scale: Scale, chance: Chance) -> Point:
    return {"in_features": chance.size(scale.ids), "slices": (_width(scale, chance),)}


_SHAPES: Mapping[Site, Callable[[Scale, Chance], Point]] = MappingProxyType(
    {
        Site.DENSE_DELTA: _linear,
        Site.LORA_LINEAR: _linear,
        Site.MOE_DELTA: _expert_delta,
        Site.MOE_LAYER: _expert_layer,
        Site.GDN_IN_PROJ: _delta_net,
        Site.EMBEDDING: _embedding,
    }
)
