"""Whether a weight of a model is the one that an adapter was saved with, without keeping both."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# rows that are on the host at a time
_ROWS = 4096


@dataclass(frozen=True, slots=True)
class SavedWeight:
    """Of a weight [rows, columns] in a file: shape, dtype, and its digest once it was cast to each
    dtype that a model may be served in."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    digests: Mapping[torch.dtype, bytes]

    @classmethod
    def of(cls, weight: Tensor) -> SavedWeight:
        digests = {dtype: digest_in(dtype, weight) for dtype in DTYPES}
        return cls(tuple(weight.shape), weight.dtype, digests)


def digest_in(dtype: torch.dtype, weight: Tensor) -> bytes:
    """SHA-256 of the bytes of a weight, once it has been cast. Waits for the device."""
    found = hashlib.sha256()
    for rows in torch.split(weight.detach(), _ROWS):
        found.update(rows.to(dtype).cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.digest()
