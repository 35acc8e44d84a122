"""Casts from the dtype of an adapter's file to that of the buffers, which may have less range."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def cast_all(tensors: Mapping[str, Tensor], like: Tensor) -> dict[str, Tensor]:
    """The tensors in the dtype and on the device of `like`. ValueError that names a key."""
    for what, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{what} must be floating point (got {tensor.dtype})")
    cast = {k: t.detach().to(device=like.device, dtype=like.dtype) for k, t in tensors.items()}
    if not cast:
        return cast
    # a large fp32 value becomes Inf in fp16; one bad value would poison whole columns. One
    # check of all tensors makes a layer wait for the device once instead of once per tensor
    finite = torch.stack([tensor.isfinite().all() for tensor in cast.values()])
    for what, is_finite in zip(cast, finite.tolist(), strict=True):
        if not is_finite:
            raise ValueError(f"{what} must have values that are finite in {like.dtype}")
    return cast
