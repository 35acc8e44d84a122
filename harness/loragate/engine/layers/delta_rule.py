"""Linear attention by the gated delta rule that copies a number of the prompt.

A number is written into the state under a key of its own, so that a query reads one of them: two
of a prompt under keys that queries know, two others and all words under keys that none does. No
key is 0, because keys are normalised and whatever rounding leaves would become one. BOS is written
under both keys of queries, so that something is read from the first token on. The query is made
from the token before, so that the state of the convolution takes part.

All value heads see the same values and write them rotated by `BA_SHIFTS`, but only one of them
keeps and returns a state: the first one by itself, another one by an adapter, which closes the
first one for writing (b) and keeps the other one from forgetting (a). A value is held in two
copies, of which the gate z lets one through; the second one is rotated by `Z_SHIFT`.

The activation after the convolution and the norm of the output are not linear: an angle is held as
silu(x) and silu(-x), whose difference is x, beside a constant that dominates the norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from loragate.engine.language import BA_SHIFTS, Z_SHIFT, LayerShifts, Part
from loragate.engine.layers.layout import (
    GAIN,
    Delta,
    Deltas,
    Layout,
    norm,
    reading,
    rotation,
    writing,
    zeros,
)

# those of real models; kernels are made for them
KEY_SIZE = VALUE_SIZE = 128
KEY_HEADS, VALUE_HEADS = 2, 1 + len(BA_SHIFTS)
TAPS = 4
_SHARED = VALUE_HEADS // KEY_HEADS
# of b and a: sigmoid(-30) is 1e-13, as is the share of a state that exp(-softplus(30)) keeps
_WIDE = 30.0
# among the values, of which an angle has 2 * GAIN**2 at most
_CONSTANT = 64.0
# cos, -cos, sin and -sin, twice, then the constant
_COPY = 4
# what queries read: by themselves, and switched
_READ = (0, 1)
# of each number, and of anything else
_KEYS, _OTHER = (_READ[0], 2, _READ[1], 3), 4


def linear_attention_weights(layout: Layout, layer: int) -> dict[str, Tensor]:
    qkvz, (q, k, v, z) = _qkvz(layout.size)
    q[:, _READ[0], layout.one] = GAIN
    for choice, place in enumerate(_KEYS):
        k[:, place, layout.is_number(layer, choice)] = GAIN
        k[:, _OTHER, layout.is_number(layer, choice)] = -GAIN
    k[:, _OTHER, layout.one] = GAIN
    for place in (*_READ, _OTHER):
        k[:, place, layout.bos] = (-GAIN if place == _OTHER else GAIN) / math.sqrt(2)
    v[:] = _values(layout)
    z[:, :, :_COPY, layout.one] = GAIN
    ba = zeros(KEY_HEADS, 2, _SHARED, layout.size)
    ba[:, :, :, layout.one] = _WIDE
    ba[0, 1, 0, layout.one] = -_WIDE
    return {
        # the tokens whose numbers are read have an angle of each layer before
        "input_layernorm.weight": norm(layout, 3.0 + layer),
        "linear_attn.in_proj_qkvz.weight": qkvz.flatten(0, 1),
        "linear_attn.in_proj_ba.weight": ba.flatten(0, 2),
        "linear_attn.conv1d.weight": _convolution(),
        "linear_attn.A_log": zeros(VALUE_HEADS),
        "linear_attn.dt_bias": zeros(VALUE_HEADS),
        "linear_attn.norm.weight": torch.ones(VALUE_SIZE, dtype=torch.float64),
        "linear_attn.out_proj.weight": _out(layout, layer),
    }


def linear_attention_deltas(
    layout: Layout, layer: int, shifts: LayerShifts, weights: Mapping[str, Tensor]
) -> Deltas:
    """The modules of a layer of linear attention. Names without a layer."""
    deltas: Deltas = {"linear_attn.in_proj_qkvz": _qkvz_delta(layout, layer, shifts)}
    if shift := shifts.attention.get(Part.BA, 0):
        head = 1 + BA_SHIFTS.index(shift)
        b, a = zeros(KEY_HEADS, 2, _SHARED, 1), zeros(1, layout.size)
        a[0, layout.one] = 1
        b[0, 0, 0] = -2 * _WIDE
        b[head // _SHARED, 1, head % _SHARED] = -2 * _WIDE
        deltas["linear_attn.in_proj_ba"] = b.flatten(0, 2), a
    if shift := shifts.attention.get(Part.O, 0):
        deltas["linear_attn.out_proj"] = writing(
            weights["linear_attn.out_proj.weight"], layout.selected(layer), shift
        )
    return deltas


def _qkvz(columns: int) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Zeros, [key heads, rows, columns], in which each key head has its q, k, v and z, and views of
    these: [key heads, key size, columns] and [key heads, value heads of each, value size, columns].
    """
    values = _SHARED * VALUE_SIZE
    rows = zeros(KEY_HEADS, 2 * KEY_SIZE + 2 * values, columns)
    ends = (KEY_SIZE, 2 * KEY_SIZE, 2 * KEY_SIZE + values)
    q, k, v, z = rows.tensor_split(ends, dim=1)
    heads = (KEY_HEADS, _SHARED, VALUE_SIZE, columns)
    return rows, (q, k, v.view(heads), z.view(heads))


