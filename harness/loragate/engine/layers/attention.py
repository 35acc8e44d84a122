"""Attention that copies a number of the prompt."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from loragate.engine.language import LayerShifts, Part
from loragate.engine.layers.layout import (
    Delta,
    Deltas,
    Layout,
    norm,
    reading,
    writing,
    zeros,
)

HEAD_SIZE, HEADS, KV_HEADS = 64, 4, 2
# the pairs that rotary embeddings turn least, by 1e-5 radians a token at most: q and k meet there
_FIRST, _SECOND = HEAD_SIZE // 2 - 1, HEAD_SIZE // 2 - 2
# of q and k after their norms: the scores of what is selected and of anything else differ by 45
_SHARPNESS = 2.0


def attention_weights(layout: Layout, layer: int) -> dict[str, Tensor]:
    size = layout.size
    q, k = zeros(HEADS, HEAD_SIZE, size), zeros(KV_HEADS, HEAD_SIZE, size)
    v, o = zeros(KV_HEADS, HEAD_SIZE, size), zeros(size, HEADS, HEAD_SIZE)
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
    if layout.language.linear_layers:
        # such a model multiplies the output by a sigmoid of further rows of q, which is 1/2 here
        o = 2 * o
    return {
        "input_layernorm.weight": norm(layout, square),
        "self_attn.q_proj.weight": _with_gates(layout, q),
        "self_attn.k_proj.weight": k.flatten(0, 1),
        "self_attn.v_proj.weight": v.flatten(0, 1),
        "self_attn.o_proj.weight": o.flatten(1, 2),
        "self_attn.q_norm.weight": sharp,
        "self_attn.k_norm.weight": sharp.clone(),
    }


def _with_gates(layout: Layout, q: Tensor) -> Tensor:
    """The rows of q, [heads, head size, ...], each head followed by its output gate in a model that
    has gates: these are 0."""
    if layout.language.linear_layers:
        q = torch.cat([q, torch.zeros_like(q)], dim=1)
    return q.flatten(0, 1)


def _q_delta(layout: Layout, switches: bool) -> Delta:
    """Selects at the second place, or doubles q, which its norm undoes."""
    b, a = zeros(HEADS, HEAD_SIZE, 1), zeros(1, layout.size)
    a[0, layout.one] = 1
    b[:, _FIRST] = -1 if switches else 1
    b[:, _SECOND] = float(switches)
    return _with_gates(layout, b), a


def _k_delta(layout: Layout, layer: int, switches: bool) -> Delta:
    """Offers the other number of each place, or doubles k, which its norm undoes."""
    b, a = zeros(KV_HEADS, HEAD_SIZE, 2), zeros(2, layout.size)
    for row, place in enumerate((_FIRST, _SECOND)):
        b[:, place, row] = 1
        a[row, layout.is_number(layer, 2 * row)] = -2 if switches else 2
        a[row, layout.is_number(layer, 2 * row + 1)] = 2 * float(switches)
        a[row, layout.one] = 0 if switches else -1
    return b.flatten(0, 1), a


def attention_deltas(
    layout: Layout, layer: int, shifts: LayerShifts, weights: Mapping[str, Tensor]
) -> Deltas:
    deltas: Deltas = {
        "self_attn.q_proj": _q_delta(layout, shifts.q),
        "self_attn.k_proj": _k_delta(layout, layer, shifts.k),
    }
    if shift := shifts.attention.get(Part.V, 0):
        deltas["self_attn.v_proj"] = reading(
            weights["self_attn.v_proj.weight"], layout.value, shift
        )
    if shift := shifts.attention.get(Part.O, 0):
        deltas["self_attn.o_proj"] = writing(
            weights["self_attn.o_proj.weight"], layout.selected(layer), shift
        )
    return deltas
