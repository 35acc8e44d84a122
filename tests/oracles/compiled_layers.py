"""Layers on two streams that launch a kernel in its compiled form, right and wrong. They need a
GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from loragate.matrix.case import Case
from loragate.protocol import BaseLayer

from .stream_layers import Layer

_BLOCK = 256


@triton.jit
def copy_kernel(source_ptr, target_ptr, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source_ptr + offsets, mask=offsets < size)
    tl.store(target_ptr + offsets, values, mask=offsets < size)


class CopiesTheDelta(Layer):
    """What is added is a copy of the delta, which the side stream makes."""

    def __init__(self, case: Case, base: BaseLayer) -> None:
        super().__init__(case, base)
        self.copied = torch.zeros_like(self.delta)
        operands = self.delta, self.copied, self.delta.numel()
        self.copy = copy_kernel.warmup(*operands, BLOCK=_BLOCK, grid=(1,))

    def work(self, x: Tensor) -> None:
        super().work(x)
        self.copy_delta()

    def copy_delta(self) -> None:
        size = self.delta.numel()
        self.copy[(-(-size // _BLOCK), 1, 1)](self.delta, self.copied, size, _BLOCK)

    def joined(self, y: Tensor) -> Tensor:
        return (y.float() + self.copied).to(y.dtype)


class CopiesBehindTheEnd(CopiesTheDelta):
    """The main stream waits for the delta, and not for its copy: no other operation has a race."""

    def dual(self, x: Tensor) -> Tensor:
        self.start.record()
        with torch.cuda.stream(self.side):
            self.side.wait_event(self.start)
            Layer.work(self, x)
            self.end.record()
            self.copy_delta()
        y = functional.linear(x, self.base.weight, self.base.bias)
        torch.cuda.current_stream().wait_event(self.end)
        return self.joined(y)
