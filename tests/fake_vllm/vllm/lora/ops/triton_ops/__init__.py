"""Dense LoRA in plain torch, one row after the other, with the address of each row and slot."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from enum import StrEnum

import torch
from torch import Tensor


class Fault(StrEnum):
    # offsets of rows and slots are computed in 32 bits
    WRAP = "wrap"
    # the last row of a batch gets no delta
    LAST_ROW = "last_row"
    # every delta is twice as large
    TWICE = "twice"
    # what a strided input does to the process
    CRASH = "crash"
    HANG = "hang"


faults = {Fault(word) for word in os.environ.get("FAKE_VLLM", "").split()}


class LoRAKernelMeta:
    def __init__(self) -> None:
        self.mapping = torch.empty(0, dtype=torch.int64)

    @staticmethod
    def make(max_loras: int, max_tokens: int, device: str) -> LoRAKernelMeta:
        return LoRAKernelMeta()

    def prepare_tensors(self, mapping: Tensor) -> None:
        self.mapping = mapping.clone()

    def meta_args(self, tokens: int, specialised: bool) -> tuple[Tensor]:
        return (self.mapping[:tokens],)


def lora_shrink(x: Tensor, a: list[Tensor], out: Tensor, mapping: Tensor, scaling: float) -> None:
    if not x.is_contiguous():
        _misbehave()
    assert x.is_contiguous()
    out.zero_()
    for slot in set(mapping[mapping >= 0].tolist()):
        rows = (mapping == slot).nonzero().flatten().tolist()
        values = torch.stack([_at(x, row * x.stride(0), x.shape[1]) for row in rows]).float()
        for part, weight in enumerate(a):
            rank, width = weight.shape[-2:]
            factor = _at(weight, slot * weight.stride(0), rank * width).view(rank, width)
            out[part, rows] = (values @ factor.float().T) * scaling


def lora_expand(
    shrunk: Tensor,
    b: list[Tensor],
    out: Tensor,
    mapping: Tensor,
    *,
    offset_start: int,
    add_inputs: bool,
) -> None:
    for row, slot in _live(mapping):
        if Fault.LAST_ROW in faults and row == len(mapping) - 1:
            continue
        whole = _at(out, row * out.stride(0), out.shape[1])
        start = offset_start
        for part, weight in enumerate(b):
            factor = weight[slot, 0].float()
            delta = factor @ shrunk[part, row].to(weight.dtype).float()
            delta *= 2 if Fault.TWICE in faults else 1
            whole[start : start + len(delta)] += delta.to(out.dtype)
            start += len(delta)


def _live(mapping: Tensor) -> Iterator[tuple[int, int]]:
    for row in (mapping >= 0).nonzero().flatten().tolist():
        yield row, int(mapping[row])


def _at(tensor: Tensor, offset: int, length: int) -> Tensor:
    if Fault.WRAP in faults:
        offset = (offset + 2**31) % 2**32 - 2**31
    return tensor.as_strided((length,), (1,), tensor.storage_offset() + offset)


def _misbehave() -> None:
    if Fault.CRASH in faults:
        os.kill(os.getpid(), signal.SIGSEGV)
    if Fault.HANG in faults:
        time.sleep(3600)
