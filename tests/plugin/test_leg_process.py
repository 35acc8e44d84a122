"""A leg is watched, stopped with everything that it started, and judged by its exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loragate.core import child_process
from loragate.core.child_process import Cause, Ending, ProcessPool, Watch
from loragate.core.signals import ended_by_signals
from loragate.core.verdict import Verdict
from loragate.run.legs import verdict_of_exit

pytestmark = pytest.mark.usefixtures("heeded_signals")


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def nothing_moved() -> bool:
    return False


def watch(command: list[str], *, log: Path, patience_s: float = 60, tick=nothing_moved) -> Ending:
    """How a command ended that ran alone."""
    with Watch(patience_s=patience_s, tick=tick) as children:
        children.start(command, log=log)
        return children.wait()[1]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # a zombie that waits for its parent is as good as gone
    return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"


def test_the_log_holds_what_the_leg_printed(tmp_path):
    log = tmp_path / "logs" / "leg.log"
    text = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    ending = watch(python(text), log=log)
    assert (ending.cause, ending.exit_code) == (Cause.EXITED, 3)
    assert sorted(log.read_text().split()) == ["err", "out"]


def test_a_leg_without_a_sign_of_life_is_stopped(tmp_path):
    ending = watch(python("import time; time.sleep(600)"), log=tmp_path / "leg.log", patience_s=0.5)
    assert ending.cause is Cause.STALLED


def test_an_interruption_while_a_silent_leg_is_ended_is_not_lost(tmp_path):
    # it answers the interruption that ends it with one of the process that watches it, and goes on
    text = (
        "import os, signal, time\n"
        "answer = lambda *_: os.kill(os.getppid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, answer)\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(1)"
    )
    with pytest.raises(KeyboardInterrupt):
        watch(python(text), log=tmp_path / "leg.log", patience_s=2)


def test_a_silent_leg_whose_record_grows_is_left_alone(tmp_path):
    ending = watch(
        python("import time; time.sleep(1.5)"),
        log=tmp_path / "leg.log",
        patience_s=0.5,
        tick=lambda: True,
    )
    assert (ending.cause, ending.exit_code) == (Cause.EXITED, 0)


def test_what_a_leg_has_started_does_not_outlive_it(tmp_path):
    text = (
        "import subprocess, sys;"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)"
    )
    log = tmp_path / "leg.log"
    watch(python(text), log=log)
    grandchild = int(log.read_text())
    deadline = time.monotonic() + 30
    while is_alive(grandchild) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(grandchild)


WATCHING = """
import signal, sys
from pathlib import Path
from loragate.core.signals import ended_by_signals
from loragate.core.child_process import Watch
if len(sys.argv) > 3:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
command = [sys.executable, "-c", f"import os, time; print(os.getpid(), flush=True); {sys.argv[2]}"]
with ended_by_signals(), Watch(patience_s=60, tick=lambda: False) as children:
    try:
        children.start(command, log=Path(sys.argv[1]))
        print(children.wait()[1].cause.name)
    except KeyboardInterrupt:
        children.stop()
        print("INTERRUPTED")
"""


def signalled(log, number, statement, *ignoring):
    """Output of a process that is sent a signal while it watches a leg, and if the leg lives."""
    arguments = [*python(WATCHING), str(log), statement, *ignoring]
    watching = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.02)
    leg = int(log.read_text())
    try:
        watching.send_signal(number)
        said, _ = watching.communicate(timeout=30)
        return said, is_alive(leg)
    finally:
        if is_alive(leg):
            os.killpg(leg, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_leg_is_stopped_when_the_process_that_watches_it_is_terminated(tmp_path, number):
    said, alive = signalled(tmp_path / "leg.log", number, "time.sleep(600)")
    assert (said, alive) == ("INTERRUPTED\n", False)


def test_a_leg_goes_on_after_a_hang_up_that_is_ignored_on_purpose(tmp_path):
    said, _ = signalled(tmp_path / "leg.log", signal.SIGHUP, "time.sleep(1)", "nohup")
    assert said == "EXITED\n"


def signalled_while_starting(monkeypatch):
    """Every process that is started from here on is followed by SIGTERM before anybody has it."""
    started = []

    class SignalledPopen(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self.pid)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(child_process.subprocess, "Popen", SignalledPopen)
    return started


def test_a_leg_is_stopped_by_a_signal_that_comes_while_it_is_started(tmp_path, monkeypatch):
    started = signalled_while_starting(monkeypatch)
    with Watch(patience_s=60, tick=nothing_moved) as children:
        with pytest.raises(KeyboardInterrupt), ended_by_signals():
            children.start(python("import time; time.sleep(600)"), log=tmp_path / "leg.log")
        assert is_alive(started[0])
    assert not is_alive(started[0])


def test_a_pool_ends_a_process_that_a_signal_interrupted_while_it_was_started(monkeypatch):
    started, pool = signalled_while_starting(monkeypatch), ProcessPool()
    with pytest.raises(KeyboardInterrupt), ended_by_signals():
        pool.start(python("import time; time.sleep(600)"))
    pool.close()
    deadline = time.monotonic() + 30
    while is_alive(started[0]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(started[0])


def test_signal_handlers_are_restored_when_a_command_is_done():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(KeyboardInterrupt), ended_by_signals():
        signal.raise_signal(signal.SIGTERM)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


def test_a_second_signal_does_not_interrupt_the_clean_up():
    cleaned = False

    def work():
        nonlocal cleaned
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:
            signal.raise_signal(signal.SIGTERM)
            cleaned = True

    with pytest.raises(KeyboardInterrupt), ended_by_signals():
        work()
    assert cleaned


@pytest.mark.parametrize(
    ("exit_code", "verdict"),
    [
        (0, Verdict.PASS),
        (1, Verdict.FAIL),
        (2, Verdict.INCONCLUSIVE),
        (3, Verdict.INFRA),
        (4, Verdict.INFRA),
        (5, Verdict.INCONCLUSIVE),
        (-9, Verdict.INFRA),
        (127, Verdict.INFRA),
    ],
)
def test_only_a_leg_that_exits_with_zero_has_passed(exit_code, verdict):
    assert verdict_of_exit(exit_code) is verdict
