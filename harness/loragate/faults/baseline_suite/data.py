"""Data and tolerances of the baseline suite."""

from __future__ import annotations

import torch
from torch import Tensor

from loragate.core.machine import detect_machine
from lorakernels.dense.weights import LoRAFactors

SEED = 0
_TOLERANCE = {torch.float16: 6e-2, torch.bfloat16: 6e-2, torch.float32: 1e-2}


def rand(*shape: int, dtype: torch.dtype) -> Tensor:
    """Uniform in [0, 1): all positive."""
    return torch.rand(*shape).to(dtype).to(detect_machine().device)


def factors(
    rank: int,
    in_features: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> LoRAFactors:
    a, b = rand(rank, in_features, dtype=dtype), rand(width, rank, dtype=dtype)
    return LoRAFactors(a, b, scale)


def drawn_adapters(adapters: int, count: int) -> Tensor:
    """int64 [count]; the last adapter is never drawn."""
    return torch.randint(0, max(adapters - 1, 1), (count,))


def assert_close(found: Tensor, wanted: Tensor, tolerance: float | None = None) -> None:
    tolerance = _TOLERANCE[wanted.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
