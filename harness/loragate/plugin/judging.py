"""Runs a collected case, records its result, and passes or fails the test accordingly."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Protocol

import pytest

from loragate.core.verdict import Failure, Verdict
from loragate.events.case_end import end_of
from loragate.events.log import EventWriter, read_events
from loragate.events.model import CaseFinished, CaseStarted, Event, KnownFinding
from loragate.matrix.case_run import CaseRun
from loragate.plugin.collection import case_run_of
from loragate.plugin.options import SETTINGS
from loragate.plugin.sticky import mark_device_lost
from loragate.report.evidence import render_evidence
from loragate.report.known import excused, explained, known_in, listed_findings, standing
from loragate.run.run_record import unwritten

_UNRECORDED = "loragate_unrecorded"
_JUDGED = ("loragate_failure", "judged")


class Judge(Protocol):
    def __call__(self, run: CaseRun) -> None: ...


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Load the subjects before any deadline starts: importing a serving stack takes long."""
    runs = [run for run in map(case_run_of, session.items) if run is not None]
    if not runs:
        return
    from loragate.run.trial import load_subject

    for name in sorted({run.subject for run in runs}):
        # the cases of a subject that cannot be loaded report the error
        with suppress(Exception):
            load_subject(name)
    # what is loaded by now stays loaded, so the garbage collector need not visit it again
    gc.collect()
    gc.freeze()


class CaseRecord:
    """Appends to the events of the run. Opened by the first event: a session without cases has
    no report."""

    def __init__(self, path: Path, run: str) -> None:
        self._path = path
        self._run = run
        self._writer: EventWriter | None = None

    def write(self, event: Event, item: pytest.Item) -> None:
        """Fails the test, and has the session end, if the event cannot be recorded."""
        try:
            if self._writer is None:
                self._writer = EventWriter(self._path, run=self._run)
            self._writer.write(event)
        except OSError as error:
            problem = unwritten(self._path, error)
            item.user_properties.append((_UNRECORDED, problem))
            _fail(item, problem)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _fail(item: pytest.Item, text: str) -> NoReturn:
    """Fail the test for a reason that the record of the run has, or gets from `unrecorded`."""
    mark_judged(item)
    pytest.fail(text, pytrace=False)


def mark_judged(test: pytest.Item | pytest.TestReport) -> None:
    """Say of a test that fails that the record of the run has the reason."""
    test.user_properties.append(_JUDGED)


def failed_as_judged(report: pytest.TestReport) -> bool:
    """Whether a test failed for a reason that the record of the run has. A test may also fail
    beside its case, or have the name of a case and be none."""
    # a worker sends the properties of a test also with its teardown
    return _JUDGED in report.user_properties and report.when == "call"


def unrecorded(report: pytest.TestReport) -> str | None:
    """Why the result of a case could not be recorded; None if it was."""
    found = dict(report.user_properties).get(_UNRECORDED)
    return None if found is None else str(found)


@pytest.fixture(scope="session")
def _events(request: pytest.FixtureRequest) -> Iterator[CaseRecord]:
    settings = request.config.stash[SETTINGS]
    record = CaseRecord(settings.events, settings.run)
    yield record
    record.close()


@pytest.fixture(scope="session")
def _listed(request: pytest.FixtureRequest) -> tuple[KnownFinding, ...]:
    settings = request.config.stash[SETTINGS]
    return listed_findings(read_events(settings.events, run=settings.run).events)


@pytest.fixture
def judge(
    request: pytest.FixtureRequest, _events: CaseRecord, _listed: tuple[KnownFinding, ...]
) -> Judge:
    """Judges one case: passes, skips or fails the test, and appends to the run's events."""
    item: pytest.Item = request.node
    return lambda run: _judge(run, item, _events, _listed)


def _judge(
    run: CaseRun, item: pytest.Item, events: CaseRecord, listed: tuple[KnownFinding, ...]
) -> None:
    # kernels may only be imported once the interpreter is selected
    from loragate.run.trial import open_trial, run_case

    worker = item.config.stash[SETTINGS].worker
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    try:
        trial = open_trial(run)
    # planning has opened it in a process like this one, so the case itself is not to blame
    except Exception as error:
        what = "cannot be opened on this worker, although it was planned"
        finished = end_of(
            run,
            Verdict.INFRA,
            worker=worker,
            gpu=gpu,
            duration_s=0.0,
            failure=Failure.HARNESS,
            message=f"{what}: {type(error).__name__}: {error}",
        )
        events.write(finished, item)
        _fail(item, render_evidence(finished))
    if isinstance(trial, str):
        # the plan has left it out already: it is not among the expected cases
        pytest.skip(trial)
    started = CaseStarted(
        run_id=run.run_id,
        worker=worker,
        draw=run.draw,
        repeat=run.repeat,
        seed=run.seed,
        replay=run.replay,
    )
    events.write(started, item)
    finished = run_case(run, trial, worker=worker, gpu=gpu)
    events.write(finished, item)
    _conclude(finished, item, listed)


def _conclude(finished: CaseFinished, item: pytest.Item, listed: tuple[KnownFinding, ...]) -> None:
    if any(j.failure is Failure.CUDA_STICKY for j in finished.judgements):
        mark_device_lost(item)
    known = known_in(finished, listed)
    if known and standing(excused(finished, listed)) is Verdict.PASS:
        pytest.xfail(f"known: {', '.join(finding.id for finding in known)}")
    if finished.verdict is Verdict.SKIP:
        reasons = dict.fromkeys(j.message for j in finished.judgements)
        pytest.skip("; ".join(reasons))
    if finished.verdict is not Verdict.PASS:
        _fail(item, render_evidence(explained(finished, listed)))
