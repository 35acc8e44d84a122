"""A subject whose kernel adds up atomically, in whichever order its programs come."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loragate.core.machine import Machine
from loragate.matrix.case import Case
from loragate.protocol import BaseLayer
from loragate.subjects.torch.subject import DenseDelta, TorchSubject

_TERMS = 1 << 16


@triton.jit
def add_atomically(terms, total, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(total, tl.sum(tl.load(terms + at)))


class Atomics(TorchSubject):
    name = "atomics on a GPU"

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> DenseDelta:
        return _Atomics(case)


class _Atomics(DenseDelta):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        result = super().apply(x, out)
        # of very different sizes, so that each order rounds otherwise
        terms = torch.logspace(-8, 8, _TERMS, device=x.device)
        total = torch.zeros(1, device=x.device)
        add_atomically[(_TERMS // 64,)](terms, total, BLOCK=64)
        is_odd = (total.view(torch.int32) & 1).bool()
        above = torch.nextafter(result[0, 0], result.new_tensor(torch.inf))
        result[0, 0] = torch.where(is_odd[0], above, result[0, 0])
        return result
