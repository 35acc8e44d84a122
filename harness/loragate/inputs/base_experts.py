"""The base layer of moe_layer, and its quantisation.

SIGNED: like other base layers, a quarter of a delta in size. EXACT: see exact_layer.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.inputs.batch import BASE_SIZE
from loragate.inputs.draw import DataKind, Draw, torch_dtype
from loragate.inputs.exact_layer import exact_w2, exact_w13
from loragate.matrix.case import Case, Quantisation
from loragate.protocol import BaseExperts

_FP8 = torch.float8_e4m3fn
_SMALLEST = 1e-12


def make_base_experts(case: Case, seed: int, kind: DataKind, machine: Machine) -> BaseExperts:
    """The experts of the whole layer, before it is cut over ranks."""
    draw = Draw(machine, seed, f"base-{kind}")
    hidden, width = case.in_features, case.slices[0]
    if kind is DataKind.EXACT:
        w13, w2 = exact_w13(draw, case), exact_w2(draw, case)
    else:
        w13 = draw.normal(case.experts, sum(case.slices), hidden) * (BASE_SIZE / math.sqrt(hidden))
        w2 = draw.normal(case.experts, hidden, width) * (BASE_SIZE / math.sqrt(width))
    if case.quantisation is Quantisation.NONE:
        dtype = torch_dtype(case.dtype)
        return BaseExperts(w13.to(dtype), None, w2.to(dtype))
    (w13, scales13), (w2, scales2) = quantised(w13), quantised(w2)
    return BaseExperts(w13, None, w2, (scales13, scales2))


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
    return BaseExperts(base.weight[order], None, base.down[order], scales)
