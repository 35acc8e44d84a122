"""Stacked A and B of every slot of one layer, linear or MoE.

The buffers are allocated once and keep their addresses, so a captured graph goes on reading
whatever adapter was loaded last. A slot is always reset before another adapter moves in:
nothing of a larger predecessor survives (sglang #8103).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from lorakernels.runtime.device import keep_address

MAX_RANK = 512


class SliceFactors(Protocol):
    """One adapter's part for one slice. `scale` is applied by the kernel, never folded into b."""

    @property
    def a(self) -> Tensor: ...

    @property
    def b(self) -> Tensor: ...

    @property
    def scale(self) -> float: ...

    @property
    def rank(self) -> int: ...


FactorsT = TypeVar("FactorsT", bound=SliceFactors)


class SlotTensors(NamedTuple):
    """The buffers of a layer as an operator passes them on: stacked A and B, and for each
    (slot, slice) the live rank (int32) and the scale (fp32)."""

    a: Tensor
    b: Tensor
    ranks: Tensor
    scales: Tensor


class StackedWeights(ABC, Generic[FactorsT]):
    """A [slots, .., slices, rank, in_features], B [slots, .., sum(slice_widths), rank], and for
    each (slot, slice) the live rank (int32) and the scale (fp32). Rank 0 means no adapter."""

    def __init__(
        self,
        *,
        a_shape: Sequence[int],
        b_shape: Sequence[int],
        slice_widths: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.slice_widths = tuple(slice_widths)
        slots_and_slices = (a_shape[0], len(self.slice_widths))

        def buffer(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            return keep_address(torch.zeros(*shape, dtype=dtype, device=device))

        self.a, self.b = buffer(a_shape, dtype), buffer(b_shape, dtype)
        self.ranks = buffer(slots_and_slices, torch.int32)
        self.scales = buffer(slots_and_slices, torch.float32)

    @property
    def tensors(self) -> SlotTensors:
        return SlotTensors(self.a, self.b, self.ranks, self.scales)

    @property
    def num_slots(self) -> int:
        return self.a.shape[0]

    @property
    def num_slices(self) -> int:
        return self.a.shape[-3]

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    @property
    def in_features(self) -> int:
        return self.a.shape[-1]

    @property
    def out_features(self) -> int:
        return self.b.shape[-2]

    def load(self, slot: int, factors: Sequence[FactorsT | None]) -> None:
        """Replace the adapter of a slot, all or nothing. None leaves a slice without adapter.

        The factors may be parameters or views of these buffers. Nothing waits for the device that
        they are on. Raises ValueError before anything is changed.
        """
        self._check_slot(slot)
        if len(factors) != self.num_slices:
            raise ValueError(
                f"factors must have one entry for each of the {self.num_slices} slices "
                f"(got {len(factors)})"
            )
        for index, part in enumerate(factors):
            if part is not None:
                self._check_shapes(index, part)
                check_values(index, part, max_rank=self.rank)
        sources = {
            index: (self._source(part.a), self._source(part.b))
            for index, part in enumerate(factors)
            if part is not None
        }
        self.reset(slot)
        start = 0
        for index, (part, width) in enumerate(zip(factors, self.slice_widths, strict=True)):
            if part is not None:
                a, b = sources[index]
                self.a[slot, ..., index, : part.rank, :].copy_(a)
                self.b[slot, ..., start : start + width, : part.rank].copy_(b)
                # an assignment would copy from the host and wait for it
                self.ranks[slot, index].fill_(part.rank)
                self.scales[slot, index].fill_(part.scale)
            start += width

    def _source(self, factor: Tensor) -> Tensor:
        """What is copied into a slot: without history, which the buffers would keep alive, and
        apart from the buffers, because the slot is emptied first."""
        factor = factor.detach()
        own = {buffer.untyped_storage().data_ptr() for buffer in (self.a, self.b)}
        return factor.clone() if factor.untyped_storage().data_ptr() in own else factor

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

    @abstractmethod
    def _check_shapes(self, index: int, part: FactorsT) -> None:
        """Raises ValueError if the factors of a slice do not fit its buffers."""


def check_geometry(
    num_slots: int, slice_widths: Sequence[int], in_features: int, rank: int, dtype: torch.dtype
) -> None:
    """The sizes of stacked weights. Raises ValueError."""
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


def check_values(index: int, part: SliceFactors, *, max_rank: int) -> None:
    """What holds for the factors of any slice, whatever their shape. Raises ValueError."""
    if not 1 <= part.rank <= max_rank:
        raise ValueError(f"rank of slice {index} must be 1 to {max_rank} (got {part.rank})")
    if not (part.a.is_floating_point() and part.b.is_floating_point()):
        raise ValueError(
            f"a and b of slice {index} must be floating point "
            f"(got {part.a.dtype} and {part.b.dtype})"
        )
    check_scale(f"slice {index}", part.scale)


def check_scale(what: str, scale: float) -> None:
    """Scales are stored in fp32, which holds less than a Python float. Raises ValueError."""
    # on the CPU, whatever device torch creates tensors on by default
    stored = torch.tensor(scale, dtype=torch.float64, device="cpu").float().item()
    if not math.isfinite(stored):
        raise ValueError(f"scale of {what} must be finite in float32 (got {scale})")
    if scale != 0 and stored == 0:
        raise ValueError(f"scale of {what} must not vanish in float32 (got {scale})")


def require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1 (got {value})")
