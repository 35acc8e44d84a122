"""Subjects that are right nearly always: each depends on one thing that must not matter."""

from __future__ import annotations

import fcntl
import os
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.matrix.case import Case
from loragate.protocol import BaseLayer, Capabilities
from loragate.subjects.torch.subject import DenseDelta, TorchSubject

# the case after which another one is wrong
_POLLUTER = 5
_VICTIM = 3


def _chance(name: str) -> float:
    """Another one for each run, whatever the seed and the process.

    The numbers are spread evenly and never repeat a pattern: so a test does not fail because a
    coin showed the same side too often.
    """
    with Path(tempfile.gettempdir(), f"planted.{name}").open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0, os.SEEK_END)
        file.write(b".")
        return file.tell() * (5**0.5 - 1) / 2 % 1


class _Planted(DenseDelta):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.case = case

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        result = super().apply(x, out)
        if self.is_odd():
            # the last bit alone: no tolerance is exceeded
            result[0, 0] = torch.nextafter(result[0, 0], torch.tensor(torch.inf))
        return result

    def is_odd(self) -> bool:
        return False


class _Subject(TorchSubject):
    instance: type[_Planted] = _Planted

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> _Planted:
        return self.instance(case)


class Stable(_Subject):
    name = "stable"


class Atomics(_Subject):
    """Terms are added in the order in which they come."""

    name = "atomics"

    class instance(_Planted):
        def is_odd(self) -> bool:
            return _chance("atomics") < 0.5


class Uninitialised(_Subject):
    """One step of four reads what nobody has written."""

    name = "uninitialised"

    class instance(_Planted):
        def is_odd(self) -> bool:
            scratch = torch.empty(4096)
            return bool(scratch[7] != 0) and _chance("uninitialised") < 0.25


class Order(_Subject):
    """State that one case leaves behind makes another one wrong."""

    name = "order"
    polluted = False

    class instance(_Planted):
        def apply(self, x: Tensor, out: Tensor) -> Tensor:
            Order.polluted |= self.case.tokens == _POLLUTER
            result = super().apply(x, out)
            if Order.polluted and self.case.tokens == _VICTIM:
                result[0, 0] += 4
            return result


class Neighbour(_Subject):
    """Another process of the same subject takes what this one needs."""

    name = "neighbour"

    class instance(_Planted):
        _lock = None

        def is_odd(self) -> bool:
            if Neighbour.instance._lock is None:
                Neighbour.instance._lock = self._take()
            return Neighbour.instance._lock is False

        def _take(self) -> bool:
            # held until the process ends
            file = os.open(Path(tempfile.gettempdir(), "planted.lock"), os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
            return True


class Timed(_Subject):
    """The path is chosen by what a measurement of time says."""

    name = "timed"

    class instance(_Planted):
        def is_odd(self) -> bool:
            begin = time.perf_counter()
            for _ in range(100):
                torch.ones(64).sum()
            return time.perf_counter() - begin > 1e-4


class Waiting(_Subject):
    """One case is not through before a file is there, and goes on for a while after that."""

    name = "waiting"

    class instance(_Planted):
        def is_odd(self) -> bool:
            if self.case.tokens == 4:
                Path(tempfile.gettempdir(), "planted.waiting").touch()
                while not Path(tempfile.gettempdir(), "planted.go").exists():
                    time.sleep(0.01)
                time.sleep(0.3)
            return False


class Crashing(_Subject):
    """One case ends its process."""

    name = "crashing"

    class instance(_Planted):
        def is_odd(self) -> bool:
            if self.case.tokens == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            return False


class Unpromised(Atomics):
    """Says that its bits may change."""

    name = "unpromised"

    def capabilities(self, machine: Machine) -> Capabilities:
        have = super().capabilities(machine)
        assert isinstance(have, Capabilities)
        return replace(have, deterministic=False)
