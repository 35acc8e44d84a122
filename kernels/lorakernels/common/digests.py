"""Whether a weight of a model is the one that an adapter was saved with, without keeping both."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

# rows that are on the host at a time
_ROWS = 4096


@dataclass(frozen=True, slots=True)
class WeightDigest:
    """Shape, dtype and SHA-256 of the bytes of a weight."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: bytes


def digest_of(weight: Tensor, dtype: torch.dtype) -> WeightDigest:
    """That of a weight, once it has been cast to `dtype`. Waits for the device."""
    found = hashlib.sha256()
    for rows in torch.split(weight.detach(), _ROWS):
        found.update(rows.to(dtype).cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return WeightDigest(tuple(weight.shape), dtype, found.digest())
