from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loragate import api
from loragate.cli import main
from loragate.core.verdict import Judgement, OracleName
from loragate.events.log import EventWriter
from loragate.events.model import CaseFinished, Event, Expected, RunFinished, RunStarted
from loragate.matrix.case import Tier

pytestmark = pytest.mark.usefixtures("preloaded")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gate_and_compare.py"
MATRIX = ROOT / "tests" / "plugin" / "misbehaving" / "one_good.yaml"


def started(*run_ids: str, **changes: Any) -> RunStarted:
    row = Expected(
        leg="gpu", subject="mine", site="dense_delta", count=len(run_ids), run_ids=run_ids
    )
    known: dict[str, Any] = {
        "run": "r",
        "started_at": "2026-11-21T04:15:30+00:00",
        "tier": Tier.SMOKE,
        "subjects": ("mine",),
        "legs": (),
        "expected": (row,),
        "commit": "abc",
        "versions": {"torch": "2.12"},
        "machine": {"device": "cuda", "executable": "/a/python"},
    }
    return RunStarted(**known | changes)


def finished(run_id: str, verdict: api.Verdict = api.Verdict.PASS, **changes: Any) -> CaseFinished:
    failure = api.Failure.WRONG_ANSWER if verdict is api.Verdict.FAIL else None
    known: dict[str, Any] = {
        "run_id": run_id,
        "subject": "mine",
        "site": "dense_delta",
        "draw": 0,
        "seed": 7,
        "worker": "gw0",
        "verdict": verdict,
        "judgements": (Judgement(OracleName.EXACT, verdict, failure, "off by 3"),),
        "duration_s": 0.25,
        "replay": f"loragate replay {run_id}",
    }
    return CaseFinished(**known | changes)


END = RunFinished(finished_at="2026-11-21T04:16:30+00:00", duration_s=60.0)
FAIL, PASS = api.Verdict.FAIL, api.Verdict.PASS


@pytest.fixture
def report_of(tmp_path: Path) -> Callable[..., api.Report]:
    """Writes events as a report, and reads it."""

    def make(name: str, events: Sequence[Event]) -> api.Report:
        with EventWriter(tmp_path / name / "events.jsonl", run="r") as writer:
            for event in events:
                writer.write(event)
        return api.read(tmp_path / name)

    return make


def test_a_report_has_the_verdict_the_results_and_what_is_missing(
    report_of: Callable[..., api.Report],
) -> None:
    events = [started("mine.a", "mine.b", "mine.c"), finished("mine.a"), finished("mine.b", FAIL)]
    report = report_of("one", [*events, finished("mine.a", FAIL, draw=1), END])
    assert (report.verdict, report.exit_code) == (FAIL, api.ExitCode.WRONG)
    assert (report.run, report.commit, report.seconds) == ("r", "abc", 60.0)
    assert report.missing == ("mine.c",)
    assert "2 cases wrong" in report.reasons
    wrong = report.results["mine.a"]
    assert (wrong.failure, wrong.message) == (api.Failure.WRONG_ANSWER, "off by 3")
    assert (wrong.trials, wrong.bad_trials) == (2, 1)
    assert [result.run_id for result in report.troubles] == ["mine.a", "mine.b"]


@pytest.mark.parametrize("verdict", [v for v in api.Verdict if v is not PASS])
def test_whatever_did_not_pass_is_a_trouble(
    report_of: Callable[..., api.Report], verdict: api.Verdict
) -> None:
    failure = api.Failure.HARNESS if verdict in (FAIL, api.Verdict.INFRA) else None
    judged = (Judgement(OracleName.EXACT, verdict, failure),)
    case = replace(finished("mine.a"), verdict=verdict, judgements=judged)
    report = report_of("one", [started("mine.a", "mine.b"), case, finished("mine.b"), END])
    assert [(one.run_id, one.verdict) for one in report.troubles] == [("mine.a", verdict)]


