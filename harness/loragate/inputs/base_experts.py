"""The base layer of moe_layer, its order of gate and up, and its quantisation.

SIGNED: like other base layers, a quarter of a delta in size; biases reach beyond the limit of an
activation that has one, on both sides. EXACT: see exact_layer.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.inputs.batch import BASE_SIZE
from loragate.inputs.draw import DataKind, Draw, torch_dtype
from loragate.inputs.exact_layer import exact_biases, exact_w2, exact_w13
from loragate.matrix.case import Activation, Bias, Case, GateUp, Quantisation
from loragate.protocol import BaseExperts

_FP8 = torch.float8_e4m3fn
_SMALLEST = 1e-12
# the limit of SWIGLU_OAI, and the largest biases with it and without
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
_REACH = {Activation.SWIGLU_OAI: 1.3 * SWIGLU_LIMIT}
_PLAIN_REACH = 1.0


def make_base_experts(case: Case, seed: int, kind: DataKind, machine: Machine) -> BaseExperts:
    """The experts of the whole layer, before it is cut over ranks."""
    draw = Draw(machine, seed, f"base-{kind}")
    experts, hidden, width = case.experts, case.in_features, case.slices[0]
    is_quantised = case.quantisation is not Quantisation.NONE
    dtype = torch_dtype(case.dtype)
    # what is quantised is rounded once
    drawn = torch.float32 if is_quantised else dtype
    if kind is DataKind.EXACT:
        w13, w2 = exact_w13(draw, case, drawn), exact_w2(draw, case, drawn)
    else:
        w13 = _normal(draw, drawn, BASE_SIZE / math.sqrt(hidden), experts, sum(case.slices), hidden)
        w2 = _normal(draw, drawn, BASE_SIZE / math.sqrt(width), experts, hidden, width)
    biases: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
    if case.expert_bias is Bias.PRESENT:
        first, second = _biases(draw, case, kind)
        biases = laid_out(case, first).to(dtype), second.to(dtype)
    w13 = laid_out(case, w13)
    if not is_quantised:
        return BaseExperts(w13, biases[0], w2, None, biases[1])
    w13, scales13 = _quantised_experts(w13)
    w2, scales2 = _quantised_experts(w2)
    return BaseExperts(w13, biases[0], w2, (scales13, scales2), biases[1])


def _normal(draw: Draw, dtype: torch.dtype, size: float, *shape: int) -> Tensor:
    return draw.normal(*shape, dtype=dtype, then=lambda values: values.mul_(size))


def _quantised_experts(values: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantised`, one expert after the other: in fp32 there are no copies of all of them."""
    result = torch.empty_like(values, dtype=_FP8)
    scales = values.new_empty(values.shape[:2])
    for expert, rows in enumerate(values):
        result[expert], scales[expert] = quantised(rows)
    return result, scales


def _biases(draw: Draw, case: Case, kind: DataKind) -> tuple[Tensor, Tensor]:
    if kind is DataKind.EXACT:
        return exact_biases(draw, case)
    reach = _REACH.get(case.activation, _PLAIN_REACH)
    first = draw.uniform(-reach, reach, case.experts, sum(case.slices))
    return first, draw.uniform(-BASE_SIZE, BASE_SIZE, case.experts, case.in_features)


def laid_out(case: Case, rows: Tensor) -> Tensor:
    """Rows [experts, sum(slices), ..] of gate above up, in the order of the case."""
    if case.gate_up is GateUp.HALVES:
        return rows
    return torch.stack(rows.chunk(2, dim=1), dim=2).flatten(1, 2)


def in_halves(case: Case, rows: Tensor) -> Tensor:
    """The inverse of `laid_out`: gate above up."""
    if case.gate_up is GateUp.HALVES:
        return rows
    return torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1)


def quantised(values: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit values, and a scale for each row by which its largest value is just representable.
    Scales are fp32, or fp64 for fp64 values."""
    wide = values if values.dtype == torch.float64 else values.float()
    scales = wide.abs().amax(dim=-1).clamp_min(_SMALLEST) / torch.finfo(_FP8).max
    return (wide / scales[..., None]).to(_FP8), scales


def quantised_by(scales: Tensor, values: Tensor) -> Tensor:
    """`values` rounded to 8-bit values with the given scale for each row; what is beyond the
    largest 8-bit value becomes the largest."""
    largest = torch.finfo(_FP8).max
    units = (values / scales[..., None]).clamp(-largest, largest)
    return dequantised(units.to(_FP8), scales)


def dequantised(values: Tensor, scales: Tensor) -> Tensor:
    """The values times their scales, in the dtype of the scales."""
    return values.to(scales.dtype) * scales[..., None]


def reordered_base(base: BaseExperts, order: list[int]) -> BaseExperts:
    """Expert `i` of the result is what expert `order[i]` was."""
    scales = None if base.scales is None else (base.scales[0][order], base.scales[1][order])
    bias = None if base.bias is None else base.bias[order]
    down_bias = None if base.down_bias is None else base.down_bias[order]
    return BaseExperts(base.weight[order], bias, base.down[order], scales, down_bias)
