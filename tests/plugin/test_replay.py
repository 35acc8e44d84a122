"""`loragate replay` of cases that do not come to an end of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from loragate.cli import main
from loragate.commands import replay as command
from loragate.core.verdict import EXIT_CODES, ExitCode, Verdict
from loragate.events.case_end import end_of
from loragate.events.model import CaseFinished
from loragate.matrix.case_run import CaseRun
from loragate.run.replay_process import ReplayFolder, ReplayRequest

_MATRIX = Path(__file__).parent / "misbehaving" / "replayed.yaml"
_MISBEHAVING = "misbehaving_subject:Misbehaving"


def _arguments(pattern: str, *options: str) -> list[str]:
    return ["-m", "loragate", "replay", pattern, *options, f"--matrix={_MATRIX}"]


@pytest.fixture
def replay(
    subject_environment: dict[str, str],
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(pattern: str, *options: str) -> subprocess.CompletedProcess[str]:
        return run_python(*_arguments(pattern, *options), env=subject_environment)

    return run


@pytest.mark.drill(
    tried="A replay of a case that never ends and holds the GIL",
    exit_code=ExitCode.WRONG,
    kept="the stack at the case's own deadline",
)
def test_a_replay_of_a_hang_ends_at_its_deadline_with_the_stack(drill, replay):
    done = replay(f"{_MISBEHAVING}.tokens-14")
    drill(done.returncode, done.stdout)
    head, message, *_ = done.stdout.splitlines()[1:]
    assert head.startswith(f"FAIL hang: {_MISBEHAVING}.dense_delta.")
    assert message == "  no end within 2 s"
    assert "in sleep_holding_the_gil" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("replay: ")


@pytest.mark.drill(
    tried="A replay of a case that hangs in several threads",
    exit_code=ExitCode.WRONG,
    kept="the stack of every thread",
)
def test_a_replay_of_a_hang_shows_every_thread(drill, replay):
    done = replay("replayed_subject:Threaded.tokens-22")
    drill(done.returncode, done.stdout)
    assert "FAIL hang: replayed_subject:Threaded." in done.stdout
    assert "in linger" in done.stdout
    assert "in open" in done.stdout


@pytest.mark.drill(
    tried="A replay of a case that dies of a segmentation fault",
    exit_code=ExitCode.WRONG,
    kept="the signal and the stack",
)
def test_a_replay_of_a_crash_names_the_signal_and_shows_the_stack(drill, replay):
    done = replay(f"{_MISBEHAVING}.tokens-12", "--repeats=2")
    drill(done.returncode, done.stdout)
    assert f"FAIL crash: {_MISBEHAVING}." in done.stdout
    assert "\n  the process of the case died of SIGSEGV\n" in done.stdout
    assert "in segfault" in done.stdout


@pytest.mark.drill(
    tried="A replay of a case that exits from its process",
    exit_code=ExitCode.WRONG,
    kept="the exit code of the process",
)
def test_a_replay_of_a_case_that_exits_is_a_crash(drill, replay):
    done = replay(f"{_MISBEHAVING}.tokens-11")
    drill(done.returncode, done.stdout)
    assert f"FAIL crash: {_MISBEHAVING}." in done.stdout
    assert "\n  the process of the case exited with 1\n" in done.stdout


@pytest.mark.drill(
    tried="Ctrl-C during a replay",
    exit_code=ExitCode.INCOMPLETE,
    kept="no process is left",
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("heeded_signals")
def test_a_replay_that_is_interrupted_leaves_no_process_behind(drill, number, subject_environment):
    command = [sys.executable, *_arguments(f"{_MISBEHAVING}.tokens-13")]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=subject_environment, **pipe) as process:
        assert process.stdout is not None
        # printed right before the case begins
        assert process.stdout.readline().startswith("seed ")
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    drill(process.returncode, output)
    assert output == "loragate replay: interrupted\n"
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert gone
    assert not alive


def test_a_case_that_exits_from_the_process_of_the_replay_with_0_is_wrong(replay, tmp_path):
    done = replay(f"{_MISBEHAVING}.tokens-19", "--in-process")
    assert done.returncode == ExitCode.WRONG, done.stdout
    assert "in leave_as_if_done" in done.stdout


@pytest.mark.usefixtures("plain_command")
def test_a_later_repeat_that_kills_the_process_of_the_replay_is_wrong(monkeypatch, capsys):
    def die_in_the_second(folder: ReplayFolder) -> int:
        first = folder.asked().runs[0]
        folder.answer(end_of(first, Verdict.PASS, worker="replay", gpu="", duration_s=0.1))
        return -signal.SIGSEGV

    monkeypatch.setattr(command, "_run_child", die_in_the_second)
    arguments = ["replay", "torch.tokens-21", "--repeats=3", f"--matrix={_MATRIX}"]
    assert main(arguments) == ExitCode.WRONG
    shown = capsys.readouterr().out
    assert shown.startswith("FAIL crash: torch.")
    assert "the process of the case died of SIGSEGV" in shown
    assert " --draw 0 --repeats 2 " in shown


@pytest.mark.parametrize(
    ("named", "options", "runs"),
    [
        ("", [], ["#0"]),
        ("#1", [], ["#1"]),
        ("#1.2", [], ["#1", "#1.1", "#1.2"]),
        ("#1.2", ["--repeats=4"], ["#1", "#1.1", "#1.2", "#1.3"]),
        ("", ["--draw=3", "--repeats=2"], ["#3", "#3.1"]),
    ],
)
def test_a_replay_runs_the_named_repeat_and_those_before_it(monkeypatch, named, options, runs):
    asked = []

    def run(request: ReplayRequest) -> CaseFinished:
        asked.append(request)
        return end_of(request.first, Verdict.PASS, worker="replay", gpu="", duration_s=0.1)

    monkeypatch.setattr(command, "_replay_in_child", run)
    assert main(["replay", f"torch.tokens-21{named}", *options, f"--matrix={_MATRIX}"]) == 0
    (request,) = asked
    assert [f"#{run.id.partition('#')[2] or 0}" for run in request.runs] == runs


@pytest.mark.parametrize(
    "verdict", [Verdict.FAIL, Verdict.INFRA, Verdict.INCONCLUSIVE, Verdict.SKIP]
)
def test_a_replay_ends_with_the_first_repeat_that_does_not_pass(
    monkeypatch: pytest.MonkeyPatch, verdict: Verdict
) -> None:
    given = iter((Verdict.PASS, verdict, Verdict.PASS))

    def run_case(run: CaseRun, *_: object, **__: object) -> CaseFinished:
        return end_of(run, next(given), worker="replay", gpu="", duration_s=0.1)

    monkeypatch.setattr("loragate.run.trial.run_case", run_case)
    arguments = ["replay", "torch.tokens-21", "--repeats=3", "--in-process"]
    assert main([*arguments, f"--matrix={_MATRIX}"]) == EXIT_CODES[verdict]
    assert list(given) == [Verdict.PASS]


@pytest.mark.parametrize(
    ("named", "options", "answer"),
    [
        ("#1", ["--draw=2"], "--draw 2: 'torch.tokens-21#1' names draw 1"),
        ("#1.2", ["--repeats=2"], "--repeats 2: 'torch.tokens-21#1.2' names repeat 2"),
    ],
)
def test_a_draw_that_the_id_and_an_option_name_differently_is_a_usage_error(
    replay, named, options, answer
):
    done = replay(f"torch.tokens-21{named}", *options)
    assert done.returncode == ExitCode.USAGE, done.stdout
    assert f"loragate replay: {answer}" in done.stdout


def test_a_draw_that_the_id_and_an_option_name_alike_is_replayed(replay):
    done = replay("torch.tokens-21#1", "--draw=1")
    assert done.returncode == ExitCode.OK, done.stdout
    assert done.stdout.splitlines()[-1].endswith(f" --draw 1 --matrix {_MATRIX}")


def test_a_replay_in_this_process_gives_the_same_evidence(replay):
    apart, here = (
        replay(f"{_MISBEHAVING}.tokens-18", *options) for options in ((), ("--in-process",))
    )
    assert apart.returncode == here.returncode == ExitCode.WRONG
    assert apart.stdout == here.stdout
    assert "reference  FAIL wrong_answer" in here.stdout


def test_a_subject_that_cannot_be_made_is_a_usage_error_in_one_line(replay, tmp_path):
    done = replay("misbehaving_subject:Nobody.tokens-21")
    assert done.returncode == ExitCode.USAGE
    assert "misbehaving_subject has no 'Nobody'" in done.stdout
    # needs an argument
    done = replay("misbehaving_subject:_MisbehavingInstance.tokens-21")
    assert done.returncode == ExitCode.USAGE
    assert "_MisbehavingInstance needs arguments (good, tokens)" in done.stdout