def test_a_gate_that_ends_before_it_reports_does_not_answer_with_an_earlier_report(
    report_of: Callable[..., api.Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = report_of("one", [started("mine.a", "mine.gone"), finished("mine.a"), END])
    ended = subprocess.CompletedProcess([], earlier.exit_code, "", "loragate gate: interrupted")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(api.RunError, match="interrupted"):
        api.run(tmp_path / "one")


def test_a_folder_without_a_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read events"):
        api.read(tmp_path)


def test_a_difference_names_what_is_worse_better_new_gone_and_missing(
    report_of: Callable[..., api.Report],
) -> None:
    names = ("mine.a", "mine.b", "mine.c", "mine.gone")
    ends = [finished("mine.a"), finished("mine.b", FAIL), finished("mine.c", FAIL)]
    before = report_of("before", [started(*names), *ends, finished("mine.gone"), END])
    names = ("mine.a", "mine.b", "mine.c", "mine.new", "mine.never")
    other = finished("mine.c", FAIL, failure=api.Failure.HANG)
    ends = [finished("mine.a", FAIL), finished("mine.b"), other, finished("mine.new")]
    machine = {"device": "cuda", "executable": "/b/python"}
    start = started(*names, versions={"torch": "2.13", "triton": "3.7"}, machine=machine)
    now = report_of("now", [start, *ends, END])
    difference = api.compare(before, now)
    assert [change.now.run_id for change in difference.worse] == ["mine.a"]
    assert [change.now.run_id for change in difference.better] == ["mine.b"]
    assert [change.now.failure for change in difference.other] == [api.Failure.HANG]
    assert (difference.added, difference.removed) == (("mine.new",), ("mine.gone",))
    assert difference.missing == ("mine.never",)
    assert difference.environment == {"torch": ("2.12", "2.13"), "triton": ("", "3.7")}
    assert api.compare(now, now) == api.Difference(
        worse=(),
        better=(),
        other=(),
        added=(),
        removed=(),
        missing=("mine.never",),
        environment={},
    )


def test_a_case_that_another_failure_of_the_machine_stops_is_another_difference(
    report_of: Callable[..., api.Report],
) -> None:
    def stopped(failure: api.Failure) -> list[Event]:
        judged = (Judgement(OracleName.EXACT, api.Verdict.INFRA, failure),)
        case = replace(finished("mine.a"), verdict=api.Verdict.INFRA, judgements=judged)
        return [started("mine.a"), case, END]

    reports = {
        f: report_of(f, stopped(f)) for f in (api.Failure.HARNESS, api.Failure.OUT_OF_MEMORY)
    }
    (change,) = api.compare(*reports.values()).other
    assert (change.before.failure, change.now.failure) == tuple(reports)


def test_options_become_arguments_that_the_gate_takes(capsys: pytest.CaptureFixture[str]) -> None:
    options = api.Options(
        subjects=("torch", "mine:Mine"),
        tier="smoke",
        cases=("a*",),
        draws=3,
        repeats=2,
        matrix=("m.yaml",),
        shard=(1, 4),
        durations="earlier",
        speed="main",
    )
    assert options.arguments() == (
        *("--subject=torch", "--subject=mine:Mine", "--tier=smoke", "--cases=a*", "--seeds=3"),
        *("--repeats=2", "--matrix=m.yaml", "--shard=1/4", "--durations=earlier", "--speed=main"),
    )
    assert api.Options().arguments() == ("--repeats=1",)
    with pytest.raises(SystemExit):
        main(["gate", "--help"])
    shown = capsys.readouterr().out
    assert all(argument.partition("=")[0] in shown for argument in options.arguments())


def test_a_gate_that_cannot_run_raises_with_what_it_said(tmp_path: Path) -> None:
    options = api.Options(shard=(1, 2), durations=tmp_path / "nothing")
    with pytest.raises(api.RunError, match="nothing: cannot read events") as caught:
        api.run(tmp_path / "new", options, quiet=True)
    assert caught.value.exit_code is api.ExitCode.USAGE


def example(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTEST_XDIST_AUTO_NUM_WORKERS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(EXAMPLE), "--subject=torch", f"--matrix={MATRIX}"]
    return subprocess.run(
        [*command, f"--folder={folder}"], env=environment, capture_output=True, text=True
    )


def test_the_example_accepts_a_run_that_passes_and_says_what_became_better(
    tmp_path: Path, report_of: Callable[..., api.Report]
) -> None:
    (name,) = run_ids()
    before = [started(name), finished(name, FAIL), END]
    report_of("accepted", before)
    done = example(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"better: {name}: fail -> pass" in done.stdout
    accepted = api.read(tmp_path / "accepted")
    assert (accepted.verdict, list(accepted.results)) == (PASS, [name])
    assert accepted.run == api.read(tmp_path / "new").run


def test_the_example_finds_the_accepted_report_of_a_run_that_was_killed_while_it_accepted(
    tmp_path: Path, report_of: Callable[..., api.Report]
) -> None:
    (name,) = run_ids()
    report_of("before", [started(name), finished(name, FAIL), END])
    report_of("copy", [started(name), finished(name), END])
    done = example(tmp_path)
    assert f"better: {name}: fail -> pass" in done.stdout, done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["accepted", "new"]


def run_ids() -> list[str]:
    from loragate.matrix.ids import run_id
    from loragate.matrix.load import load_cases

    return [run_id("torch", case) for case in load_cases((MATRIX,))]


@pytest.mark.parametrize("field", ["subjects", "cases", "matrix"])
def test_one_text_where_several_belong_is_refused_instead_of_taken_letter_by_letter(
    field: str,
) -> None:
    with pytest.raises(TypeError) as refused:
        api.Options(**{field: "torch"})
    assert str(refused.value) == f"{field}: must be a tuple, as in ('torch',) (got 'torch')"
    assert any("=torch" in word for word in api.Options(**{field: ["torch"]}).arguments())
