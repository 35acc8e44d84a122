"""Subjects that fail in ways that only a replay of the same kind shows again."""

from __future__ import annotations

import threading
import time

import torch
from misbehaving_subject import WRONG_ANSWER, _MisbehavingInstance

from loragate.core.machine import Machine
from loragate.matrix.case import Case
from loragate.matrix.ids import seed_of
from loragate.protocol import BaseLayer, Instance
from loragate.subjects.torch.subject import TorchSubject

WRONG_DRAW, WRONG_REPEAT, GOOD = 25, 26, 27


def linger() -> None:
    time.sleep(600)


class Threaded(TorchSubject):
    """Hangs beside another thread that hangs."""

    name = "threaded"

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> Instance:
        threading.Thread(target=linger, daemon=True).start()
        time.sleep(600)
        raise AssertionError


class Moody(TorchSubject):
    """Wrong with the data of draw 1 only, or when it sees data for the second time."""

    name = "moody"

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> Instance:
        # torch is seeded with the seed of the draw
        seed = torch.initial_seed()
        again, wrong_draw = seed in self.seen, seed == seed_of(case, 1)
        self.seen.add(seed)
        fails = wrong_draw if case.tokens == WRONG_DRAW else again and case.tokens == WRONG_REPEAT
        good = super().open(case, machine, base)
        return _MisbehavingInstance(good, WRONG_ANSWER) if fails else good
