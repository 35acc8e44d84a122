"""Subjects that fail in every way in which a kernel can; the number of tokens says how."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.matrix.case import Case
from loragate.matrix.ids import seed_of
from loragate.protocol import BaseLayer, Capabilities, Instance, Pool
from loragate.run import trial as runner
from loragate.subjects.torch.subject import TorchSubject


def leave() -> None:
    os._exit(1)


def leave_as_if_done() -> None:
    os._exit(0)


def segfault() -> None:
    ctypes.string_at(0)


def sleep() -> None:
    time.sleep(600)


def sleep_holding_the_gil() -> None:
    ctypes.PyDLL(None).sleep(600)


def lose_the_device() -> None:
    runner.device_answers = lambda machine: False
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def raise_an_error() -> None:
    raise ZeroDivisionError("no kernel for this shape")


def run_out_of_memory() -> None:
    raise MemoryError("no memory left")


FAULTS: Mapping[int, Callable[[], None]] = {
    11: leave,
    12: segfault,
    13: sleep,
    14: sleep_holding_the_gil,
    15: lose_the_device,
    16: raise_an_error,
    17: run_out_of_memory,
    19: leave_as_if_done,
}
WRONG_ANSWER = 18
WRONG_DRAW, CRASHING_DRAW = 7, 2


class Misbehaving(TorchSubject):
    name = "misbehaving"

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> Instance:
        return _MisbehavingInstance(super().open(case, machine, base), case.tokens)


class BadDraw(TorchSubject):
    """Fails with the data of one draw only, and exits with that of another."""

    name = "bad_draw"

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> Instance:
        # torch is seeded with the seed of the draw
        draw = {seed_of(case, n): n for n in range(20)}[torch.initial_seed()]
        faults = {(23, WRONG_DRAW): WRONG_ANSWER, (24, CRASHING_DRAW): 11}
        fault = faults.get((case.tokens, draw), case.tokens)
        return _MisbehavingInstance(super().open(case, machine, base), fault)


class Absent(TorchSubject):
    name = "absent"

    def capabilities(self, machine: Machine) -> Capabilities | str:
        return "package absent is not installed"


class _MisbehavingInstance:
    def __init__(self, good: Instance, tokens: int) -> None:
        self._good = good
        self._tokens = tokens

    def load(self, slot: int, pool: Pool) -> None:
        self._good.load(slot, pool)

    def unload(self, slot: int) -> None:
        self._good.unload(slot)

    def prepare(self, token_slots: Tensor) -> None:
        self._good.prepare(token_slots)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        if self._tokens in FAULTS:
            FAULTS[self._tokens]()
        result = self._good.apply(x, out)
        return result.add_(1) if self._tokens == WRONG_ANSWER else result