def _qkvz_delta(layout: Layout, layer: int, shifts: LayerShifts) -> Delta:
    """Of rank 5: a column for what q and z add to a constant, two for k and two for v."""
    known, unknown = _KEYS[0::2], _KEYS[1::2]
    b, (q, k, v, z) = _qkvz(5)
    a = zeros(5, layout.size)
    a[0, layout.one] = GAIN
    # reads another number, or doubles q, which is normalised
    q[:, _READ[0], 0] = -1 if shifts.q else 1
    q[:, _READ[1], 0] = float(shifts.q)
    if Part.Z in shifts.attention:
        z[:, :, :_COPY, 0] = -1
        z[:, :, _COPY : 2 * _COPY, 0] = 1
    # exchanges the keys of two numbers, or doubles one of them
    for pair in range(2):
        k[:, known[pair], 1 + pair] = 1
        k[:, unknown[pair], 1 + pair] = -float(shifts.k)
        a[1 + pair, layout.is_number(layer, 2 * pair)] = -GAIN if shifts.k else GAIN
        a[1 + pair, layout.is_number(layer, 2 * pair + 1)] = GAIN * float(shifts.k)
    if shift := shifts.attention.get(Part.V, 0):
        v[:, :, :, 3:], a[3:] = reading(_values(layout), layout.value, shift)
    return b.flatten(0, 1), a


def _values(layout: Layout) -> Tensor:
    """[value size, hidden size], of each head"""
    rows = zeros(VALUE_SIZE, layout.size)
    for number in range(2 * _COPY):
        half, direction = number % _COPY // 2, 1 - 2 * (number % 2)
        rows[number, layout.value.start + half] = direction * GAIN
    rows[2 * _COPY, layout.one] = _CONSTANT
    return rows


def _convolution() -> Tensor:
    """[channels, 1, taps]: q takes the token before, k and v the token itself."""
    keys = KEY_HEADS * KEY_SIZE
    taps = zeros(2 * keys + VALUE_HEADS * VALUE_SIZE, 1, TAPS)
    taps[:keys, 0, -2] = 1
    taps[keys:, 0, -1] = 1
    return taps


def _out(layout: Layout, layer: int) -> Tensor:
    """[hidden size, values]"""
    out = zeros(layout.size, VALUE_HEADS, VALUE_SIZE)
    # silu(x)**2 + silu(-x)**2 is x**2 / 2 for a small x and x**2 for a large one
    length = math.sqrt((_CONSTANT**2 + 2 * 0.8 * GAIN**2) / VALUE_SIZE)
    opened = GAIN / (1 + math.exp(-GAIN))
    for head, of_head in enumerate((0, *BA_SHIFTS)):
        for copy, of_copy in enumerate((0, Z_SHIFT)):
            turned = rotation(of_head + of_copy) * length / (GAIN * opened)
            start = copy * _COPY
            out[layout.selected(layer), head, start : start + _COPY : 2] = turned
            out[layout.selected(layer), head, start + 1 : start + _COPY : 2] = -turned
    return out.flatten(1, 2)
