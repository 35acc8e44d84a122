"""Random numbers, always from a seed. Nothing in the harness uses a global generator."""

from __future__ import annotations

import hashlib
from enum import StrEnum

import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.matrix.case import Dtype


class DataKind(StrEnum):
    """SIGNED is zero-mean. EXACT leaves nothing to round: any order of summation gives the same
    bits."""

    SIGNED = "signed"
    EXACT = "exact"


_DTYPES = {
    Dtype.FP16: torch.float16,
    Dtype.BF16: torch.bfloat16,
    Dtype.FP32: torch.float32,
}


def torch_dtype(dtype: Dtype) -> torch.dtype:
    return _DTYPES[dtype]


def number(seed: int, purpose: str, step: int = 0) -> int:
    """A 63-bit number that is independent for each purpose and step."""
    text = f"{seed}/{purpose}/{step}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


class Draw:
    """A stream of random tensors on the machine's device."""

    def __init__(self, machine: Machine, seed: int, purpose: str, step: int = 0) -> None:
        self.device = torch.device(machine.device)
        self.generator = torch.Generator(device=self.device)
        self.generator.manual_seed(number(seed, purpose, step))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        values = torch.rand(shape, generator=self.generator, device=self.device)
        return values * (high - low) + low

    def signs(self, *shape: int) -> Tensor:
        """-1.0 or 1.0"""
        return self.integers(0, 2, *shape).float() * 2 - 1

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int64, `high` excluded"""
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)
