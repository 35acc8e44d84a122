"""The base products of a gated delta net's input, with weights of the input's dtype or of 8 bits.

A product of 8 bits quantises its input as well, each row by its largest value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lorakernels.common.quantised import quantise_rows

# of both sizes of an 8-bit weight, for the tensor cores
_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class BaseProduct:
    """x @ weight.T, with weight [columns, in_features] of the dtype of x; or, with scales fp32
    [columns], of 8-bit floats that represent value * scale."""

    weight: Tensor
    scales: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, columns] for x [rows, in_features]."""
        if self.scales is None:
            return F.linear(x, self.weight)
        return _quantised(x, self.weight, self.scales)

    def write(self, x: Tensor, out: Tensor) -> None:
        """The same into `out`, which may be columns of a wider tensor."""
        if self.scales is None:
            torch.mm(x, self.weight.T, out=out)
        else:
            out.copy_(_quantised(x, self.weight, self.scales))

    @property
    def fits_tensor_cores(self) -> bool:
        """Whether its sizes are those that a kernel for 8 bits takes; others take all sizes."""
        return self.scales is None or _fits_tensor_cores(self.weight)

    def split(self, columns: int) -> tuple[BaseProduct, BaseProduct]:
        """A product of the first columns, and one of the others."""
        if self.scales is None:
            first, others = self.weight[:columns], self.weight[columns:]
            return BaseProduct(first, None), BaseProduct(others, None)
        return (
            BaseProduct(self.weight[:columns], self.scales[:columns]),
            BaseProduct(self.weight[columns:], self.scales[columns:]),
        )


def _quantised(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    rows = quantise_rows(x)
    of_rows = rows.scales[:, None]
    if _runs_in_8_bits(x, weight):
        return torch._scaled_mm(
            rows.values, weight.T, scale_a=of_rows, scale_b=scales[None], out_dtype=x.dtype
        )
    return ((rows.values.float() @ weight.float().T) * of_rows * scales).to(x.dtype)


def _runs_in_8_bits(x: Tensor, weight: Tensor) -> bool:
    """Whether torch has a kernel that scales each row and column: for bf16, from sm_90 on."""
    if not x.is_cuda or x.dtype is not torch.bfloat16 or not x.shape[0]:
        return False
    is_new = torch.cuda.get_device_capability(x.device) >= (9, 0)
    return is_new and _fits_tensor_cores(weight)


def _fits_tensor_cores(weight: Tensor) -> bool:
    return not any(size % _MULTIPLE for size in weight.shape)
