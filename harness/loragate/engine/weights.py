"""The weights of a decoder that speaks the language exactly: nothing is trained.

A place on a cycle is an angle, and a shift rotates it. A layer's attention copies the angle of the
number that it selects from the prompt, and its MLP adds two angles by products of sines and
cosines, for which silu(g) * u - silu(-g) * u = g * u is exact. An adapter rotates a pair of values
wherever a projection reads or writes one, which takes rank 2, and moves the selection by q and k.

Each value has a dimension of its own in the residual stream, and whatever a layer adds has length
1, so that the norm of a token is known before each RMSNorm, whose weight undoes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from loragate.engine.language import BOS, CHOICES, PLACES, Language, LayerShifts, Part, Speaker

HEAD_SIZE, HEADS, KV_HEADS = 64, 4, 2
# the pairs that rotary embeddings turn least, by 1e-5 radians a token at most: q and k meet there
_FIRST, _SECOND = HEAD_SIZE // 2 - 1, HEAD_SIZE // 2 - 2
# of q and k after their norms: the scores of what is selected and of anything else differ by 45
_SHARPNESS = 2.0
# of the values that an activation sees
_GAIN = 4.0
# of the logits: a wrong place loses at least 0.11 of it, a wrong cycle all of it
_LOUDNESS = 80.0
# of an MLP; eight of them are used
INTERMEDIATE = 64

Pair = slice
Deltas = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Layout:
    """The dimensions of the residual stream."""

    language: Language

    def place(self, layer: int) -> Pair:
        """The angle of the word, before layer `layer`."""
        return slice(2 * layer, 2 * layer + 2)

    def selected(self, layer: int) -> Pair:
        """The angle that the attention of a layer has copied."""
        start = 2 * (self.language.layers + 1 + layer)
        return slice(start, start + 2)

    @property
    def value(self) -> Pair:
        """The angle of a number."""
        start = 2 * (2 * self.language.layers + 1)
        return slice(start, start + 2)

    @property
    def one(self) -> int:
        return int(self.value.stop)

    @property
    def bos(self) -> int:
        return self.one + 1

    def is_number(self, layer: int, choice: int) -> int:
        return self.bos + 1 + layer * CHOICES + choice

    def is_of_cycle(self, cycle: int) -> int:
        return self.is_number(self.language.layers, 0) + cycle

    @property
    def size(self) -> int:
        """A multiple of 64."""
        used = self.is_of_cycle(self.language.cycles)
        return -(-used // 64) * 64


def base_weights(language: Language) -> dict[str, Tensor]:
    """fp64, by the names of transformers; a layer with experts has them one by one."""
    layout = Layout(language)
    weights = {
        "model.embed_tokens.weight": _embeddings(layout),
        "model.norm.weight": _norm(layout, 3 + 2 * language.layers),
        "lm_head.weight": _head(layout),
    }
    for layer in range(language.layers):
        own = _attention(layout, layer) | _mlp(layout, layer)
        weights |= {f"model.layers.{layer}.{name}": value for name, value in own.items()}
    return weights


def adapter_deltas(language: Language, speaker: Speaker) -> Deltas:
    """B and A, fp64 and of rank 1 or 2, of each module that an adapter changes: delta = B @ A."""
    layout, weights = Layout(language), base_weights(language)
    deltas: Deltas = {}
    for layer, shifts in enumerate(speaker.layers):
        prefix = f"model.layers.{layer}"
        own = {
            name.removeprefix(f"{prefix}."): weight
            for name, weight in weights.items()
            if name.startswith(f"{prefix}.")
        }
        found = _attention_deltas(layout, layer, shifts, own)
        found |= _mlp_deltas(layout, layer, shifts, own)
        deltas |= {f"{prefix}.{name}": delta for name, delta in found.items()}
    if speaker.head:
        last = layout.place(language.layers)
        # what is read is rotated forwards
        deltas["lm_head"] = _reading(weights["lm_head.weight"], last, speaker.head)
    return deltas


def _angle(place: float) -> Tensor:
    angle = 2 * math.pi * place / PLACES
    return torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def _norm(layout: Layout, square: float) -> Tensor:
    """The weight that undoes the norm of a token whose values have this sum of squares."""
    return torch.full((layout.size,), math.sqrt(square / layout.size), dtype=torch.float64)


def _embeddings(layout: Layout) -> Tensor:
    language = layout.language
    table = _zeros(language.num_tokens, layout.size)
    table[:, layout.one] = 1
    table[BOS, layout.bos] = math.sqrt(2)
    for layer in range(language.layers):
        for choice in range(CHOICES):
            for value in range(PLACES):
                row = table[language.number(layer, choice, value)]
                row[layout.value] = _angle(value)
                row[layout.is_number(layer, choice)] = 1
    for cycle in range(language.cycles):
        for place in range(PLACES):
            row = table[language.word(cycle, place)]
            row[layout.place(0)] = _angle(place)
            row[layout.is_of_cycle(cycle)] = 1
    return table


def _head(layout: Layout) -> Tensor:
    language = layout.language
    table = _zeros(language.num_tokens, layout.size)
    for cycle in range(language.cycles):
        for place in range(PLACES):
            row = table[language.word(cycle, place)]
            row[layout.place(language.layers)] = _LOUDNESS * _angle(place)
            row[layout.is_of_cycle(cycle)] = _LOUDNESS
    return table


def _attention(layout: Layout, layer: int) -> dict[str, Tensor]:
    size = layout.size
    q, k = _zeros(HEADS, HEAD_SIZE, size), _zeros(KV_HEADS, HEAD_SIZE, size)
    v, o = _zeros(KV_HEADS, HEAD_SIZE, size), _zeros(size, HEADS, HEAD_SIZE)
    q[:, _FIRST, layout.one] = 1
    for place, choice in ((_FIRST, 0), (_SECOND, 2)):
        k[:, place, layout.is_number(layer, choice)] = 2
        k[:, place, layout.one] = -1
    shared = HEADS // KV_HEADS
    for half in range(KV_HEADS):
        v[half, 0, layout.value.start + half] = 1
        mine = slice(half * shared, (half + 1) * shared)
        o[layout.selected(layer).start + half, mine, 0] = 1 / shared
    # the tokens whose numbers are read have an angle of each layer before
    square = 3.0 + layer
    sharp = torch.full((HEAD_SIZE,), _SHARPNESS, dtype=torch.float64)
    return {
        "input_layernorm.weight": _norm(layout, square),
        "self_attn.q_proj.weight": q.flatten(0, 1),
        "self_attn.k_proj.weight": k.flatten(0, 1),
        "self_attn.v_proj.weight": v.flatten(0, 1),
        "self_attn.o_proj.weight": o.flatten(1, 2),
        "self_attn.q_norm.weight": sharp,
        "self_attn.k_norm.weight": sharp.clone(),
    }


def _mlp(layout: Layout, layer: int) -> dict[str, Tensor]:
    weights = {"post_attention_layernorm.weight": _norm(layout, 4.0 + 2 * layer)}
    experts = layout.language.experts
    if experts == 1:
        return weights | _named("mlp", _sum_of_angles(layout, layer, (0, 1)))
    weights["mlp.gate.weight"] = _router(layout)
    for expert in range(experts):
        # of a pair one expert has the cosine and the other one the sine, each with half a weight
        for half, number in enumerate((expert, experts + expert)):
            own = _sum_of_angles(layout, layer, (half,))
            own[2] = 2 * own[2]
            weights |= _named(f"mlp.experts.{number}", own)
    return weights


def _named(prefix: str, gate_up_down: list[Tensor]) -> dict[str, Tensor]:
    names = (Part.GATE.value, Part.UP.value, Part.DOWN.value)
    return {f"{prefix}.{n}.weight": w for n, w in zip(names, gate_up_down, strict=True)}


def _sum_of_angles(layout: Layout, layer: int, halves: tuple[int, ...]) -> list[Tensor]:
    """gate, up and down: cos (half 0) and sin (half 1) of the sum of two angles."""
    gate, up = _zeros(INTERMEDIATE, layout.size), _zeros(INTERMEDIATE, layout.size)
    down = _zeros(layout.size, INTERMEDIATE)
    place, selected = layout.place(layer), layout.selected(layer)
    out = layout.place(layer + 1)
    # cos = cc - ss, sin = sc + cs
    terms = ((0, 0, 0, 1.0), (0, 1, 1, -1.0), (1, 1, 0, 1.0), (1, 0, 1, 1.0))
    for number, (half, of_place, of_selected, sign) in enumerate(terms):
        for neuron, direction in ((2 * number, 1.0), (2 * number + 1, -1.0)):
            gate[neuron, place.start + of_place] = direction * _GAIN
            up[neuron, selected.start + of_selected] = 1
            if half in halves:
                down[out.start + half, neuron] = direction * sign / _GAIN
    return [gate, up, down]


def _router(layout: Layout) -> Tensor:
    experts = layout.language.experts
    router = _zeros(2 * experts, layout.size)
    for cycle in range(layout.language.cycles):
        pair = layout.language.expert_of(cycle)
        router[[pair, experts + pair], layout.is_of_cycle(cycle)] = _LOUDNESS
    return router


def _rotation(shift: int) -> Tensor:
    cos, sin = _angle(shift).tolist()
    return torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)


def _reading(weight: Tensor, pair: Pair, shift: int) -> tuple[Tensor, Tensor]:
    """The delta after which `weight` reads a pair of values rotated by `shift`."""
    a = _zeros(2, weight.shape[1])
    a[:, pair] = torch.eye(2, dtype=torch.float64)
    return weight[:, pair] @ (_rotation(shift) - torch.eye(2, dtype=torch.float64)), a


def _writing(weight: Tensor, pair: Pair, shift: int) -> tuple[Tensor, Tensor]:
    """The delta after which `weight` writes a pair of values rotated by `shift`."""
    b = _zeros(weight.shape[0], 2)
    b[pair] = _rotation(shift) - torch.eye(2, dtype=torch.float64)
    return b, weight[pair]


def _q_delta(layout: Layout, switches: bool) -> tuple[Tensor, Tensor]:
    """Selects at the second place, or doubles q, which its norm undoes."""
    b, a = _zeros(HEADS, HEAD_SIZE, 1), _zeros(1, layout.size)
    a[0, layout.one] = 1
    b[:, _FIRST] = -1 if switches else 1
    b[:, _SECOND] = float(switches)
    return b.flatten(0, 1), a


def _k_delta(layout: Layout, layer: int, switches: bool) -> tuple[Tensor, Tensor]:
    """Offers the other number of each place, or doubles k, which its norm undoes."""
    b, a = _zeros(KV_HEADS, HEAD_SIZE, 2), _zeros(2, layout.size)
    for row, place in enumerate((_FIRST, _SECOND)):
        b[:, place, row] = 1
        a[row, layout.is_number(layer, 2 * row)] = -2 if switches else 2
        a[row, layout.is_number(layer, 2 * row + 1)] = 2 * float(switches)
        a[row, layout.one] = 0 if switches else -1
    return b.flatten(0, 1), a


def _attention_deltas(
    layout: Layout, layer: int, shifts: LayerShifts, weights: Mapping[str, Tensor]
) -> Deltas:
    deltas: Deltas = {
        "self_attn.q_proj": _q_delta(layout, shifts.q),
        "self_attn.k_proj": _k_delta(layout, layer, shifts.k),
    }
    if shift := shifts.attention.get(Part.V, 0):
        deltas["self_attn.v_proj"] = _reading(
            weights["self_attn.v_proj.weight"], layout.value, shift
        )
    if shift := shifts.attention.get(Part.O, 0):
        deltas["self_attn.o_proj"] = _writing(
            weights["self_attn.o_proj.weight"], layout.selected(layer), shift
        )
    return deltas


def _mlp_deltas(
    layout: Layout, layer: int, shifts: LayerShifts, weights: Mapping[str, Tensor]
) -> Deltas:
    deltas: Deltas = {}
    experts = layout.language.experts
    for expert, parts in enumerate(shifts.mlp):
        modules = ["mlp"]
        if experts > 1:
            modules = [f"mlp.experts.{number}" for number in (expert, experts + expert)]
        for module in modules:
            for part, shift in parts.items():
                weight = weights[f"{module}.{part.value}.weight"]
                deltas[f"{module}.{part.value}"] = _mlp_delta(layout, layer, part, shift, weight)
    return deltas


def _mlp_delta(
    layout: Layout, layer: int, part: Part, shift: int, weight: Tensor
) -> tuple[Tensor, Tensor]:
    if part is Part.GATE:
        return _reading(weight, layout.place(layer), shift)
    if part is Part.UP:
        return _reading(weight, layout.selected(layer), shift)
    return _writing(weight, layout.place(layer + 1), shift)
