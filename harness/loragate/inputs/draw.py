"""Random numbers, always from a seed. Nothing in the harness uses a global generator.

A large tensor is drawn in pieces, each of which goes into the result in its dtype, so that no
second copy of it in fp32 or int64 is alive. The numbers are those of the whole tensor drawn at
once, because the pieces end where a generator of torch ends a round: see inputs/pieces.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from enum import StrEnum

import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.inputs.pieces import pieces_of
from loragate.matrix.case import Dtype

Change = Callable[[Tensor], Tensor]


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

    def normal(
        self, *shape: int, dtype: torch.dtype = torch.float32, then: Change | None = None
    ) -> Tensor:
        """`then` changes fp32 numbers before they are rounded to `dtype`."""
        return self._filled(shape, dtype, torch.float32, self._normal, then)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        result = torch.empty(shape, device=self.device)
        for place, values in self.uniform_pieces(low, high, result.numel()):
            result.view(-1)[place] = values
        return result

    def uniform_pieces(self, low: float, high: float, size: int) -> Iterator[tuple[slice, Tensor]]:
        """The numbers of `uniform` piece by piece in fp32, each with its place."""
        for place in pieces_of(size, torch.float32, self.generator):
            values = torch.rand(
                place.stop - place.start, generator=self.generator, device=self.device
            )
            yield place, values.mul_(high - low).add_(low)

    def signs(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """-1.0 or 1.0"""
        return self.integers(0, 2, *shape, dtype=dtype, then=lambda bits: bits.mul_(2).sub_(1))

    def integers(
        self,
        low: int,
        high: int,
        *shape: int,
        dtype: torch.dtype = torch.int64,
        then: Change | None = None,
    ) -> Tensor:
        """`high` excluded; `then` changes int64 numbers before they are converted to `dtype`."""

        def drawn(size: int) -> Tensor:
            return torch.randint(low, high, (size,), generator=self.generator, device=self.device)

        return self._filled(shape, dtype, torch.int64, drawn, then)

    def _normal(self, size: int) -> Tensor:
        return torch.randn(size, generator=self.generator, device=self.device)

    def _filled(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        drawn_as: torch.dtype,
        drawn: Callable[[int], Tensor],
        then: Change | None,
    ) -> Tensor:
        result = torch.empty(shape, dtype=dtype, device=self.device)
        flat = result.view(-1)
        for place in pieces_of(flat.numel(), drawn_as, self.generator):
            values = drawn(place.stop - place.start)
            flat[place] = values if then is None else then(values)
        return result
