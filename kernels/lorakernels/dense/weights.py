"""Stacked A and B of every slot of one layer.

The buffers are allocated once and keep their addresses, so a captured graph goes on reading
whatever adapter was loaded last. A slot is always reset before another adapter moves in:
nothing of a larger predecessor survives (sglang #8103).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_RANK = 512


@dataclass(frozen=True, slots=True)
class LoRAFactors:
    """One adapter's part for one slice: delta = scale * (x @ a.T) @ b.T.

    a [r, in_features], b [slice width, r], any float dtype. `scale` is alpha / r or what
    rsLoRA makes of it; it is applied by the kernel and never folded into b.
    """

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


class SlotWeights:
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
        self.slice_widths = tuple(slice_widths)
        num_slices, out_features = len(self.slice_widths), sum(self.slice_widths)
        self.a = torch.zeros(num_slots, num_slices, rank, in_features, dtype=dtype, device=device)
        self.b = torch.zeros(num_slots, out_features, rank, dtype=dtype, device=device)
        self.ranks = torch.zeros(num_slots, num_slices, dtype=torch.int32, device=device)
        self.scales = torch.zeros(num_slots, num_slices, dtype=torch.float32, device=device)

    @property
    def num_slots(self) -> int:
        return self.a.shape[0]

    @property
    def num_slices(self) -> int:
        return self.a.shape[1]

    @property
    def rank(self) -> int:
        return self.a.shape[2]

    @property
    def in_features(self) -> int:
        return self.a.shape[3]

    @property
    def out_features(self) -> int:
        return self.b.shape[1]

    def load(self, slot: int, factors: Sequence[LoRAFactors | None]) -> None:
        """Replace the adapter of a slot, all or nothing. None leaves a slice without adapter.

        Raises ValueError before anything is changed.
        """
        self._check_slot(slot)
        if len(factors) != self.num_slices:
            raise ValueError(
                f"factors must have one entry for each of the {self.num_slices} slices "
                f"(got {len(factors)})"
            )
        for index, part in enumerate(factors):
            if part is not None:
                self._check_factors(index, part)
        self.reset(slot)
        start = 0
        for index, (part, width) in enumerate(zip(factors, self.slice_widths, strict=True)):
            if part is not None:
                self.a[slot, index, : part.rank].copy_(part.a)
                self.b[slot, start : start + width, : part.rank].copy_(part.b)
                self.ranks[slot, index] = part.rank
                self.scales[slot, index] = part.scale
            start += width

    def reset(self, slot: int) -> None:
        """Empty a slot; its rows then get no delta."""
        self._check_slot(slot)
        self.ranks[slot].zero_()
        self.scales[slot].zero_()
        self.a[slot].zero_()
        self.b[slot].zero_()

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot must be 0 to {self.num_slots - 1} (got {slot})")

    def _check_factors(self, index: int, part: LoRAFactors) -> None:
        width = self.slice_widths[index]
        rank = part.a.shape[0] if part.a.dim() == 2 else -1
        if part.a.dim() != 2 or part.a.shape[1] != self.in_features:
            raise ValueError(
                f"a of slice {index} must be [rank, {self.in_features}] (got {list(part.a.shape)})"
            )
        if part.b.shape != (width, rank):
            raise ValueError(
                f"b of slice {index} must be [{width}, {rank}] (got {list(part.b.shape)})"
            )
        check_values(index, part.a, part.b, part.scale, rank=rank, max_rank=self.rank)


def check_geometry(
    num_slots: int, slice_widths: Sequence[int], in_features: int, rank: int, dtype: torch.dtype
) -> None:
    """What the stacked weights of a dense and of a MoE layer have in common. ValueError."""
    require_positive("num_slots", num_slots)
    require_positive("in_features", in_features)
    for width in slice_widths:
        require_positive("slice_widths", width)
    if not slice_widths:
        raise ValueError("slice_widths must name at least one slice (got none)")
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"rank must be 1 to {MAX_RANK} (got {rank})")
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"dtype must be float16, bfloat16 or float32 (got {dtype})")


def check_values(
    index: int, a: Tensor, b: Tensor, scale: float, *, rank: int, max_rank: int
) -> None:
    """What holds for the factors of any slice, whatever their shape. ValueError."""
    if not 1 <= rank <= max_rank:
        raise ValueError(f"rank of slice {index} must be 1 to {max_rank} (got {rank})")
    if not (a.is_floating_point() and b.is_floating_point()):
        raise ValueError(
            f"a and b of slice {index} must be floating point (got {a.dtype} and {b.dtype})"
        )
    check_scale(f"slice {index}", scale)


def check_scale(what: str, scale: float) -> None:
    """Scales are stored in fp32, which holds less than a Python float. ValueError."""
    stored = torch.tensor(scale, dtype=torch.float64).float().item()
    if not math.isfinite(stored):
        raise ValueError(f"scale of {what} must be finite in float32 (got {scale})")
    if scale != 0 and stored == 0:
        raise ValueError(f"scale of {what} must not vanish in float32 (got {scale})")


def require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1 (got {value})")
