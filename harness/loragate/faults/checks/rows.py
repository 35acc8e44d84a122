"""Rows that lie far apart in memory, and steps that start before their input is there."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from loragate.core.machine import detect_machine
from loragate.faults.checks.late_producer import BLOCK, late_copy_kernel
from loragate.inputs.placement import bits_of
from lorakernels.batch.metadata import BatchMetadata
from lorakernels.dense.ops import DenseWorkspace, dense_delta
from lorakernels.dense.weights import LoRAFactors, SlotWeights

# the last of three rows starts at 2^31 elements, one more than an int32 can count
_FAR = 1 << 30
_ATTEMPTS = 20
# about a millisecond
_SPINS = 200_000


class Unable(Exception):
    """A check that this machine cannot make, with the reason."""


def check_far_rows() -> str | None:
    """x by rows, x by columns and out, each with its third line 2^31 elements away."""
    # a wrapped offset stays inside the memory: it reads zeros instead of ending the process
    memory = sparse_memory(2 * (1 << 31) + 64)
    middle = 1 << 31
    far = partial(memory.as_strided, storage_offset=middle)
    x, near = _signs(3, 3), torch.zeros(3, 3, dtype=torch.float16, device=memory.device)
    wanted = _delta(x, near.clone())
    places: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
        "rows of x": (lambda: far((3, 3), (_FAR, 1)).copy_(x), near.clone),
        "columns of x": (lambda: far((3, 3), (1, _FAR)).copy_(x), near.clone),
        "rows of out": (lambda: x, lambda: far((3, 3), (_FAR, 1)).zero_()),
    }
    for name, (make_x, make_out) in places.items():
        result = _delta(make_x(), make_out())
        if not torch.equal(bits_of(result), bits_of(wanted)):
            return f"{name} that are {_FAR} elements apart give another result"
    return None


def check_launch_order() -> str | None:
    """A step after a kernel that writes its input, or the output that it adds to, only after the
    step was allowed to start; and with nothing left in the shrink output from an earlier one."""
    machine = detect_machine()
    if machine.compute_capability is None or machine.compute_capability < (9, 0):
        raise Unable("only a GPU from sm_90 on starts a kernel before its predecessor has ended")
    weights, metadata, workspace = _layer(torch.bfloat16, 8192, (2048,), rank=64, rows=16)
    x = torch.randn(16, 8192, device="cuda", dtype=torch.bfloat16)
    base = torch.randn(16, 2048, device="cuda", dtype=torch.bfloat16)
    wanted = base.clone()
    dense_delta(x, weights, metadata, workspace, wanted)
    for attempt in range(_ATTEMPTS):
        late_x, late_out = torch.zeros_like(x), torch.zeros_like(base)
        workspace.shrunk.fill_(float("nan"))
        torch.cuda.synchronize()
        pairs = [(x, late_x, "x"), (base, late_out, "out")]
        # the last one is still at work when the step starts
        pairs = pairs if attempt % 2 else pairs[::-1]
        for source, target, _ in pairs:
            copy_late(source, target)
        dense_delta(late_x, weights, metadata, workspace, late_out)
        torch.cuda.synchronize()
        if not torch.equal(bits_of(late_out), bits_of(wanted)):
            return f"a step did not wait for {pairs[-1][2]} or for its own shrink"
    return None


def check_queued_steps() -> str | None:
    """Steps that are queued while the device is still busy, each with a mapping of its own;
    queueing them never waits for the device."""
    if detect_machine().interpreted:
        raise Unable("in an interpreter nothing is queued")
    weights, metadata, workspace = _layer(torch.bfloat16, 256, (256,), rank=16, rows=64)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    mappings = [(torch.arange(64, dtype=torch.int32) // step) % 3 - 1 for step in range(1, 9)]

    def run(pause: Callable[[], object]) -> list[Tensor]:
        outs = [torch.zeros_like(x) for _ in mappings]
        copy_late(x, torch.empty_like(x))
        for mapping, out in zip(mappings, outs, strict=True):
            pause()
            metadata.prepare(mapping)
            dense_delta(x, weights, metadata, workspace, out)
        return outs

    wanted = run(torch.cuda.synchronize)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = run(lambda: None)
    except RuntimeError as error:
        return f"a step waits for the device: {error}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for step, (out, right) in enumerate(zip(found, wanted, strict=True)):
        if not torch.equal(bits_of(out), bits_of(right)):
            return f"step {step} of a queue has another result than alone"
    return None


def copy_late(source: Tensor, target: Tensor) -> None:
    programs = -(-source.numel() // BLOCK)
    sink = torch.zeros(programs, device=source.device)
    late_copy_kernel[(programs,)](source, target, sink, source.numel(), _SPINS, BLOCK=BLOCK)


def sparse_memory(elements: int) -> Tensor:
    """fp16 [elements] of which only what is written takes memory."""
    if detect_machine().device == "cuda":
        return torch.zeros(elements, dtype=torch.float16, device="cuda")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        return torch.frombuffer(mmap.mmap(-1, 2 * elements, flags=flags), dtype=torch.float16)
    except (OSError, ValueError) as error:
        raise Unable(f"no address range of {2 * elements} bytes: {error}") from error


def _signs(rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (rows, columns), generator=generator) * 2 - 1
    return signs.to(torch.float16).to(detect_machine().device)


def _delta(x: Tensor, out: Tensor) -> Tensor:
    weights, metadata, workspace = _layer(torch.float16, 3, (3,), rank=2, rows=3)
    dense_delta(x, weights, metadata, workspace, out)
    return out.contiguous()


def _layer(
    dtype: torch.dtype, in_features: int, widths: tuple[int, ...], *, rank: int, rows: int
) -> tuple[SlotWeights, BatchMetadata, DenseWorkspace]:
    device = detect_machine().device
    weights = SlotWeights(
        num_slots=2,
        slice_widths=widths,
        in_features=in_features,
        rank=rank,
        dtype=dtype,
        device=device,
    )
    generator = torch.Generator().manual_seed(1)
    for slot in range(2):
        a = torch.randint(1, 4, (rank, in_features), generator=generator).to(dtype) / 4
        b = torch.randint(1, 4, (sum(widths), rank), generator=generator).to(dtype) / 4
        weights.load(slot, [LoRAFactors(a, b, 1.0)])
    metadata = BatchMetadata(max_tokens=rows, max_slots=2, device=device)
    metadata.prepare(torch.arange(rows, dtype=torch.int32) % 2)
    return weights, metadata, DenseWorkspace([weights], max_tokens=rows)
