"""How a session of pytest ends: by its cases, by what else has failed, and by what ended it."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loragate.core.errors import CommandError
from loragate.core.verdict import ExitCode, Judgement, OracleName, Verdict
from loragate.events.case_end import end_of
from loragate.events.log import EventWriter
from loragate.events.model import Event, Note, RunStarted
from loragate.matrix.case import Case, Dtype, Site, Tier
from loragate.matrix.case_run import CaseRun
from loragate.matrix.selection import Selection
from loragate.matrix.shards import Shard
from loragate.plugin import session_run
from loragate.plugin.accounting import Accounting
from loragate.plugin.host_tests import HostTests
from loragate.plugin.options import Ownership, Role, Settings
from loragate.plugin.session_run import SessionRun
from loragate.run import opening_process, run_record
from loragate.run.opening import RunRequest, opening_events
from loragate.run.run_record import RunRecord

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
)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Of a leg of a gate whose only case has passed."""
    plan = RunStarted(
        run="r", started_at="", tier=Tier.SMOKE, subjects=("a",), legs=("gpu",), expected=()
    )
    good = (Judgement(OracleName.EXACT, Verdict.PASS),)
    end = end_of(RUN, Verdict.PASS, worker="gw0", gpu="", duration_s=1.0, judgements=good)
    with EventWriter(tmp_path / "events.jsonl", run="r") as writer:
        writer.write(plan)
        writer.write(end)
    return Settings(
        selection=Selection(matrix=(), subjects=("a",), tier=Tier.SMOKE),
        report=tmp_path,
        run="r",
        role=Role.CONTROLLER,
        ownership=Ownership.JOINED,
        worker="main",
    )


@pytest.mark.parametrize(
    ("ended", "exit_code"),
    [
        ({}, ExitCode.OK),
        ({"other_failures": 1}, ExitCode.WRONG),
        # also where all of its cases were over by then
        ({"stopped": "interrupted"}, ExitCode.INCOMPLETE),
        ({"stopped": "interrupted", "other_failures": 1}, ExitCode.WRONG),
    ],
)
def test_a_session_whose_cases_passed_is_no_better_than_its_end(
    settings: Settings, ended: dict[str, Any], exit_code: ExitCode
) -> None:
    given = {"other_failures": 0, "stopped": ""} | ended
    assert SessionRun(settings).finish([RUN], **given) is exit_code


def test_a_session_whose_cases_passed_is_no_better_than_its_record(settings: Settings) -> None:
    session = SessionRun(settings)
    session.record.note_problem("disk full")
    assert session.finish([RUN], other_failures=0, stopped="") is ExitCode.INFRASTRUCTURE


def test_a_session_of_its_own_plans_its_cases_and_names_the_other_shards(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[RunRequest] = []

    def plan(request: RunRequest) -> tuple[Event, ...]:
        asked.append(request)
        return ()

    monkeypatch.setattr(session_run, "opening_events_of_child", plan)
    own = replace(
        settings,
        ownership=Ownership.OWNED,
        report=tmp_path / "own",
        selection=replace(settings.selection, shard=Shard(index=2, count=3)),
    )
    SessionRun(own).start([RUN])
    (request,) = asked
    assert request.only == {RUN.run_id}
    assert [(part.index, part.legs) for part in request.other_shards] == [
        (1, ("pytest",)),
        (3, ("pytest",)),
    ]


@pytest.mark.parametrize(
    ("verdicts", "problem", "exit_code"),
    [
        ({"a": Verdict.PASS}, "", ExitCode.OK),
        ({"a": Verdict.PASS, "b": Verdict.SKIP}, "", ExitCode.OK),
        ({"a": Verdict.SKIP}, "", ExitCode.INCOMPLETE),
        ({"a": Verdict.PASS, "b": None}, "", ExitCode.INCOMPLETE),
        ({"a": Verdict.PASS}, "disk full", ExitCode.INFRASTRUCTURE),
        ({"a": Verdict.FAIL, "b": None}, "disk full", ExitCode.WRONG),
    ],
)
def test_a_leg_of_host_tests_is_as_good_as_its_worst_test_and_its_record(
    settings: Settings,
    verdicts: dict[str, Verdict | None],
    problem: str,
    exit_code: ExitCode,
) -> None:
    plugins = SimpleNamespace(get_plugin=lambda name: None)
    leg = HostTests(cast(pytest.Config, SimpleNamespace(pluginmanager=plugins)), settings)
    leg._expect(verdicts)
    leg._verdicts = {test: verdict for test, verdict in verdicts.items() if verdict is not None}
    if problem:
        leg._record.note_problem(problem)
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    leg.pytest_sessionfinish(cast(pytest.Session, session))
    assert session.exitstatus == exit_code


def test_a_plan_expects_each_draw_and_repeat_that_was_selected() -> None:
    selection = Selection(
        matrix=(Path(__file__).parent / "misbehaving" / "one_good.yaml",),
        subjects=("torch",),
        tier=Tier.SMOKE,
        draws=(0, 2),
        repeats=3,
    )
    request = RunRequest(run="r", selection=selection, leg="cases", legs=("cases", "host"))
    start = next(opening_events(request))
    assert isinstance(start, RunStarted)
    assert (start.run, start.tier, start.subjects) == ("r", Tier.SMOKE, ("torch",))
    assert (start.legs, start.draws, start.repeats) == (("cases", "host"), (0, 2), 3)
    assert [(row.leg, row.count) for row in start.expected] == [("cases", 1)]


def test_a_process_that_dies_while_it_plans_has_made_no_plan(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(module: str, answer: str, **options: object) -> CompletedProcess[bytes]:
        with EventWriter(Path(answer), run="r") as writer:
            writer.write(Note(text="the first of many"))
        return CompletedProcess([], -11, b"", b"")

    monkeypatch.setattr(opening_process, "run_module", die)
    request = RunRequest(run="r", selection=settings.selection, leg="gpu", legs=("gpu",))
    with pytest.raises(CommandError, match="died of SIGSEGV"):
        opening_process.opening_events_of_child(request)


def test_an_event_that_the_disk_does_not_take_is_judged_and_named(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> EventWriter:
        raise OSError(errno.ENOSPC, "No space left on device")

    record = RunRecord(settings.report, run=settings.run)
    before = record.read().events
    with monkeypatch.context() as disk:
        disk.setattr(run_record, "EventWriter", full)
        record.write([Note(text="lost")])
    assert record.read().events == (*before, Note(text="lost"))
    assert not record.is_whole
    summary = record.close(duration_s=1.0)
    assert summary.exit_code is ExitCode.INFRASTRUCTURE
    assert any("No space left on device" in reason for reason in summary.reasons)


def test_workers_that_die_before_they_collect_end_a_session_though_another_has_begun(
    settings: Settings,
) -> None:
    accounting = Accounting(cast(pytest.Config, SimpleNamespace()), settings)
    nodes = [SimpleNamespace(gateway=SimpleNamespace(id=f"gw{n}")) for n in range(5)]
    accounting.pytest_xdist_node_collection_finished(nodes[0], [])
    # what it has collected shows in the reports of its cases
    accounting.pytest_testnodedown(nodes[0], "killed")
    accounting.pytest_testnodedown(nodes[1], None)
    for node in nodes[2:4]:
        accounting.pytest_testnodedown(node, "killed")
    accounting.pytest_testnodedown(nodes[1], None)
    with pytest.raises(pytest.exit.Exception, match="3 workers died before they could run"):
        accounting.pytest_testnodedown(nodes[4], "killed")
