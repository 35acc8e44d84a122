"""Quantised operands: 8-bit floating-point values with scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# keeps the scale of a row of zeros from being zero
_SMALLEST = 1e-12


@dataclass(frozen=True, slots=True)
class Quantised:
    """8-bit floating-point values with their scales; they represent value * scale.

    Activations: values [rows, K], scales fp32 [rows]. Weights: values [E, N, K], scales fp32
    [E, N], or of a linear module values [N, K], scales fp32 [N]. The product is computed in the
    dtype of the layer and scaled afterwards.
    """

    values: Tensor
    scales: Tensor


def check_8_bit(name: str, operand: Quantised) -> None:
    """ValueError unless the values are those of `quantise_rows`, which the products take."""
    if operand.values.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"values of {name} must be torch.float8_e4m3fn (got {operand.values.dtype})"
        )


def quantise_rows(x: Tensor) -> Quantised:
    """x [rows, K] in float8_e4m3fn with one scale for each row, chosen so that the row's largest
    value is just representable. The rows lie one behind the other, whatever the strides of x are:
    products of 8 bits take no others."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    # rows that nobody reads may hold arbitrary values; NaN and Inf stay in their row
    scales = x.abs().amax(dim=1).float().clamp_min(_SMALLEST) / largest
    values = x.float() / scales[:, None]
    return Quantised(values.to(torch.float8_e4m3fn, memory_format=torch.contiguous_format), scales)
