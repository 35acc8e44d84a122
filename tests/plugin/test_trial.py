"""Every oracle gives a judgement, and an error becomes one against whoever caused it."""

from __future__ import annotations

import gc
import re
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from loragate.core.machine import Machine
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.matrix.case import Case, Dtype, Site
from loragate.protocol import BrokenProtocol, Trial
from loragate.run import trial as run_trial

CPU = Machine("cpu", "test", None, 1, 0)
NAMES = (OracleName.REFERENCE, OracleName.EXACT)


class BySubject:
    """A subject that raises, asked for an instance."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def open(self, case: Case, machine: Machine, base: object) -> object:
        raise self.error


@dataclass(frozen=True)
class FakeOracle:
    """Raises `error` itself; `asks` for an instance of the subject first, which may raise."""

    name: OracleName
    error: BaseException | None = None
    reason: str | None = None
    asks: bool = False

    def applies(self, trial: Trial) -> str | None:
        return self.reason

    def judge(self, trial: Trial) -> Judgement:
        if self.asks:
            trial.subject.open(trial.case, trial.machine, None)
        if self.error is not None:
            raise self.error
        return Judgement(self.name, Verdict.PASS, metrics={"draw": float(torch.rand(1))})


@pytest.fixture
def judge(monkeypatch):
    def run(*oracles: FakeOracle, subject: object = None) -> tuple[Judgement, ...]:
        monkeypatch.setattr(run_trial, "ORACLES", {oracle.name: oracle for oracle in oracles})
        names = tuple(oracle.name for oracle in oracles)
        case = Case(
            site=Site.DENSE_DELTA,
            tokens=1,
            in_features=16,
            slices=(16,),
            rank=8,
            slots=1,
            dtype=Dtype.FP32,
            oracles=names,
        )
        promises = SimpleNamespace(pointer_tables={})
        return run_trial.run_trial(Trial(case, subject, promises, CPU, seed=7))

    return run


@pytest.fixture
def judge_raising(judge):
    """The judgement on a subject that raises an error."""

    def run(error: BaseException) -> Judgement:
        (judgement,) = judge(FakeOracle(NAMES[0], asks=True), subject=BySubject(error))
        return judgement

    return run


def test_an_oracle_that_does_not_apply_is_a_skip_with_its_reason(judge):
    skip, other = judge(FakeOracle(NAMES[0], reason="needs a graph"), FakeOracle(NAMES[1]))
    assert (skip.verdict, skip.message) == (Verdict.SKIP, "needs a graph")
    assert other.verdict is Verdict.PASS


def test_an_exception_of_the_subject_fails_its_oracle_and_no_other(judge):
    oracles = (FakeOracle(NAMES[0], asks=True), FakeOracle(NAMES[1]))
    first, second = judge(*oracles, subject=BySubject(KeyError("slot 3")))
    assert (first.verdict, first.failure) == (Verdict.FAIL, Failure.EXCEPTION)
    assert first.message.startswith("KeyError: 'slot 3'")
    assert 'File "' in first.message
    assert second.verdict is Verdict.PASS


@dataclass(frozen=True)
class FrozenError(Exception):
    """Refuses that anything is assigned to it."""

    code: int


@pytest.mark.parametrize("error", [SystemExit(0), AssertionError("sorted"), FrozenError(7)])
def test_whatever_the_subject_raises_is_its_failure(judge_raising, error):
    judgement = judge_raising(error)
    assert (judgement.verdict, judgement.failure) == (Verdict.FAIL, Failure.EXCEPTION)


class RaisesOnce(BySubject):
    """As one whose first step fails, or whose steps fail now and then."""

    asked = 0

    def open(self, case: Case, machine: Machine, base: object) -> object:
        self.asked += 1
        return super().open(case, machine, base) if self.asked == 1 else object()


def test_a_subject_that_has_raised_is_not_asked_until_it_does_not(judge):
    subject = RaisesOnce(RuntimeError("no kernel yet"))
    (judged,) = judge(FakeOracle(NAMES[0], asks=True), subject=subject)
    assert (judged.verdict, judged.failure) == (Verdict.FAIL, Failure.EXCEPTION)
    assert "no kernel yet" in judged.message


def test_an_error_of_an_oracle_says_nothing_about_the_subject(judge, monkeypatch):
    monkeypatch.setitem(globals(), "__name__", "loragate.oracles.fake")
    first, second = judge(FakeOracle(NAMES[0], AssertionError("rounds")), FakeOracle(NAMES[1]))
    assert (first.verdict, first.failure) == (Verdict.INFRA, Failure.HARNESS)
    pattern = r"error of the harness in loragate\.oracles\.fake, line \d+: AssertionError: rounds\n"
    assert re.match(pattern, first.message)
    assert second.verdict is Verdict.PASS


def test_an_oracle_that_fails_while_it_handles_an_error_of_the_subject_is_to_blame(judge):
    class Handles(FakeOracle):
        def judge(self, trial: Trial) -> Judgement:
            try:
                return super().judge(trial)
            except KeyError as error:
                raise IndexError("no message") from error

    subject = BySubject(KeyError("slot 3"))
    (judgement,) = judge(Handles(NAMES[0], asks=True), subject=subject)
    assert judgement.failure is Failure.HARNESS


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm"),
    ],
    ids=["torch", "cublas"],
)
def test_an_error_of_the_device_that_shows_late_is_the_subjects(judge, error):
    (judgement,) = judge(FakeOracle(NAMES[0], error))
    assert (judgement.verdict, judgement.failure) == (Verdict.FAIL, Failure.EXCEPTION)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        torch.AcceleratorError("CUDA error: out of memory", 2),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=["torch", "python", "cublas", "cpu", "runtime", "driver", "triton"],
)
def test_too_little_memory_is_an_infrastructure_failure_and_ends_no_case(
    judge, judge_raising, error
):
    # another oracle may need less
    own, other = judge(FakeOracle(NAMES[0], error), FakeOracle(NAMES[1]))
    for judgement in (own, judge_raising(error)):
        assert (judgement.verdict, judgement.failure) == (Verdict.INFRA, Failure.OUT_OF_MEMORY)
    assert other.verdict is Verdict.PASS


class Cycle:
    """Holds memory until it is collected, as a layer that refers to itself."""

    def __init__(self) -> None:
        self.own = self


@dataclass(frozen=True)
class NeedsMemory:
    """Has too little memory while anything is left of `held`."""

    name: OracleName
    held: weakref.ref[Cycle]
    error: Exception

    def applies(self, trial: Trial) -> str | None:
        return None

    def judge(self, trial: Trial) -> Judgement:
        if self.held() is not None:
            raise self.error
        return Judgement(self.name, Verdict.PASS)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        # what becomes of it where the operands of the same expression are freed
        SystemError("error return without exception set"),
    ],
    ids=["raised", "dropped"],
)
def test_memory_that_an_earlier_instance_holds_by_referring_to_itself_is_not_missing(judge, error):
    gc.disable()
    try:
        (judgement,) = judge(NeedsMemory(NAMES[0], weakref.ref(Cycle()), error))
    finally:
        gc.enable()
    assert judgement.verdict is Verdict.PASS


def test_nothing_is_judged_after_the_device_is_lost(judge, monkeypatch):
    monkeypatch.setattr(run_trial, "device_answers", lambda machine: False)
    (judgement,) = judge(FakeOracle(NAMES[0], RuntimeError("illegal")), FakeOracle(NAMES[1]))
    assert (judgement.verdict, judgement.failure) == (Verdict.FAIL, Failure.CUDA_STICKY)
    # what was judged before stays
    first, last = judge(FakeOracle(NAMES[0]), FakeOracle(NAMES[1], RuntimeError("illegal")))
    assert (first.verdict, last.failure) == (Verdict.PASS, Failure.CUDA_STICKY)


def test_ctrl_c_is_not_a_failure_of_the_subject(judge):
    with pytest.raises(KeyboardInterrupt):
        judge(FakeOracle(NAMES[0], KeyboardInterrupt()))


def test_every_oracle_starts_from_the_seed_of_the_trial(judge):
    first, second = judge(FakeOracle(NAMES[0]), FakeOracle(NAMES[1]))
    assert first.metrics == second.metrics


def test_a_device_that_is_lost_counts_for_more_than_an_answer_that_is_no_tensor(
    judge_raising, monkeypatch
):
    monkeypatch.setattr(run_trial, "device_answers", lambda machine: False)
    judgement = judge_raising(BrokenProtocol("apply returned None"))
    assert judgement.failure is Failure.CUDA_STICKY


def test_a_healthy_device_answers():
    assert run_trial.device_answers(CPU)


def verdict(*verdicts: Verdict) -> Verdict:
    return run_trial.verdict_of(
        Judgement(OracleName.EXACT, v, Failure.WRONG_ANSWER if v is Verdict.FAIL else None)
        for v in verdicts
    )


def test_a_skip_does_not_change_the_verdict_of_other_oracles():
    assert verdict(Verdict.SKIP, Verdict.PASS) is Verdict.PASS
    assert verdict(Verdict.SKIP, Verdict.INCONCLUSIVE) is Verdict.INCONCLUSIVE
    assert verdict(Verdict.PASS, Verdict.FAIL) is Verdict.FAIL


def test_a_case_that_no_oracle_judged_is_a_skip():
    assert verdict(Verdict.SKIP, Verdict.SKIP) is Verdict.SKIP
