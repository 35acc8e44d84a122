"""Stacked A and B of every slot of one MoE projection.

The buffers are allocated once and keep their addresses, so a captured graph goes on reading
whatever adapter was loaded last. Which side of the factors all experts share is a property of
the buffers and never of an adapter: a side is stored once or once per expert, whatever moves
in (sglang #28564).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorakernels.dense.weights import LoRAFactors, check_geometry, check_values, require_positive


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


class ExpertWeights:
    """A [slots, experts, slices, rank, in_features], B [slots, experts, sum(slice_widths),
    rank], and for each (slot, slice) the live rank (int32) and the scale (fp32). Rank 0 means
    no adapter.

    With `shared_a` or `shared_b` the expert axis of that side is 1 and all experts read it.
    """

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
        self.slice_widths = tuple(slice_widths)
        num_slices, out_features = len(self.slice_widths), sum(self.slice_widths)
        a_shape = (num_slots, 1 if shared_a else num_experts, num_slices, rank, in_features)
        b_shape = (num_slots, 1 if shared_b else num_experts, out_features, rank)
        self.a = torch.zeros(a_shape, dtype=dtype, device=device)
        self.b = torch.zeros(b_shape, dtype=dtype, device=device)
        self.ranks = torch.zeros(num_slots, num_slices, dtype=torch.int32, device=device)
        self.scales = torch.zeros(num_slots, num_slices, dtype=torch.float32, device=device)

    @property
    def num_slots(self) -> int:
        return self.a.shape[0]

    @property
    def num_slices(self) -> int:
        return self.a.shape[2]

    @property
    def rank(self) -> int:
        return self.a.shape[3]

    @property
    def in_features(self) -> int:
        return self.a.shape[4]

    @property
    def out_features(self) -> int:
        return self.b.shape[2]

    @property
    def shared_a(self) -> bool:
        return self.a.shape[1] < self.num_experts

    @property
    def shared_b(self) -> bool:
        return self.b.shape[1] < self.num_experts

    def load(self, slot: int, factors: Sequence[ExpertFactors | None]) -> None:
        """Replace the adapter of a slot, all or nothing. None leaves a slice without adapter.

        A factor that is shared by all experts is copied to each of them where the buffers keep
        one per expert; the other way round is an error. Raises ValueError before anything is
        changed.
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
                self.a[slot, :, index, : part.rank].copy_(part.a)
                self.b[slot, :, start : start + width, : part.rank].copy_(part.b)
                self.ranks[slot, index] = part.rank
                self.scales[slot, index] = part.scale
            start += width

    def reset(self, slot: int) -> None:
        """Empty a slot; its pairs then get no delta."""
        self._check_slot(slot)
        self.ranks[slot].zero_()
        self.scales[slot].zero_()
        self.a[slot].zero_()
        self.b[slot].zero_()

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot must be 0 to {self.num_slots - 1} (got {slot})")

    def _check_factors(self, index: int, part: ExpertFactors) -> None:
        rank = part.a.shape[1] if part.a.dim() == 3 else -1
        width, in_features = self.slice_widths[index], self.in_features
        if not _fits(part.a, self.a.shape[1], rank, in_features):
            allowed = _allowed(self.a.shape[1], "rank", in_features)
            raise ValueError(f"a of slice {index} must be {allowed} (got {list(part.a.shape)})")
        if not _fits(part.b, self.b.shape[1], width, rank):
            allowed = _allowed(self.b.shape[1], width, rank)
            raise ValueError(f"b of slice {index} must be {allowed} (got {list(part.b.shape)})")
        check_values(index, part.a, part.b, part.scale, rank=rank, max_rank=self.rank)


def _fits(factor: Tensor, experts: int, rows: int, columns: int) -> bool:
    # a shared factor goes everywhere, one per expert only where there is room for it
    return factor.dim() == 3 and factor.shape in ((1, rows, columns), (experts, rows, columns))


def _allowed(experts: int, rows: int | str, columns: int) -> str:
    counts = sorted({1, experts})
    return " or ".join(f"[{count}, {rows}, {columns}]" for count in counts)
