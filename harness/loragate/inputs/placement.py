"""Placement of a tensor in memory: inside guard bands, in one of the layouts of the matrix.

Every input and output of a case is a view into a larger storage whose other elements are guards.
Around an input they hold a NaN with a payload, so that a read past its end shows as NaN in the
result, and around token ids the id of another row. Around an output that is added to they hold a
number: a NaN may keep its bits in a sum, a number does not.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from loragate.matrix.case import Layout


class Band(StrEnum):
    """The content of guard bands."""

    NAN = "nan"
    NUMBER = "number"


# quiet NaNs that no computation produces, and 3.3. Ids are those of a row that exists: who reads
# one gets a wrong row, and no error
_GUARD_BITS = {
    torch.float16: (torch.int16, {Band.NAN: 0x7E5A, Band.NUMBER: 0x4299}),
    torch.bfloat16: (torch.int16, {Band.NAN: 0x7FDA, Band.NUMBER: 0x4053}),
    torch.float32: (torch.int32, {Band.NAN: 0x7FC5A5A5, Band.NUMBER: 0x40533333}),
    torch.int32: (torch.int32, dict.fromkeys(Band, 1)),
    torch.int64: (torch.int64, dict.fromkeys(Band, 1)),
}
_GUARD_ROWS = 64
_MAX_GUARD = 1 << 21
# elements: the first element of the view is as aligned as that of a fresh tensor
_ALIGNMENT = 256


def place(values: Tensor, layout: Layout, *, margin: int = 0, band: Band = Band.NAN) -> Tensor:
    """A view that holds `values` [rows, columns] inside guard bands.

    `margin`: guard columns on either side of COLUMN_SLICE.
    """
    rows, columns = values.shape
    if layout is Layout.TRANSPOSED:
        return place(values.t(), Layout.CONTIGUOUS, band=band).t()
    side = margin if layout is Layout.COLUMN_SLICE else 0
    stride = columns + 2 * side
    guard = min(_GUARD_ROWS * stride, _MAX_GUARD)
    guard = -(-guard // _ALIGNMENT) * _ALIGNMENT
    storage = guarded(2 * guard + rows * stride, values.dtype, values.device, band)
    view = storage.as_strided((rows, columns), (stride, 1), guard + side)
    return view.copy_(values)


def guarded(size: int, dtype: torch.dtype, device: torch.device, band: Band = Band.NAN) -> Tensor:
    """[size] elements of guard."""
    bits, patterns = _GUARD_BITS[dtype]
    return torch.full((size,), patterns[band], dtype=bits, device=device).view(dtype)


def place_integers(values: Tensor, guard: int) -> Tensor:
    """A contiguous view that holds int32 `values` [rows, columns] between guards of `guard`."""
    margin = -(-_GUARD_ROWS * values.shape[1] // _ALIGNMENT) * _ALIGNMENT
    storage = torch.full((2 * margin + values.numel(),), guard, dtype=torch.int32)
    storage = storage.to(values.device)
    view = storage.as_strided(values.shape, (values.shape[1], 1), margin)
    return view.copy_(values)


def whole(view: Tensor) -> Tensor:
    """All elements of the storage that `view` is a part of, guard bands included."""
    size = view.untyped_storage().nbytes() // view.element_size()
    return view.as_strided((size,), (1,), 0)


def same_place(view: Tensor, storage: Tensor) -> Tensor:
    """The part of `storage` that `view` is of its own storage."""
    return storage.as_strided(view.shape, view.stride(), view.storage_offset())


def copy_placed(view: Tensor) -> Tensor:
    """A copy of the whole storage; the result is the same view of it."""
    return same_place(view, whole(view).clone())


def owned(view: Tensor) -> Tensor:
    """bool [storage size]: which elements of the storage belong to `view`."""
    mask = torch.zeros(whole(view).shape, dtype=torch.bool, device=view.device)
    same_place(view, mask).fill_(True)
    return mask


def bits_of(values: Tensor) -> Tensor:
    """Contiguous integers with the same bits: the only equality under which NaN equals NaN."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.contiguous().view(kinds[values.element_size()])
