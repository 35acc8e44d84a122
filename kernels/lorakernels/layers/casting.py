"""From the dtype of an adapter's file to that of the buffers, which may hold less."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def cast_all(tensors: Mapping[str, Tensor], like: Tensor) -> dict[str, Tensor]:
    """In the dtype and on the device of `like`. ValueError that names a tensor by its key."""
    for what, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{what} must be floating point (got {tensor.dtype})")
    cast = {k: t.to(device=like.device, dtype=like.dtype) for k, t in tensors.items()}
    if not cast:
        return cast
    # a large fp32 value becomes Inf in fp16; one bad value would poison whole columns. Asked of
    # all at once, so that a layer waits for the device once and not once a tensor
    finite = torch.stack([tensor.isfinite().all() for tensor in cast.values()])
    for what, is_finite in zip(cast, finite.tolist(), strict=True):
        if not is_finite:
            raise ValueError(f"{what} must have values that are finite in {like.dtype}")
    return cast
