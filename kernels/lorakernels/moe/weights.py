"""Stacked A and B of every slot of one MoE projection.

Which side of the factors all experts share is a property of the buffers and never of an adapter:
a side is stored once or once per expert, whatever moves in (sglang #28564).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorakernels.common.stacked_weights import (
    StackedWeights,
    check_geometry,
    empty_slots,
    require_positive,
)
from lorakernels.dense.weights import LoRAFactors


@dataclass(frozen=True, slots=True)
class ExpertFactors:
    """One adapter's part for one slice: delta = scale * (x @ a[e].T) @ b[e].T for expert e.

    a [experts, r, in_features], b [experts, slice width, r], any float dtype. A first axis of
    1 stands for a factor that all experts share. `scale` is applied by the kernel and never
    folded into b.
    """

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[1]


Factors = LoRAFactors | ExpertFactors


class ExpertWeights(StackedWeights[ExpertFactors]):
    """A [slots, experts, slices, rank, in_features], B [slots, experts, sum(slice_widths),
    rank], and for each (slot, slice) the live rank (int32) and the scale (fp32). Rank 0 means
    no adapter.

    With `shared_a` or `shared_b` the expert axis of that side is 1 and all experts read it.
    B begins at column `first_column` of the base product.
    `load` copies a factor that all experts share to each of them where the buffers keep one per
    expert; the other way round is an error.
    """

    first_column = 0

    def __init__(
        self,
        *,
        num_slots: int,
        num_experts: int,
        slice_widths: Sequence[int],
        in_features: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device | str,
        shared_a: bool = False,
        shared_b: bool = False,
    ) -> None:
        require_positive("num_experts", num_experts)
        check_geometry(num_slots, slice_widths, in_features, rank, dtype)
        self.num_experts = num_experts
        copies_a, copies_b = (1 if shared else num_experts for shared in (shared_a, shared_b))
        slices = len(slice_widths)
        a_shape = (num_slots, copies_a, slices, rank, in_features)
        b_shape = (num_slots, copies_b, sum(slice_widths), rank)
        super().__init__(empty_slots(a_shape, b_shape, slices, dtype, device), slice_widths)

    @property
    def base_widths(self) -> tuple[int, ...]:
        """Columns of each slice of the base product, of which B may have a part."""
        return self.slice_widths

    @property
    def shared_a(self) -> bool:
        return self.a.shape[1] < self.num_experts

    @property
    def shared_b(self) -> bool:
        return self.b.shape[1] < self.num_experts

    def _check_shapes(self, index: int, part: ExpertFactors) -> None:
        rank = part.a.shape[1] if part.a.dim() == 3 else -1
        width, in_features = self.slice_widths[index], self.in_features
        if not _fits(part.a, self.a.shape[1], rank, in_features):
            allowed = _allowed(self.a.shape[1], "rank", in_features)
            raise ValueError(f"a of slice {index} must be {allowed} (got {list(part.a.shape)})")
        if not _fits(part.b, self.b.shape[1], width, rank):
            allowed = _allowed(self.b.shape[1], width, rank)
            raise ValueError(f"b of slice {index} must be {allowed} (got {list(part.b.shape)})")


def _fits(factor: Tensor, experts: int, rows: int, columns: int) -> bool:
    # a shared factor fits everywhere, one per expert only where the buffers keep one per expert
    return factor.shape in ((1, rows, columns), (experts, rows, columns))


def _allowed(experts: int, rows: int | str, columns: int) -> str:
    counts = sorted({1, experts})
    return " or ".join(f"[{count}, {rows}, {columns}]" for count in counts)
