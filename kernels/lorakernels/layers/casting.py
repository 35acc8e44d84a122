"""From the dtype of an adapter's file to that of the buffers, which may hold less."""

from __future__ import annotations

from torch import Tensor


def cast(what: str, tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor in the dtype and on the device of `like`. ValueError."""
    if not tensor.is_floating_point():
        raise ValueError(f"{what} must be floating point (got {tensor.dtype})")
    result = tensor.to(device=like.device, dtype=like.dtype)
    # a large fp32 value becomes Inf in fp16; one bad value would poison whole columns
    if not result.isfinite().all():
        raise ValueError(f"{what} must have values that are finite in {like.dtype}")
    return result
