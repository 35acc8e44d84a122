"""Stacked A and B of every slot of one linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorakernels.common.digests import SavedWeight
from lorakernels.common.stacked_weights import (
    SlotTensors,
    StackedWeights,
    check_adopted,
    check_geometry,
    empty_slots,
)


@dataclass(frozen=True, slots=True)
class LoRAFactors:
    """One adapter's part for one slice: delta = scale * (x @ a.T) @ b.T.

    a [r, in_features], b [slice width, r], any float dtype. `scale` is alpha / r, or alpha /
    sqrt(r) with rsLoRA; it is applied by the kernel and never folded into b. `base` is of the base
    weight that the adapter was saved with, None if it was saved without.
    """

    a: Tensor
    b: Tensor
    scale: float
    base: SavedWeight | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[0]


class SlotWeights(StackedWeights[LoRAFactors]):
    """A [slots, slices, rank, in_features], B [slots, sum(slice_widths), rank], and for each
    (slot, slice) the live rank (int32) and the scale (fp32). Rank 0 means no adapter."""

    def __init__(
        self,
        *,
        num_slots: int,
        slice_widths: Sequence[int],
        in_features: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        check_geometry(num_slots, slice_widths, in_features, rank, dtype)
        slices = len(slice_widths)
        shapes = (num_slots, slices, rank, in_features), (num_slots, sum(slice_widths), rank)
        super().__init__(empty_slots(*shapes, slices, dtype, device), slice_widths)

    @classmethod
    def over(
        cls, a: Tensor, b: Tensor, ranks: Tensor, scales: Tensor, *, slice_widths: Sequence[int]
    ) -> SlotWeights:
        """Slots in tensors that somebody else has allocated, and goes on writing to where he wants.

        a [slots, slices, rank, in_features], b [slots, sum(slice_widths), rank] of one dtype, ranks
        int32 and scales fp32 [slots, slices], all contiguous and on one device. They are neither
        copied nor changed: what they hold are the resident adapters. Behind the live ranks of a
        slice, B must be finite up to a multiple of gcd(16, rank), A may hold anything. Raises
        ValueError.
        """
        if a.dim() != 4:
            raise ValueError(f"a must have four dimensions (got shape {list(a.shape)})")
        tensors = SlotTensors(a, b, ranks, scales)
        check_adopted(tensors, slice_widths, copies_b=())
        weights = cls.__new__(cls)
        StackedWeights.__init__(weights, tensors, slice_widths)
        return weights

    def _check_shapes(self, index: int, part: LoRAFactors) -> None:
        width = self.slice_widths[index]
        if part.a.dim() != 2 or part.a.shape[1] != self.in_features:
            raise ValueError(
                f"a of slice {index} must be [rank, {self.in_features}] (got {list(part.a.shape)})"
            )
        rank = part.a.shape[0]
        if part.b.shape != (width, rank):
            raise ValueError(
                f"b of slice {index} must be [{width}, {rank}] (got {list(part.b.shape)})"
            )
