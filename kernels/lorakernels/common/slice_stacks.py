"""Stacked adapters of other servers as the kernels read them.

vLLM keeps A and B of each slice in a tensor of its own, [slots, experts, rank, in_features] and
[slots, experts, width, rank], where a linear layer has one expert. The kernels read all slices of a
layer from one buffer. So the tensors of a layer become views of such buffers, into which the server
goes on loading adapters in place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lorakernels.common.sizes import remembered

Slices = tuple[Tensor, ...]


class PackedFactors(NamedTuple):
    """A [slots, experts, slices, rank, in_features], B [slots, experts, sum(widths), rank]; one
    expert where all share the factor. `widths` are those of the slices, in memory's order."""

    a: Tensor
    b: Tensor
    widths: list[int]


def pack(a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[Slices, Slices]:
    """A and B of the slices of a layer as views of one buffer each, with the same values."""
    slots, experts, rank, in_features = a[0].shape
    widths = [part.shape[2] for part in b]
    packed_a = a[0].new_empty(slots, experts, len(a), rank, in_features)
    packed_b = b[0].new_empty(slots, b[0].shape[1], sum(widths), rank)
    starts = [sum(widths[:part]) for part in range(len(widths))]
    views_a = tuple(packed_a[:, :, part] for part in range(len(a)))
    views_b = tuple(
        packed_b[:, :, start : start + width] for start, width in zip(starts, widths, strict=True)
    )
    for view, old in zip((*views_a, *views_b), (*a, *b), strict=True):
        view.copy_(old)
    return views_a, views_b


class _Place(NamedTuple):
    """How a tensor lies in its memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def contiguous(cls, *shape: int) -> _Place:
        return cls(shape, tuple(math.prod(shape[axis:]) for axis in range(1, len(shape) + 1)))


def whole(a: Tensor, b: Tensor, widths: Sequence[int]) -> PackedFactors:
    """The buffers of a layer from the views of its first slice in memory.

    Factors that are expanded over the experts without a copy count as shared. Raises ValueError
    where the views are none of `pack`.
    """
    places = _Place(a.shape, a.stride()), _Place(b.shape, b.stride())
    whole_a, whole_b = _buffers_of(*places, tuple(widths))
    return PackedFactors(a.as_strided(*whole_a), b.as_strided(*whole_b), list(widths))


# a step that no graph replays asks in every layer, and most layers are alike
@remembered
def _buffers_of(a: _Place, b: _Place, widths: tuple[int, ...]) -> tuple[_Place, _Place]:
    """The buffers of A and B, from the views of their first slices. ValueError."""
    slots, _, rank, in_features = a.shape
    experts_a, experts_b = (1 if part.strides[1] == 0 else part.shape[1] for part in (a, b))
    whole_a = _Place.contiguous(slots, experts_a, len(widths), rank, in_features)
    whole_b = _Place.contiguous(slots, experts_b, sum(widths), rank)
    _check("a", a, _Place(*((*part[:2], *part[3:]) for part in whole_a)))
    _check("b", b, _Place((*whole_b.shape[:2], widths[0], rank), whole_b.strides))
    return whole_a, whole_b


def check_constants(ranks: Tensor, scales: Tensor, a: Tensor) -> None:
    """There is a rank and a scale for each slot and slice of packed A. ValueError."""
    values = a.shape[0] * a.shape[2]
    for name, tensor in (("ranks", ranks), ("scales", scales)):
        if tensor.numel() < values:
            raise ValueError(f"{name} must hold {values} values or more (got {tensor.numel()})")


def _check(name: str, view: _Place, first: _Place) -> None:
    shape, strides = first
    # an axis of length one may have any stride; one that is expanded has length one in memory
    fits = view.strides == strides or all(
        have == wanted or size == 1
        for have, wanted, size in zip(view.strides, strides, shape, strict=True)
    )
    if view.shape[2:] != tuple(shape[2:]) or not fits:
        raise ValueError(
            f"{name} must be the first slice of a packed layer, {list(shape)} with strides "
            f"{list(strides)} (got {list(view.shape)} with strides {list(view.strides)})"
        )
