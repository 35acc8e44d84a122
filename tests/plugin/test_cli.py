"""The command line: an unknown word is an error that names the nearest known one."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from loragate.cli import main
from loragate.core.verdict import ExitCode, Verdict
from loragate.subjects.registry import SUBJECTS

MATRIX = f"--matrix={Path(__file__).parent / 'misbehaving' / 'long_sleep.yaml'}"
GOOD = (
    "torch.dense_delta.dtype-fp32.exec-eager.in-32.layout-contiguous.mix-ragged.rank-8"
    ".ranks-mixed.slices-16.slots-4.tokens-21"
)


@pytest.mark.parametrize("name", ["PYTEST_ADDOPTS", "PYTEST_PLUGINS"])
def test_options_for_every_session_of_pytest_reach_no_process_of_a_command(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    seen = {}

    def run(arguments: argparse.Namespace) -> ExitCode:
        found = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
        seen.update(line.split("=", 1) for line in found.splitlines() if "=" in line)
        return ExitCode.OK

    monkeypatch.setenv(name, "--collect-only")
    monkeypatch.setenv("LORAGATE_OTHER", "kept")
    monkeypatch.setattr("loragate.commands.plan.run", run)
    assert main(["plan"]) == ExitCode.OK
    assert name not in seen
    assert seen["LORAGATE_OTHER"] == "kept"


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["gat"], "there is no 'gat'; known are"),
        (["gat"], "did you mean gate?"),
        (["plan", "--teir=smoke"], "unknown arguments: --teir=smoke; did you mean --tier?"),
        (["plan", "--tier=smke"], "did you mean smoke?"),
        (
            ["history", "merge", "x", "--history", "y"],
            "unknown arguments: --history y; --history must come before the action",
        ),
        (
            ["bench", "dense", "--shpe", "64x32"],
            "unknown arguments: --shpe 64x32; did you mean --shape?",
        ),
        (["history", "prune", "--days", "3", "--histroy=x"], "; did you mean --history?"),
        (["gate", "--attempt=3"], "unknown arguments: --attempt=3; did you mean --draw?"),
        (["replay", "x", "--attempt", "3"], "unknown arguments: --attempt 3; did you mean --draw?"),
        (["gate", "--seeds=0"], "must be a number from 1 to 10000 (got '0')"),
        (["plan", f"--seeds={'9' * 18}"], "must be a number from 1 to 10000 (got '999"),
        (["replay", "x", f"--repeats={'9' * 18}"], "must be a number from 1 to 1000000 (got '999"),
        (["gate", "--seeds=2", "--draw=1"], "not allowed with argument"),
        (["gate", "--repeats=0"], "must be a number from 1 up (got '0')"),
        (["replay", "x", "--draw=-1"], "must be a number from 0 up (got '-1')"),
        (["replay", "x", f"--draw={'9' * 19}"], "from 0 up, of at most 18 digits (got '9999"),
        # of a variable of a shell that is not set
        (["gate", "--report=", "--tier=smke"], "argument --report: must be a path (got '')"),
        (["plan", "--durations="], "argument --durations: must be a path (got '')"),
        (["plan", "--matrix="], "argument --matrix: must be a path (got '')"),
        (["morning", "--report=", "--quarantine=x"], "argument --report: must be a path (got '')"),
        (["generate", "--folder="], "argument --folder: must be a path (got '')"),
        (
            ["mutants", "--edits=x", "--list", "--folder="],
            "argument --folder: must be a path (got '')",
        ),
        (["mutants", "--edits="], "argument --edits: must be a path (got '')"),
        (["faults", "--show="], "argument --show: must be a path (got '')"),
        (["report", ""], "argument DIR: must be a path (got '')"),
        (["merge", "x", "--report="], "argument --report: must be a path (got '')"),
        (["merge", ""], "argument REPORT: must be a path (got '')"),
        (["history", "import", ""], "argument FILE: must be a path (got '')"),
        (["history", "export", ""], "argument FILE: must be a path (got '')"),
        (["checkpoints", "--folder="], "argument --folder: must be a path (got '')"),
        (["bench", "show", ""], "argument FILE: must be a path (got '')"),
        (["bench", "plot", "x", "--out="], "argument --out: must be a path (got '')"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_a_wrong_word_is_a_usage_error_with_a_hint(arguments, answer, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == ExitCode.USAGE
    assert answer in capsys.readouterr().err


def test_an_unexpected_error_is_reported_in_a_line_and_is_not_a_wrong_result(capsys, monkeypatch):
    def broken(arguments):
        raise RuntimeError("disk full\nand more")

    monkeypatch.setattr("loragate.commands.plan.run", broken)
    assert main(["plan"]) == ExitCode.INFRASTRUCTURE
    line, *stack = capsys.readouterr().err.splitlines()
    assert line == "loragate plan: RuntimeError: disk full"
    assert stack[0] == "Traceback (most recent call last):"
    assert any("in broken" in frame for frame in stack)


@pytest.mark.usefixtures("started_anew")
def test_parsing_imports_no_torch():
    text = "import sys; from loragate import cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert done.stdout == "False\n"


def test_the_plan_shows_what_would_run(capsys):
    assert main(["plan", "--subject=torch", "--tier=smoke", MATRIX]) == ExitCode.OK
    assert GOOD in capsys.readouterr().out


def test_a_pattern_that_selects_nothing_is_a_usage_error(capsys):
    arguments = ["plan", "--subject=torch", "--tier=smoke", "--cases=tokens-999", MATRIX]
    assert main(arguments) == ExitCode.USAGE
    assert "'tokens-999' selects none of 2 cases" in capsys.readouterr().err


@pytest.fixture
def replay(plain_command):
    """Replays in this process."""
    return lambda *arguments: main(["replay", "--in-process", MATRIX, *arguments])


@pytest.mark.parametrize("command", ["plan", "gate"])
def test_more_runs_than_a_process_can_list_are_a_usage_error(command, tmp_path, capsys):
    options = ["--subject=torch", "--tier=smoke", f"--report={tmp_path}"]
    options = options if command == "gate" else options[:2]
    assert main([command, *options, MATRIX, "--repeats=999999999", "--seeds=3"]) == ExitCode.USAGE
    assert capsys.readouterr().err == (
        f"loragate {command}: 2 cases with 3 draws and 999999999 repeats are 5999999994 runs; "
        "allowed are 5000000, so select fewer cases, draws or repeats\n"
    )


def test_a_replay_prints_the_evidence_of_every_oracle(replay, capsys):
    assert replay("torch.tokens-21", "--draw=2") == ExitCode.OK
    output = capsys.readouterr().out
    assert f"PASS: {GOOD}" in output
    assert "reference  PASS" in output
    assert f"replay: loragate replay {GOOD} --draw 2 --matrix " in output


def test_a_replay_runs_the_same_data_as_often_as_asked(replay, capsys):
    assert replay(f"{GOOD}#2.1", "--repeats=3") == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("seed ")
    assert lines[1:4] == ["repeat 0: PASS", "repeat 1: PASS", f"PASS: {GOOD}"]
    command = f"replay: loragate replay {GOOD} --draw 2 --repeats 3 "
    assert lines[-1] == f"{command}{MATRIX.replace('=', ' ')}"


def test_a_replay_of_a_repeat_runs_those_before_and_stops_at_the_first_failure(
    replay, capsys, monkeypatch
):
    from loragate.run.trial import run_case

    ran = []

    def fail_second(run, trial, *, worker, gpu):
        ran.append(run.repeat)
        verdict = Verdict.FAIL if run.repeat == 1 else Verdict.PASS
        done = run_case(run, trial, worker=worker, gpu=gpu)
        return dataclasses.replace(done, verdict=verdict)

    monkeypatch.setattr("loragate.run.trial.run_case", fail_second)
    assert replay(f"{GOOD}#0.4") == ExitCode.WRONG
    assert ran == [0, 1]
    output = capsys.readouterr().out
    assert f"repeat 0: PASS\nFAIL: {GOOD}\n" in output
    assert f"replay: loragate replay {GOOD} --draw 0 --repeats 2" in output


def test_a_replay_of_no_case_names_the_nearest(capsys):
    assert main(["replay", GOOD.replace("tokens-21", "tokens-23"), MATRIX]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert f"selects none of {2 * len(SUBJECTS)} cases" in error
    assert f"nearest: {GOOD}" in error


def test_a_replay_of_several_cases_says_how_many_and_names_them(capsys):
    assert main(["replay", "tokens-21", MATRIX]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert f"'tokens-21' selects {len(SUBJECTS)} cases, not one:\n  lorakernels." in error
    assert f"\n  {GOOD}\n" in error


def test_a_replay_with_an_unknown_subject_names_the_nearest(replay, capsys):
    assert replay(GOOD.replace("torch", "torhc", 1)) == ExitCode.USAGE
    assert "did you mean 'torch'?" in capsys.readouterr().err


def test_a_replay_that_cannot_run_here_is_incomplete_and_gives_the_reason(
    replay, capsys, monkeypatch
):
    monkeypatch.setattr("loragate.run.trial.open_trial", lambda run: "needs a GPU")
    assert replay(GOOD) == ExitCode.INCOMPLETE
    assert capsys.readouterr().err == f"loragate replay: {GOOD} cannot run here: needs a GPU\n"


@pytest.mark.usefixtures("started_anew")
@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("from loragate.cli import main; main(['gate', '--help'])", "torch scipy sqlalchemy"),
        ("import loragate.run.trial; sys.exit()", "scipy sqlalchemy"),
    ],
)
def test_what_is_started_often_imports_no_library_that_others_need(
    code: str, unwanted: str
) -> None:
    script = f"import atexit, sys; atexit.register(lambda: print(*sys.modules)); {code}"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    loaded = done.stdout.splitlines()[-1].split()
    assert "loragate" in loaded
    assert not set(unwanted.split()) & set(loaded)
