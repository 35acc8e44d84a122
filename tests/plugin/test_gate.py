"""The gate from outside: a command, its exit code and what it leaves."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loragate.cli import main
from loragate.core.gpus import ListedGpu
from loragate.core.verdict import ExitCode, Verdict
from loragate.events.log import read_events
from loragate.events.model import CaseFinished, CaseStarted, LegFinished, Note, RunStarted
from loragate.matrix.case import Tier
from loragate.matrix.selection import Selection
from loragate.run import gate
from loragate.run.opening import Announcement, opening

pytestmark = pytest.mark.usefixtures("heeded_signals")

MATRICES = Path(__file__).parent / "bad_day"


@pytest.fixture
def start_gate(tmp_path, subject_environment):
    def start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "loragate", "gate", *arguments],
            # wherever it is called from
            cwd=tmp_path,
            env=subject_environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def test_a_gate_whose_every_case_passes_is_green_and_leaves_a_report(tmp_path, start_gate):
    process = start_gate("--subject=torch", f"--matrix={MATRICES / 'long_sleep.yaml'}", "--seeds=2")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == ExitCode.OK, output
    assert "2 cases of torch, 2 attempts each" in output
    assert "2/2 cases" in output
    assert "every expected case ran and passed" in output
    report = tmp_path / "report"
    log = read_events(report / "events.jsonl")
    (plan,) = [event for event in log.events if isinstance(event, RunStarted)]
    assert (plan.legs, plan.attempts) == (("interpreter",), (0, 1))
    assert sum(isinstance(event, CaseFinished) for event in log.events) == 4
    assert "4 passed" in (report / "logs" / "interpreter.log").read_text()
    assert (report / "index.html").exists()
    assert (report / "junit.xml").exists()


def test_ctrl_c_leaves_an_incomplete_run_with_its_report(tmp_path, start_gate):
    process = start_gate(
        "--subject=bad_day_subject:BadDay", f"--matrix={MATRICES / 'long_sleep.yaml'}"
    )
    events = tmp_path / "report" / "events.jsonl"
    wait_for(lambda: sleeping_case_started(events))
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INCOMPLETE, output
    log = read_events(events)
    (leg,) = [event for event in log.events if isinstance(event, LegFinished)]
    assert (leg.verdict, leg.message) == (Verdict.INCONCLUSIVE, "interrupted")
    ends = {e.run_id[-9:]: e.verdict for e in log.events if isinstance(e, CaseFinished)}
    assert ends == {"tokens-21": Verdict.PASS, "tokens-13": Verdict.INCONCLUSIVE}
    assert "interrupted" in (tmp_path / "report" / "index.html").read_text()


def test_a_bad_case_file_is_told_with_its_line_and_touches_no_report(tmp_path, start_gate):
    (tmp_path / "bad.yaml").write_text("site: dense_delta\ngroups: {a: {tier: smok}}\n")
    process = start_gate("--subject=torch", "--matrix=bad.yaml")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == ExitCode.USAGE
    assert "bad.yaml:2: groups.a.tier: given 'smok'" in output
    assert "Traceback" not in output
    assert not (tmp_path / "report").exists()


def test_a_tier_that_needs_a_gpu_is_refused_without_one(tmp_path, start_gate):
    process = start_gate("--tier=premerge")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == ExitCode.USAGE
    assert "tier premerge needs a GPU and there is none; allowed here: smoke" in output


@pytest.mark.parametrize(
    ("listed", "device", "told"),
    [
        ((ListedGpu("0", "GPU-a", 1 << 37),), "cpu", "the driver lists a GPU that torch"),
        ((), "cuda", "torch can use a GPU and NVML (libnvidia-ml.so.1) is not there to list it"),
    ],
)
def test_a_driver_and_torch_that_disagree_about_gpus_are_told_instead_of_checking_less(
    tmp_path, monkeypatch, capsys, listed, device, told
):
    monkeypatch.setattr(gate, "list_gpus", lambda environ: listed)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    started = RunStarted(
        run="r",
        started_at="",
        tier=Tier.PREMERGE,
        subjects=("torch",),
        legs=("gpu",),
        expected=(),
        machine={"device": device},
    )
    monkeypatch.setattr(gate, "announce", lambda announcement: (started,))
    report = tmp_path / "report"
    code = main(["gate", "--subject=torch", f"--report={report}"])
    assert code == ExitCode.INFRASTRUCTURE
    error = capsys.readouterr().err
    assert told in error
    assert "fix that, or set CUDA_VISIBLE_DEVICES=" in error
    assert not report.exists()


def test_a_gpu_that_is_named_and_not_there_is_none(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gate, "list_gpus", lambda *environ: ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code = main(["gate", "--tier=premerge", f"--report={tmp_path / 'report'}"])
    assert code == ExitCode.USAGE
    assert "tier premerge needs a GPU and there is none" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["gate", "session"])
def test_a_driver_that_fails_stops_a_run_with_its_message(tmp_path, command, run_gate, run_session):
    changes = {"FAKE_GPUS": "mismatch", "CUDA_VISIBLE_DEVICES": "0"}
    report = tmp_path / "report"
    if command == "gate":
        done = run_gate(report, "--subject=torch", matrix="four_good.yaml", **changes)
    else:
        done = run_session(report, "-n", "auto", matrix="four_good.yaml", **changes)
    assert done.exit_code == ExitCode.INFRASTRUCTURE, done.output
    assert "NVML reports: RM has detected an NVML/RM version mismatch" in done.output
    assert "Traceback" not in done.output
    assert not report.exists()


def test_a_subject_that_can_run_nothing_here_still_owes_its_cases(monkeypatch):
    monkeypatch.syspath_prepend(MATRICES)
    subject = "bad_day_subject:Absent"
    selection = Selection(
        matrix=(MATRICES / "long_sleep.yaml",), subjects=(subject, "torch"), tier=Tier.SMOKE
    )
    plan, *notes = opening(Announcement(run="r", selection=selection, leg="x", legs=("x",)))
    assert isinstance(plan, RunStarted)
    assert {row.subject: row.count for row in plan.expected} == {subject: 2, "torch": 2}
    assert plan.skipped == ()
    why = f"subject {subject} can run nothing here: package absent is not installed"
    assert notes == [Note(text=why)]


def sleeping_case_started(events: Path) -> bool:
    if not events.exists():
        return False
    seen = read_events(events).events
    started = {e.run_id[-9:] for e in seen if isinstance(e, CaseStarted)}
    ended = {e.run_id[-9:] for e in seen if isinstance(e, CaseFinished)}
    return "tokens-13" in started and "tokens-21" in ended


def wait_for(condition) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
