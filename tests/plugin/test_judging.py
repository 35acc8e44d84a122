"""What becomes of the test and of the record of one case, however its trial ends."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.events.case_end import end_of
from loragate.events.model import CaseFinished, CaseStarted, Event, KnownFinding
from loragate.findings.ledger import Finding, Kind
from loragate.findings.pattern import CasePattern
from loragate.matrix.case import Case, Dtype, Site
from loragate.matrix.case_run import CaseRun
from loragate.plugin import judging, watchdog
from loragate.plugin.options import SETTINGS
from loragate.plugin.sticky import lost_device

RUN = CaseRun(
    "a",
    Case(
        site=Site.DENSE_DELTA,
        tokens=5,
        in_features=16,
        slices=(16,),
        rank=8,
        slots=2,
        dtype=Dtype.FP32,
    ),
    draw=1,
)


_FINDING = Finding(
    id="far",
    subject="a",
    versions=">=1",
    kind=Kind.DEFECT,
    title="t",
    statement="s",
    evidence="e",
    seen_on="1",
    case=CasePattern(RUN.run_id, OracleName.EXACT, (Failure.NOT_REFUSED,)),
)


class Record:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, event: Event, item: object) -> None:
        self.events.append(event)


@pytest.fixture
def judge(monkeypatch):
    """Judges the case as on a worker, where its trial opens and ends as given."""
    from loragate.run import trial

    def run(ended: CaseFinished | None = None, *, opened: Any = None, listed: Any = ()) -> Record:
        def open_trial(run: CaseRun) -> object:
            if isinstance(opened, Exception):
                raise opened
            return opened

        monkeypatch.setattr(trial, "open_trial", open_trial)
        monkeypatch.setattr(trial, "run_case", lambda *_, **__: ended)
        item.config = SimpleNamespace(stash={SETTINGS: SimpleNamespace(worker="gw0")})
        judging._judge(RUN, cast(Any, item), cast(Any, record), listed)
        return record

    record, item = Record(), SimpleNamespace(user_properties=[])
    return SimpleNamespace(run=run, record=record, item=item)


def ended(verdict: Verdict) -> CaseFinished:
    failure = Failure.HARNESS if verdict in (Verdict.FAIL, Verdict.INFRA) else None
    judged = Judgement(OracleName.EXACT, verdict, failure, "why")
    return end_of(RUN, verdict, worker="gw0", gpu="", duration_s=1.0, judgements=[judged])


def test_a_case_that_passes_passes_its_test_and_is_recorded(judge):
    end = ended(Verdict.PASS)
    start, last = judge.run(end).events
    assert isinstance(start, CaseStarted)
    assert (start.run_id, start.trial, start.seed) == (RUN.run_id, (1, 0), RUN.seed)
    assert (start.worker, start.replay, last) == ("gw0", RUN.replay, end)


@pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.INFRA, Verdict.INCONCLUSIVE])
def test_a_case_that_does_not_pass_fails_its_test(judge, verdict):
    end = ended(verdict)
    with pytest.raises(pytest.fail.Exception, match="why"):
        judge.run(end)
    assert judge.record.events[1] == end


def test_a_listed_failure_is_expected_and_excuses_no_other(judge):
    listed = (KnownFinding(finding=_FINDING, version="1.0"),)
    known = Judgement(OracleName.EXACT, Verdict.FAIL, Failure.NOT_REFUSED, "as listed")
    other = Judgement(OracleName.CANARY, Verdict.FAIL, Failure.FOREIGN_MEMORY, "not listed")
    end = replace(ended(Verdict.FAIL), judgements=(known,), failure=None)
    with pytest.raises(pytest.xfail.Exception, match="known: far"):
        judge.run(end, listed=listed)
    with pytest.raises(pytest.fail.Exception, match="not listed"):
        judge.run(replace(end, judgements=(known, other)), listed=listed)


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_worker_whose_device_is_lost_goes_on_with_nothing_also_where_that_is_listed(
    judge, is_listed
):
    pattern = CasePattern(RUN.run_id, OracleName.EXACT, (Failure.CUDA_STICKY,))
    listed = (KnownFinding(finding=replace(_FINDING, case=pattern), version="1.0"),)
    lost = Judgement(OracleName.EXACT, Verdict.FAIL, Failure.CUDA_STICKY, "gone")
    end = replace(ended(Verdict.FAIL), judgements=(lost,), failure=None)
    with pytest.raises(pytest.xfail.Exception if is_listed else pytest.fail.Exception):
        judge.run(end, listed=listed if is_listed else ())
    assert lost_device(cast(Any, judge.item))


def test_a_case_that_no_oracle_judged_skips_its_test_with_the_reason(judge):
    with pytest.raises(pytest.skip.Exception, match="why"):
        judge.run(ended(Verdict.SKIP))
    assert len(judge.record.events) == 2


def test_a_case_that_cannot_be_opened_on_a_worker_is_recorded_and_fails_its_test(judge):
    with pytest.raises(pytest.fail.Exception, match="ValueError: no such layer"):
        judge.run(opened=ValueError("no such layer"))
    (end,) = judge.record.events
    assert (end.verdict, end.failure, end.trial) == (Verdict.INFRA, Failure.HARNESS, (1, 0))
    assert "although it was planned: ValueError: no such layer" in end.message


def test_a_case_has_its_own_deadline(monkeypatch):
    asked = []

    def deadline(seconds: float, stacks: object) -> AbstractContextManager[None]:
        asked.append(seconds)
        return nullcontext()

    monkeypatch.setattr(watchdog, "deadline", deadline)
    monkeypatch.setattr(watchdog, "stacks_of", lambda config: None)
    monkeypatch.setattr(watchdog, "case_run_of", lambda item: RUN)
    running = watchdog.pytest_runtest_protocol(cast(Any, SimpleNamespace(config=None)))
    next(running)
    running.close()
    assert asked == [RUN.case.timeout_s]


@pytest.mark.parametrize(("phase", "recorded"), [("call", True), ("teardown", False)])
def test_only_the_call_of_a_test_fails_for_what_the_record_has(phase, recorded):
    # a fixture that fails behind a case that failed is another failure
    report = pytest.TestReport(
        "test_cases.py::test_case[a]", ("test_cases.py", 1, ""), {}, "failed", "no", phase
    )
    judging.mark_judged(report)
    assert judging.failed_as_judged(report) is recorded


def test_a_case_that_the_plan_left_out_is_skipped_without_a_record(judge):
    with pytest.raises(pytest.skip.Exception, match="rank 600 is above the limit"):
        judge.run(opened="rank 600 is above the limit of 512")
    assert judge.record.events == []
