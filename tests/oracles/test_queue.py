"""The queue oracle, with a device that does everything when the host waits for it.

No GPU is needed: steps of a stub are put off until torch.cuda.synchronize is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loragate.core.verdict import Failure, OracleName, Verdict
from loragate.matrix.case import Mix
from loragate.oracles import ORACLES
from loragate.oracles.state import queue
from loragate.protocol import Trial
from loragate.subjects.torch.subject import DenseDelta

ORACLE = ORACLES[OracleName.QUEUE]
# the steps that the device still has to do; None while it keeps up with the host
pending: list[Callable[[], object]] | None = None


class Done:
    def query(self) -> bool:
        return not pending


def keep_busy() -> Done:
    global pending
    pending = []
    return Done()


def catch_up() -> None:
    global pending
    for step in pending or ():
        step()
    pending = None


@pytest.fixture(autouse=True)
def _device_that_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "keep_busy", keep_busy)
    monkeypatch.setattr(queue, "host_buffer", lambda like, is_pinned: torch.empty_like(like))
    monkeypatch.setattr(torch.cuda, "synchronize", catch_up)


class CopiesAtOnce(DenseDelta):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        mapping = self.token_slots

        def run() -> None:
            self.token_slots = mapping
            super(CopiesAtOnce, self).apply(x, out)

        if pending is None:
            run()
        else:
            pending.append(run)
        return out


class ReadsTheBufferLate(CopiesAtOnce):
    def prepare(self, token_slots: Tensor) -> None:
        self.token_slots = token_slots


class OneTableForAllSteps(CopiesAtOnce):
    def prepare(self, token_slots: Tensor) -> None:
        if len(self.token_slots) != len(token_slots):
            self.token_slots = token_slots.clone()
        self.token_slots.copy_(token_slots)


@pytest.mark.parametrize("instance", [ReadsTheBufferLate, OneTableForAllSteps])
def test_a_mapping_that_is_read_when_the_device_gets_to_it_fails(
    instance: type[DenseDelta], make_trial: Callable[..., Trial]
) -> None:
    for seed in range(5):
        judgement = ORACLE.judge(make_trial(instance, seed, mix=Mix.SHUFFLED))
        assert judgement.failure is Failure.LATE_READ, judgement
        assert "pageable buffer" in judgement.message


# the next step's mapping in the same buffer is no other one
@pytest.mark.parametrize(("mix", "slots"), [(Mix.SINGLE, 1), (Mix.ALL_BASE, 1), (Mix.ALL_BASE, 4)])
@pytest.mark.parametrize("tokens", [1, 24])
def test_a_late_read_fails_also_where_all_steps_have_the_same_mapping(
    mix: Mix, slots: int, tokens: int, make_trial: Callable[..., Trial]
) -> None:
    for seed in range(3):
        fields = {"mix": mix, "slots": slots, "tokens": tokens}
        judgement = ORACLE.judge(make_trial(ReadsTheBufferLate, seed, **fields))
        assert judgement.failure is Failure.LATE_READ, judgement
        judgement = ORACLE.judge(make_trial(CopiesAtOnce, seed, **fields))
        assert judgement.verdict is Verdict.PASS, judgement


def test_a_mapping_that_is_copied_at_once_passes(make_trial: Callable[..., Trial]) -> None:
    for seed in range(10):
        judgement = ORACLE.judge(make_trial(CopiesAtOnce, seed, mix=Mix.SHUFFLED))
        assert judgement.verdict is Verdict.PASS, judgement
        assert judgement.metrics["rounds_ahead"] == 2


def test_a_cpu_cannot_be_behind_its_host(make_trial: Callable[..., Trial]) -> None:
    trial = make_trial()
    reason = ORACLE.applies(trial)
    assert reason is not None
    assert "GPU" in reason
    on_gpu = replace(trial, machine=replace(trial.machine, device="cuda"))
    assert ORACLE.applies(on_gpu) is None
