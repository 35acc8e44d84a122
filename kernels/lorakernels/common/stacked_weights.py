"""Stacked A and B of every slot of one layer, linear or MoE.

The buffers are allocated once and keep their addresses, so a captured graph goes on reading
whatever adapter was loaded last. A slot is always reset before another adapter moves in:
nothing of a larger predecessor survives (sglang #8103).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from numbers import Real
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from lorakernels.runtime.device import keep_address

MAX_RANK = 512
# of adapters and of what they are added to
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


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

    def __init__(self, tensors: SlotTensors, slice_widths: Sequence[int]) -> None:
        self.slice_widths = tuple(slice_widths)
        self.a, self.b, self.ranks, self.scales = map(keep_address, tensors)

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

    @property
    def exchanged_copies(self) -> int:
        """The memory that an exchange of the shrink output between ranks takes, in copies of it."""
        return 0

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
                self._write_a(slot, index, a)
                self.b[slot, ..., start : start + width, : part.rank].copy_(b)
                # an assignment would copy from the host and wait for it
                self.ranks[slot, index].fill_(part.rank)
                self.scales[slot, index].fill_(float(part.scale))
            start += width

    def load_padded(self, slot: int, a: Tensor, b: Tensor, ranks: Tensor, scales: Tensor) -> None:
        """Replace the adapter of a slot by one whose ranks and scales only the device knows.

        a [.., slices, r, in_features] and b [.., sum(slice_widths), r] as the buffers have them
        behind the axis of slots, in any float dtype; r is at most `rank`. ranks int32 [slices] and
        scales fp32 [slices]. All are on the device of the buffers, and may be views of them.

        Beyond its rank a slice may hold anything. A rank below 1 leaves a slice without adapter,
        one above r counts as r. Nothing waits for the device, so values are not checked. Raises
        ValueError before anything is changed.
        """
        self._check_slot(slot)
        self._check_padded(a, b, ranks, scales)
        most = a.shape[-2]
        live = ranks.clamp(0, most)
        is_dead = torch.arange(most, device=live.device) >= live[:, None]
        # copies, because the slot is emptied first; dead ranks of B are read with live ones
        scales = scales.masked_fill(live == 0, 0)
        a = a.detach().masked_fill(is_dead[:, :, None], 0)
        parts = torch.split(b.detach(), list(self.slice_widths), dim=-2)
        b = torch.cat([p.masked_fill(dead, 0) for p, dead in zip(parts, is_dead, strict=True)], -2)
        self.reset(slot)
        self._write_a(slot, slice(None), a)
        self.b[slot, ..., :most].copy_(b)
        self.ranks[slot].copy_(live)
        self.scales[slot].copy_(scales)

    def _check_padded(self, a: Tensor, b: Tensor, ranks: Tensor, scales: Tensor) -> None:
        most = a.shape[-2] if a.dim() > 1 else 0
        if not 1 <= most <= self.rank:
            raise ValueError(f"a must have 1 to {self.rank} ranks (got {most})")
        wanted = (
            ("a", a, (*self.a.shape[1:-2], most, self.in_features), None),
            ("b", b, (*self.b.shape[1:-1], most), None),
            ("ranks", ranks, (self.num_slices,), torch.int32),
            ("scales", scales, (self.num_slices,), torch.float32),
        )
        for name, tensor, shape, dtype in wanted:
            check_tensor(name, tensor, shape, dtype, self.a.device)

    def _source(self, factor: Tensor) -> Tensor:
        """What is copied into a slot: without history, which the buffers would keep alive, and
        apart from the buffers, because the slot is emptied first."""
        factor = factor.detach()
        own = {buffer.untyped_storage().data_ptr() for buffer in (self.a, self.b)}
        return factor.clone() if factor.untyped_storage().data_ptr() in own else factor

    def _write_a(self, slot: int, index: int | slice, a: Tensor) -> None:
        """A of one slice or of all, [.., r, in_features], into an empty slot."""
        self.a[slot, ..., index, : a.shape[-2], :].copy_(a)

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


# what is made in inference mode cannot be changed outside of it, such as by a thread that loads
@torch.inference_mode(mode=False)
def empty_slots(
    a_shape: Sequence[int],
    b_shape: Sequence[int],
    num_slices: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> SlotTensors:
    """New buffers without any adapter."""
    slots_and_slices = (a_shape[0], num_slices)
    return SlotTensors(
        torch.zeros(*a_shape, dtype=dtype, device=device),
        torch.zeros(*b_shape, dtype=dtype, device=device),
        torch.zeros(slots_and_slices, dtype=torch.int32, device=device),
        torch.zeros(slots_and_slices, dtype=torch.float32, device=device),
    )


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    """A tensor has this shape, dtype and device; no dtype stands for any of floating point.
    ValueError."""
    if tensor.shape != tuple(shape):
        raise ValueError(f"{name} must be {list(shape)} (got {list(tensor.shape)})")
    fits = tensor.is_floating_point() if dtype is None else tensor.dtype == dtype
    if not fits:
        raise ValueError(f"{name} must be {dtype or 'floating point'} (got {tensor.dtype})")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} (got {tensor.device})")


def check_adopted(
    tensors: SlotTensors, slice_widths: Sequence[int], copies_b: Sequence[int]
) -> None:
    """Whether tensors that somebody else has allocated can be buffers: A [slots, .., slices, rank,
    in_features], and B, which has `copies_b` between the slots and its columns. ValueError."""
    a, b, ranks, scales = tensors
    slots, slices, rank, in_features = a.shape[0], *a.shape[-3:]
    check_geometry(slots, slice_widths, in_features, rank, a.dtype)
    if slices != len(slice_widths):
        raise ValueError(f"a must have {len(slice_widths)} slices (got {slices})")
    check_tensor("b", b, (slots, *copies_b, sum(slice_widths), rank), a.dtype, a.device)
    check_tensor("ranks", ranks, (slots, slices), torch.int32, a.device)
    check_tensor("scales", scales, (slots, slices), torch.float32, a.device)
    for name, tensor in tensors._asdict().items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous (got strides {list(tensor.stride())})")


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
    if dtype not in DTYPES:
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
    if not isinstance(scale, Real):
        raise ValueError(f"scale of {what} must be a number (got {scale!r})")
    try:
        stored = torch.tensor(float(scale), dtype=torch.float64, device="cpu").float().item()
    except OverflowError:
        # an integer beyond the floats of Python
        stored = math.inf
    if not math.isfinite(stored):
        raise ValueError(f"scale of {what} must be finite in float32 (got {scale})")
    if scale != 0 and stored == 0:
        raise ValueError(f"scale of {what} must not vanish in float32 (got {scale})")


def require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1 (got {value})")


def device_of(layers: Sequence[StackedWeights[Any]]) -> torch.device:
    """The device of all layers, of which there is one. ValueError where they are on several: they
    cannot share memory."""
    first, *others = dict.fromkeys(layer.a.device for layer in layers)
    if others:
        found = ", ".join(map(str, (first, *others)))
        raise ValueError(f"layers must be on one device (got {found})")
    return first
