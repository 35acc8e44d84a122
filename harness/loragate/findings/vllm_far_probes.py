"""Probes of vLLM's dense LoRA on tensors with elements beyond number 2**31.

The kernels compute offsets of rows and slots in 32 bits: what lies 2**31 elements or more from the
start of a tensor is looked for 2**32 elements before its place. Each probe owns one arena that
holds both places, with its tensors inside of it, so that the wrong access always lands in numbers
that the probe knows, and always shows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loragate.findings.ledger import Needs, Observation
from loragate.findings.probing import Probe, dense_probe, seen, untouched, values_of
from loragate.subjects.vllm.package import VllmOps

_FAR = 1 << 31
# rows whose offsets overflow
_LIVE = 16
# of each arena 8 GiB are elements, and as much is left for the package and its kernels
_FREE_GIB = 12


def row_offset_overflows(ops: VllmOps, device: str) -> Observation:
    width, rank = 4096, 16
    rows = _FAR // width + _LIVE
    arena = untouched(_FAR + rows * width, device)
    far = arena[_FAR:].view(rows, width)
    a, b = [_ones(device, 1, 1, rank, width)], [_ones(device, 1, 1, width, rank)]
    ops.forget(a, b)
    step = _step(ops, 1, [-1] * (rows - _LIVE) + [0] * _LIVE, device)
    shrunk = torch.empty(1, rows, rank, device=device)
    far[-_LIVE:] = 1
    ops.lora_shrink(far, a, shrunk, *step, 1.0)
    found = values_of(shrunk[0, -_LIVE:])
    far[-_LIVE:] = 0
    shrunk.fill_(1)
    ops.lora_expand(shrunk, b, far, *step, offset_start=0, add_inputs=True)
    expanded = values_of(far[-_LIVE:])
    ops.forget(a, b)
    text = (
        f"for rows beyond element 2**31, lora_shrink gives {found} where [{float(width)}] is "
        f"right and lora_expand gives {expanded} where [{float(rank)}] is right"
    )
    return seen(found != [float(width)] or expanded != [float(rank)], text)


def row_offset_overwrites_base_rows(ops: VllmOps, device: str) -> Observation:
    width, rank, slices = 32768, 8, 2
    right, base = [float(rank)], [0.0]
    before = _FAR // width
    # 65552 rows with as many elements before them as a wrapped offset goes back, and all of them
    # as one output, at the end of which an offset of 2**32 elements wraps to its own first row
    arena = untouched((2 * before + _LIVE) * width, device).view(-1, width)
    b = [_ones(device, 1, 1, width // slices, rank) for _ in range(slices)]
    found = []
    for out in (arena[before:], arena):
        arena[:_LIVE] = 0
        _expand_last_rows(ops, b, out, device)
        found.append((values_of(out[-_LIVE:]), values_of(arena[:_LIVE])))
        out[-_LIVE:] = 0
    (lost, astray), (lost_too, overwritten) = found
    text = (
        f"the last {_LIVE} of {before + _LIVE} rows of {width} columns get {lost} where {right} is "
        f"right, and {_LIVE} rows of another tensor, 4 GiB before the first, get {astray} where "
        f"{base} is right; of {2 * before + _LIVE} rows the last {_LIVE} get {lost_too}, and the "
        f"first {_LIVE}, base rows, get {overwritten}"
    )
    return seen(found == [(base, right)] * 2, text)


def slot_offset_overflows(ops: VllmOps, device: str) -> Observation:
    slots, rank, width, rows = 129, 512, 32768, 64
    slot = rank * width
    arena = untouched(_FAR + slots * slot, device)
    # the last slot begins at element 2**31 of A, and is looked for as far before A
    arena[:slot] = 2
    a = [arena[_FAR:].view(slots, 1, rank, width)]
    a[0][-1] = 1
    ops.forget(a, a)
    shrunk = torch.zeros(1, rows, rank, device=device)
    step = _step(ops, slots, [slots - 1] * rows, device)
    ops.lora_shrink(_ones(device, rows, width), a, shrunk, *step, 1.0)
    ops.forget(a, a)
    found, right, astray = values_of(shrunk), [float(width)], [2.0 * width]
    text = (
        f"the last of {slots} slots of rank {rank} and {width} columns gives {found} where {right} "
        f"is right; {astray} is what lies 4 GiB before A"
    )
    return seen(found == astray, text)


FAR_PROBES: dict[str, Probe] = {
    name: dense_probe(run, Needs.CUDA, free_gib=_FREE_GIB, wild=True)
    for name, run in (
        ("row-offset-overflows", row_offset_overflows),
        ("row-offset-overwrites-base-rows", row_offset_overwrites_base_rows),
        ("slot-offset-overflows", slot_offset_overflows),
    )
}


def _expand_last_rows(ops: VllmOps, b: list[Tensor], out: Tensor, device: str) -> None:
    """Add the delta of ones to the last rows; all others are base rows."""
    rows, rank = out.shape[0], b[0].shape[-1]
    ops.forget(b, b)
    step = _step(ops, 1, [-1] * (rows - _LIVE) + [0] * _LIVE, device)
    shrunk = torch.ones(len(b), rows, rank, device=device)
    ops.lora_expand(shrunk, b, out, *step, offset_start=0, add_inputs=True)
    ops.forget(b, b)


def _ones(device: str, *shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float16, device=device)


def _step(ops: VllmOps, num_slots: int, slots: list[int], device: str) -> tuple[Any, ...]:
    meta = ops.kernel_meta.make(num_slots, len(slots), device)
    meta.prepare_tensors(torch.tensor(slots, dtype=torch.int64, device=device))
    arguments: tuple[Any, ...] = meta.meta_args(len(slots), False)
    return arguments
