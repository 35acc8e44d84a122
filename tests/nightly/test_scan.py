"""Scans in real processes: what is stable stays stable, and no trial is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from loragate.core.gpu_health import NoHealth
from loragate.core.machine import detect_machine
from loragate.core.verdict import ExitCode
from loragate.history import History, Outcome, Purpose, ScanRun, TrialRecord, open_history
from loragate.matrix.case_run import CaseRun
from loragate.matrix.load import load_cases
from loragate.nightly.conditions import Cause
from loragate.nightly.states import TEST, Status, states
from loragate.nightly.wave import Place, Wave
from loragate.records.results import read_section
from loragate.scan.figures import SECTION
from loragate.scan.messages import Measured, Message
from loragate.scan.processes import Processes
from loragate.scan.running import Running
from loragate.scan.scan import Scan, Setup
from loragate.scan.surroundings import Shown, Surroundings
from loragate.scan.waves import Waves

_PLANTED = Path(__file__).parent / "planted"
_ROOT = Path(__file__).parents[2]
_MODULE = "planted_subjects"
_MOST_WAVES = 500
_SUBJECTS = ("Stable", "Crashing")
_TWO_CORES = Place(workers=2)


@dataclass
class Scanned:
    history: History
    trials: list[TrialRecord]
    runs: tuple[ScanRun, ...]


@pytest.fixture(scope="module")
def processes(environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """For all tests: importing torch takes longer than most of their trials."""
    names = [f"{_MODULE}:{subject}" for subject in _SUBJECTS]
    with Processes(names, tmp_path_factory.mktemp("scan") / "log") as started:
        yield started


def _runs(subjects: Collection[str], tokens: Collection[int]) -> dict[str, CaseRun]:
    matrix = (_PLANTED / "planted.yaml",)
    every = (
        CaseRun(f"{_MODULE}:{subject}", case, matrix=matrix)
        for subject in subjects
        for case in load_cases(matrix)
        if case.tokens in tokens
    )
    return {run.run_id: run for run in every}


def _started(
    history: History,
    processes: Processes,
    run: ScanRun,
    runs: dict[str, CaseRun],
    folder: Path,
    *,
    seed: int = 16,
    place: Place = _TWO_CORES,
) -> Scan:
    """A scan that no clock ends."""
    history.add_run(run)
    around = Surroundings(
        run=run.uid,
        runs=runs,
        history=history,
        processes=processes,
        health=NoHealth(),
        folder=folder,
    )
    setup = Setup(run=run, cases=tuple(runs), place=place, budget_s=1e6, seed=seed)
    return Scan(setup, Waves(around), history, print)


def _scan(
    folder: Path,
    processes: Processes,
    runs: dict[str, CaseRun],
    run: ScanRun,
    until: Callable[[list[TrialRecord]], bool],
) -> Scanned:
    """Waves until `until` says that the trials so far are enough."""
    history = open_history(folder / "history.db")
    scan = _started(history, processes, run, runs, folder)
    try:
        for _ in range(_MOST_WAVES):
            scan.step()
            if until(list(history.trials())):
                break
    finally:
        scan.close()
    return Scanned(history, list(history.trials()), history.runs())


def test_what_is_stable_stays_so_in_ten_scans(
    tmp_path: Path, processes: Processes, scan_run: Callable[..., ScanRun]
) -> None:
    seen = []
    with open_history(tmp_path / "history.db") as history:
        for number in range(10):
            run = scan_run(f"night-{number}", started_at=time.time())
            runs = _runs(["Stable"], {3, 4, 5})
            scan = _started(history, processes, run, runs, tmp_path, seed=number)
            while history.count() < 15 * (number + 1):
                scan.step()
            scan.close()
            (state,) = states(list(history.trials()), history.runs()).values()
            assert (state.suspects, state.failures, state.diagnosis) == ((), 0, None)
            seen.append((state.trials >= TEST.clean_trials(), state.status))
    assert set(seen) == {(False, Status.UNDECIDED), (True, Status.STABLE)}


def test_workers_that_wait_for_a_wave_alone_have_short_trials(
    tmp_path: Path,
    processes: Processes,
    scan_run: Callable[..., ScanRun],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short_waves: list[Wave | None] = []
    run = Waves.run

    def run_and_note(self: Waves, *given: Any, **options: Any) -> list[Shown]:
        short_waves.append(options["short"]())
        return run(self, *given, **options)

    monkeypatch.setattr(Waves, "run", run_and_note)
    runs = _runs(["Stable"], {3, 4, 5})
    with open_history(tmp_path / "history.db") as history:
        scan = _started(history, processes, scan_run(started_at=time.time()), runs, tmp_path)
        while not short_waves:
            scan.step()
        scan.close()
    # of what has run by then
    assert None not in short_waves


def test_a_trial_that_ends_its_process_is_wrong_and_the_scan_goes_on(
    tmp_path: Path, processes: Processes, scan_run: Callable[..., ScanRun]
) -> None:
    def enough(trials: list[TrialRecord]) -> bool:
        return sum(trial.outcome is Outcome.RIGHT for trial in trials) >= 3

    runs = _runs(["Crashing"], {3, 4, 5})
    scanned = _scan(tmp_path, processes, runs, scan_run(started_at=time.time()), enough)
    outcomes = {t.case.rpartition("-")[2]: t.outcome for t in scanned.trials if not t.cause}
    assert outcomes.pop("4") is Outcome.WRONG
    assert set(outcomes.values()) == {Outcome.RIGHT}
    (crash, *_) = [t for t in scanned.trials if t.outcome is Outcome.WRONG]
    assert crash.failure == "crash"
    assert "SIGKILL" in crash.message
    assert {trial.cause for trial in scanned.trials if trial.cause} == {Cause.ALWAYS}


def test_a_trial_that_ends_the_first_process_ran_on_the_device_of_all_others(
    tmp_path: Path, processes: Processes, scan_run: Callable[..., ScanRun]
) -> None:
    runs = _runs(["Crashing"], {4})
    scanned = _scan(tmp_path, processes, runs, scan_run(started_at=time.time()), bool)
    machine = detect_machine()
    assert {trial.device for trial in scanned.trials} == {f"{machine.device} {machine.name}"}


def _tell_of_trials(told: int) -> None:
    """Of each trial that a scan in this process hears of, before it is in the history."""
    hear = Running.hear

    def telling(self: Running, message: Message | None) -> Measured | None:
        ended = hear(self, message)
        if ended is not None:
            os.write(told, b".")
        return ended

    Running.hear = telling  # type: ignore[method-assign]


def _forked_scan(history: Path, run: ScanRun, processes: Processes) -> tuple[int, int]:
    """A process that scans until it is killed, and where it tells of its trials."""
    heard, told = os.pipe()
    # what the server says of trials of the process before is not meant for this one
    processes._count += 1_000_000
    process = os.fork()
    if process == 0:
        try:
            _tell_of_trials(told)
            with open_history(history) as opened:
                runs = _runs(["Stable"], {3, 4, 5})
                place = Place(workers=1)
                scan = _started(opened, processes, run, runs, history.parent, place=place)
                while True:
                    scan.step()
        finally:
            os._exit(1)
    os.close(told)
    return process, heard


def test_a_scan_killed_at_any_moment_keeps_every_trial_that_was_through(
    tmp_path: Path, processes: Processes, scan_run: Callable[..., ScanRun]
) -> None:
    # the server is started once for all of them
    _scan(tmp_path, processes, _runs(["Stable"], {3}), scan_run("first"), bool)
    random, told, path = Random(16), {}, tmp_path / "history.db"
    for moment in range(12):
        run = scan_run(f"night-{moment}", started_at=time.time())
        process, heard = _forked_scan(path, run, processes)
        told[run.uid] = sum(len(os.read(heard, 1)) for _ in range(random.randrange(1, 8)))
        time.sleep(random.random() / 100)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        while rest := os.read(heard, 1000):
            told[run.uid] += len(rest)
        os.close(heard)
    with open_history(path) as history:
        trials = list(history.trials())
        assert {r.finished_at for r in history.runs()} == {None}
    for uid, count in told.items():
        kept = sorted(t.number for t in trials if t.run == uid)
        # each scan found what the killed one before it had left, and no trial is torn
        assert kept == list(range(len(kept)))
        assert count - 1 <= len(kept) <= count
    assert all(t.outcome is Outcome.RIGHT and t.path_key for t in trials)
    assert len({t.digest for t in trials if t.digest and t.draw == 0}) == 3


@pytest.fixture
def started_scan(
    tmp_path: Path, environment: None, started_anew: None
) -> Iterator[subprocess.Popen[str]]:
    """The command, which has time for hours, once it has recorded some trials and named a cause."""
    command = [
        *(sys.executable, "-m", "loragate", "scan", "--budget=2h", "--workers=2"),
        *(f"--subject={_MODULE}:Atomics", f"--matrix={_PLANTED / 'planted.yaml'}"),
        *(f"--history={tmp_path / 'h.db'}", f"--report={tmp_path / 'report'}"),
    ]
    scan = subprocess.Popen(
        command,
        cwd=_ROOT,
        # by which its processes are known
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert scan.stdout is not None
    heard = []
    for line in scan.stdout:
        heard.append(line)
        waves = sum("wave" in earlier for earlier in heard)
        if waves >= 3 and any("run to run" in earlier for earlier in heard):
            break
    else:
        pytest.fail("".join(heard))
    yield scan
    scan.kill()
    scan.wait()


def _processes_of(folder: Path) -> list[str]:
    """Command lines of processes that know the folder for temporary files of the test."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environ = (process / "environ").read_bytes()
            if f"TMPDIR={folder}".encode() in environ and process.name != str(os.getpid()):
                found.append((process / "cmdline").read_bytes().decode())
        except OSError:
            continue
    return found


