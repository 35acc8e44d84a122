"""The gate from outside: a command, its exit code and what it leaves."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from loragate.cli import main
from loragate.core.checkout import data_root
from loragate.core.gpus import ListedGpu
from loragate.core.verdict import ExitCode, Verdict
from loragate.events.log import read_events
from loragate.events.model import CaseFinished, LegFinished, Note, RunStarted
from loragate.matrix.case import Tier
from loragate.matrix.load import default_files
from loragate.matrix.selection import Selection
from loragate.run import gate, schedule
from loragate.run.opening import RunRequest, opening_events

pytestmark = pytest.mark.usefixtures("heeded_signals")

MATRICES = Path(__file__).parent / "misbehaving"


def test_a_gate_whose_every_case_passes_exits_with_0_and_leaves_a_report(tmp_path, start_gate):
    process = start_gate(
        "--subject=torch", f"--matrix={MATRICES / 'long_sleep.yaml'}", "--seeds=2", "--repeats=2"
    )
    output, _ = process.communicate(timeout=120)
    assert process.returncode == ExitCode.OK, output
    assert "2 cases of torch, 2 draws each, each run 2 times" in output
    assert "2/2 cases" in output
    assert "every expected case ran and passed" in output
    report = tmp_path / "report"
    log = read_events(report / "events.jsonl")
    (plan,) = [event for event in log.events if isinstance(event, RunStarted)]
    assert (plan.legs, plan.draws, plan.repeats) == (("interpreter",), (0, 1), 2)
    ends = [event for event in log.events if isinstance(event, CaseFinished)]
    assert len({(end.run_id, end.trial) for end in ends}) == len(ends) == 8
    assert len({end.seed for end in ends}) == 4
    assert "2 of 2 draws passed, each case run 2 times" in output
    assert "8 passed" in (report / "logs" / "interpreter.log").read_text()
    assert (report / "index.html").exists()
    assert (report / "junit.xml").exists()


def test_the_leg_of_cases_of_which_the_subject_supports_none_does_not_pass(tmp_path, start_gate):
    text = (MATRICES / "long_sleep.yaml").read_text()
    matrix = tmp_path / "unsupported.yaml"
    matrix.write_text(text.replace("defaults: {", "defaults: {execution: graph, "))
    process = start_gate("--subject=torch", f"--matrix={matrix}")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == ExitCode.INCOMPLETE, output
    assert "PASS" not in output
    log = read_events(tmp_path / "report" / "events.jsonl")
    (leg,) = [event for event in log.events if isinstance(event, LegFinished)]
    assert leg.verdict is Verdict.INCONCLUSIVE


@pytest.mark.drill(
    tried="Ctrl-C while a case of the gate runs",
    exit_code=ExitCode.INCOMPLETE,
    kept="all finished cases, the interrupted one as inconclusive, and every page",
)
def test_ctrl_c_leaves_an_incomplete_run_with_its_report(
    tmp_path, start_gate, wait_until_it_sleeps, drill
):
    process = start_gate(
        "--subject=misbehaving_subject:Misbehaving", f"--matrix={MATRICES / 'long_sleep.yaml'}"
    )
    events = tmp_path / "report" / "events.jsonl"
    wait_until_it_sleeps(events)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    drill(process.returncode, output)
    log = read_events(events)
    (leg,) = [event for event in log.events if isinstance(event, LegFinished)]
    assert (leg.verdict, leg.message) == (Verdict.INCONCLUSIVE, "interrupted")
    ends = {e.run_id[-9:]: e.verdict for e in log.events if isinstance(e, CaseFinished)}
    assert ends == {"tokens-21": Verdict.PASS, "tokens-13": Verdict.INCONCLUSIVE}
    assert "interrupted" in (tmp_path / "report" / "index.html").read_text()


@pytest.mark.drill(
    tried="A case file with a spelling mistake",
    exit_code=ExitCode.USAGE,
    kept="the earlier report, untouched; the message names file, line and field",
)
def test_an_error_in_a_case_file_is_reported_with_its_line_and_touches_no_report(
    tmp_path, start_gate, drill
):
    (tmp_path / "bad.yaml").write_text("site: dense_delta\ngroups: {a: {tier: smok}}\n")
    process = start_gate("--subject=torch", "--matrix=bad.yaml")
    output, _ = process.communicate(timeout=60)
    drill(process.returncode, output)
    assert "bad.yaml:2: groups.a.tier: given 'smok'" in output
    assert not (tmp_path / "report").exists()


def test_a_tier_that_needs_a_gpu_is_refused_without_one(tmp_path, start_gate):
    process = start_gate("--tier=premerge")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == ExitCode.USAGE
    assert "tier premerge needs a GPU and there is none; allowed here: smoke" in output


@pytest.mark.parametrize(
    ("listed", "device", "complaint"),
    [
        ((ListedGpu("0", "GPU-a", 1 << 37),), "cpu", "the driver lists a GPU that torch"),
        ((), "cuda", "torch can use a GPU and NVML (libnvidia-ml.so.1) is not there to list it"),
    ],
)
def test_the_gate_does_not_start_if_driver_and_torch_disagree_about_gpus(
    tmp_path, monkeypatch, capsys, listed, device, complaint
):
    monkeypatch.setattr(schedule, "list_gpus", lambda environ: listed)
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
    monkeypatch.setattr(gate, "opening_events_of_child", lambda request: (started,))
    report = tmp_path / "report"
    code = main(["gate", "--subject=torch", f"--report={report}"])
    assert code == ExitCode.INFRASTRUCTURE
    error = capsys.readouterr().err
    assert complaint in error
    assert "fix that, or set CUDA_VISIBLE_DEVICES=" in error
    assert not report.exists()


def test_a_gpu_that_is_named_but_absent_does_not_count(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(schedule, "list_gpus", lambda *environ: ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code = main(["gate", "--tier=premerge", f"--report={tmp_path / 'report'}"])
    assert code == ExitCode.USAGE
    assert "tier premerge needs a GPU and there is none" in capsys.readouterr().err


@pytest.mark.drill(
    tried="A driver that does not fit its library",
    exit_code=ExitCode.INFRASTRUCTURE,
    kept="the earlier report, untouched; one line has the message of the driver",
)
@pytest.mark.parametrize("command", ["gate", "session"])
def test_a_run_stops_with_the_message_of_a_driver_that_fails(
    tmp_path, command, run_gate, run_session, drill
):
    changes = {"FAKE_GPUS": "mismatch", "CUDA_VISIBLE_DEVICES": "0"}
    report = tmp_path / "report"
    if command == "gate":
        done = run_gate(report, "--subject=torch", matrix="four_good.yaml", **changes)
    else:
        done = run_session(report, "-n", "auto", matrix="four_good.yaml", **changes)
    drill(done.exit_code, done.output)
    assert "NVML reports: RM has detected an NVML/RM version mismatch" in done.output
    assert "Traceback" not in done.output
    assert not report.exists()


def test_the_cases_of_a_subject_that_can_run_nothing_here_are_still_expected(monkeypatch):
    monkeypatch.syspath_prepend(MATRICES)
    subject = "misbehaving_subject:Absent"
    selection = Selection(
        matrix=(MATRICES / "long_sleep.yaml",), subjects=(subject, "torch"), tier=Tier.SMOKE
    )
    plan, *notes = opening_events(RunRequest(run="r", selection=selection, leg="x", legs=("x",)))
    assert isinstance(plan, RunStarted)
    assert {row.subject: row.count for row in plan.expected} == {subject: 2, "torch": 2}
    assert plan.skipped == ()
    why = f"subject {subject} can run nothing here: package absent is not installed"
    assert notes == [Note(text=why)]


@pytest.mark.parametrize(
    ("matrix", "patterns", "named"),
    [
        ((MATRICES / "long_sleep.yaml",), (), ("tests/plugin/misbehaving/long_sleep.yaml",)),
        (default_files(data_root()), ("dense_delta.tokens-6",), ()),
    ],
)
def test_a_plan_names_the_patterns_and_the_files_that_its_cases_were_taken_from(
    matrix, patterns, named
):
    selection = Selection(matrix=matrix, subjects=("torch",), tier=Tier.SMOKE, patterns=patterns)
    plan = next(opening_events(RunRequest(run="r", selection=selection, leg="x", legs=("x",))))
    assert isinstance(plan, RunStarted)
    assert (plan.patterns, plan.matrix) == (patterns, named)
