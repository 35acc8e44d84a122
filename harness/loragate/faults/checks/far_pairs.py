"""Pairs, experts and slots that lie 2^31 elements apart in memory, and steps that start before
their input is written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from loragate.core.machine import detect_machine
from loragate.faults.checks.rows import Unable, copy_late, sparse_memory
from loragate.inputs.placement import bits_of
from lorakernels.batch.metadata import BatchMetadata
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.delta.ops import MoEPath, MoEWorkspace, moe_delta
from lorakernels.moe.weights import ExpertFactors, ExpertWeights

# the last of three lies 2^31 elements after the first, one more than an int32 can count
_FAR = 1 << 30
_SIZE = 3
_ATTEMPTS = 20


def check_far_pairs() -> str | None:
    """On every path: x by rows and by columns, out, and A and B by experts and by slots."""
    # a wrapped offset stays inside the memory: it reads zeros instead of ending the process
    memory = sparse_memory(2 * (1 << 31) + 64)
    far = partial(memory.as_strided, storage_offset=1 << 31)
    x, near = _signs(_SIZE, _SIZE), torch.zeros(_SIZE, _SIZE, dtype=torch.float16)
    near = near.to(x.device)
    for path in MoEPath:
        layer = _Layer(torch.float16, _SIZE, _SIZE, rank=2, rows=_SIZE)
        wanted = layer.run(x, near.clone(), path)
        a, b = layer.weights.a, layer.weights.b
        places: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
            "rows of x": (lambda: far((_SIZE, _SIZE), (_FAR, 1)).copy_(x), near.clone),
            "columns of x": (lambda: far((_SIZE, _SIZE), (1, _FAR)).copy_(x), near.clone),
            "rows of out": (lambda: x, lambda: far((_SIZE, _SIZE), (_FAR, 1)).zero_()),
        }
        for name, (make_x, make_out) in places.items():
            if not _same(layer.run(make_x(), make_out(), path), wanted):
                return f"{path}: {name} that are {_FAR} elements apart give another result"
        for axis, what in enumerate(("slots", "experts")):
            for side, own in (("a", a), ("b", b)):
                strides = list(own.stride())
                # neighbours on the other axis stay neighbours
                strides[axis], strides[1 - axis] = _FAR, own[0, 0].numel()
                setattr(layer.weights, side, far(own.shape, strides).copy_(own))
                result = layer.run(x, near.clone(), path)
                setattr(layer.weights, side, own)
                if not _same(result, wanted):
                    return f"{path}: {what} of {side} that are {_FAR} elements apart differ"
    return None


def check_pair_order() -> str | None:
    """A delta after a kernel that writes its input, or the output that it adds to, only after the
    delta was allowed to start; and with nothing left in the shrink output from an earlier one."""
    machine = detect_machine()
    if machine.compute_capability is None or machine.compute_capability < (9, 0):
        raise Unable("only a GPU from sm_90 on starts a kernel before its predecessor has ended")
    layer = _Layer(torch.bfloat16, 8192, 2048, rank=64, rows=16)
    x = torch.randn(16, 8192, device="cuda", dtype=torch.bfloat16)
    base = torch.randn(16, 2048, device="cuda", dtype=torch.bfloat16)
    for path in MoEPath:
        wanted = layer.run(x, base.clone(), path)
        for attempt in range(_ATTEMPTS):
            late_x, late_out = torch.zeros_like(x), torch.zeros_like(base)
            layer.workspace.shrunk.fill_(float("nan"))
            torch.cuda.synchronize()
            copies = [(x, late_x, "x"), (base, late_out, "out")]
            # the last one is still at work when the delta starts
            copies = copies if attempt % 2 else copies[::-1]
            for source, target, _ in copies:
                copy_late(source, target)
            layer.run(late_x, late_out, path)
            torch.cuda.synchronize()
            if not _same(late_out, wanted):
                return f"{path} did not wait for {copies[-1][2]} or for its own shrink"
    return None


class _Layer:
    """Three slots and three experts; row i goes to slot i and expert i, modulo three."""

    def __init__(
        self, dtype: torch.dtype, in_features: int, width: int, *, rank: int, rows: int
    ) -> None:
        device = detect_machine().device
        self.weights = ExpertWeights(
            num_slots=_SIZE,
            num_experts=_SIZE,
            slice_widths=(width,),
            in_features=in_features,
            rank=rank,
            dtype=dtype,
            device=device,
        )
        generator = torch.Generator().manual_seed(1)
        for slot in range(_SIZE):
            a = torch.randint(1, 4, (_SIZE, rank, in_features), generator=generator).to(dtype) / 4
            b = torch.randint(1, 4, (_SIZE, width, rank), generator=generator).to(dtype) / 4
            self.weights.load(slot, [ExpertFactors(a, b, 1.0)])
        index = (torch.arange(rows, dtype=torch.int32) % _SIZE).to(device)
        batch = BatchMetadata(max_tokens=rows, max_slots=_SIZE, device=device)
        batch.prepare(index.cpu())
        self.pairs = PairMetadata(
            max_tokens=rows, top_k=1, num_experts=_SIZE, max_slots=_SIZE, device=device
        )
        self.pairs.prepare(index[:, None].contiguous(), batch)
        self.workspace = MoEWorkspace([self.weights], max_tokens=rows, top_k=1)

    def run(self, x: Tensor, out: Tensor, path: MoEPath) -> Tensor:
        moe_delta(x, self.weights, self.pairs, self.workspace, out, path=path)
        return out.contiguous()


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(bits_of(one), bits_of(other))


def _signs(rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (rows, columns), generator=generator) * 2 - 1
    return signs.to(torch.float16).to(detect_machine().device)