@pytest.mark.usefixtures("heeded_signals")
def test_an_interrupted_scan_shows_what_it_found_and_leaves_no_process(
    started_scan: subprocess.Popen[str], tmp_path: Path
) -> None:
    started_scan.send_signal(signal.SIGINT)
    output, _ = started_scan.communicate(timeout=240)
    assert started_scan.returncode == ExitCode.INCOMPLETE.value, output
    assert "run to run" in (tmp_path / "report" / "morning.html").read_text(encoding="utf-8")
    with open_history(tmp_path / "h.db") as history:
        assert history.count() >= 9
        (run,) = history.runs()
        assert run.finished_at is not None


def test_a_killed_scan_keeps_its_trials_and_leaves_no_process(
    started_scan: subprocess.Popen[str], tmp_path: Path
) -> None:
    started_scan.kill()
    started_scan.wait()
    with open_history(tmp_path / "h.db") as history:
        # all that the lines have told of
        assert history.count() >= 9
        (run,) = history.runs()
        assert run.finished_at is None
    end = time.monotonic() + 240
    while (left := _processes_of(tmp_path)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left


def _recorded_scan(subject: str, folder: Path, seconds: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "loragate", "scan", f"--budget={seconds}s", "--workers=2"),
            *(f"--subject={_MODULE}:{subject}", f"--matrix={_PLANTED / 'planted.yaml'}"),
            *(f"--history={folder / subject}.db", f"--report={folder / subject}"),
            f"--record={folder / subject}.json",
        ],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_scan_to_its_end_is_recorded_with_its_trials_and_what_its_page_says_of_them(
    tmp_path: Path, environment: None
) -> None:
    # what is wrong is diagnosed, in the first of them
    seconds = dict.fromkeys(("Stable", "Crashing"), 15)
    # side by side, because they wait more than they compute
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(_recorded_scan(name, tmp_path, budget))
            for name, budget in seconds.items()
        }
        said = {name: scan.communicate()[0] for name, scan in started.items()}
    for subject, output in said.items():
        section = read_section(tmp_path / f"{subject}.json", SECTION)
        assert section, output
        with open_history(tmp_path / f"{subject}.db") as history:
            trials = list(history.trials())
            found = Counter(state.status for state in states(trials, history.runs()).values())
        planned = sum(trial.purpose is Purpose.PLANNED for trial in trials)
        assert section["trials"]["planned"] == planned > 0
        assert section["budget_s"] == seconds[subject]
        assert section["workers"] == 2
        assert section["paths"] == {status: found[status] for status in Status}
        # trials of a diagnosis confirm what was wrong once
        assert section["paths"]["wrong"] == (subject == "Crashing")
        assert bool(section["trials"]["diagnose"]) == (subject == "Crashing")
