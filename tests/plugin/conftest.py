"""Sessions of pytest inside of pytest, with a subject that misbehaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
from filelock import FileLock

from loragate.events.log import EventLog, read_events
from loragate.events.model import CaseFinished, CaseStarted

_HERE = Path(__file__).parent / "misbehaving"
_ROOT = Path(__file__).parents[2]
# of a gate: each imports torch for seconds, and has few and small cases here
_ONE_WORKER = {"PYTEST_XDIST_AUTO_NUM_WORKERS": "1"}
SUBJECT = "misbehaving_subject:Misbehaving"


@dataclass(frozen=True)
class Session:
    """A session that has ended, and what it left."""

    exit_code: int
    output: str
    report: Path

    @cached_property
    def log(self) -> EventLog:
        return read_events(self.report / "events.jsonl")

    @cached_property
    def finished(self) -> list[CaseFinished]:
        return [event for event in self.log.events if isinstance(event, CaseFinished)]

    def of_tokens(self, tokens: int) -> CaseFinished:
        """The only end of the case with that many tokens, which say how the subject misbehaves."""
        (event,) = [e for e in self.finished if e.run_id.endswith(f".tokens-{tokens}")]
        return event


def environment(**changes: str) -> dict[str, str]:
    """That of this process without what the pytest around it has put there."""
    ours = ("PYTEST_", "COV_", "TRITON_INTERPRET")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    folders = [_HERE, _ROOT / "tests" / "fake_nvml", _ROOT / "harness", _ROOT / "kernels"]
    paths = [*map(str, folders), kept.get("PYTHONPATH", "")]
    # what cannot be seen cannot be used: these tests run on the CPU everywhere
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths), **changes}


@pytest.fixture(scope="session")
def subject_environment() -> dict[str, str]:
    return environment(**_ONE_WORKER)


@pytest.fixture(scope="session")
def session_of() -> Callable[[subprocess.CompletedProcess[str], Path], Session]:
    return lambda done, report: Session(done.returncode, done.stdout, report)


@pytest.fixture(scope="module", autouse=True)
def forked(preloaded: None) -> None:
    """Nearly all of these tests start sessions, which start workers."""


@pytest.fixture(scope="session")
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `python` with these arguments, stderr in stdout."""

    def run(
        *arguments: str, env: dict[str, str], cwd: Path = _ROOT
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            env=env,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )

    return run


@pytest.fixture(scope="session")
def run_session(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> Callable[..., Session]:
    """Runs `pytest cases` on one of the matrices of this folder."""

    def run(
        report: Path, *arguments: str, matrix: str, subject: str = SUBJECT, **changes: str
    ) -> Session:
        done = run_python(
            # without the plugin of hypothesis, as the gate starts its leg
            *("-m", "pytest", "cases", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"),
            *(f"--loragate-report={report}", f"--loragate-subject={subject}"),
            f"--loragate-matrix={_HERE / matrix}",
            *arguments,
            env=environment(**changes),
        )
        return Session(done.returncode, done.stdout, report)

    return run


@pytest.fixture(scope="session")
def run_gate(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> Callable[..., Session]:
    """Runs the gate on one of the matrices of this folder."""

    def run(report: Path, *arguments: str, matrix: str, **changes: str) -> Session:
        done = run_python(
            *("-m", "loragate", "gate", f"--report={report}"),
            *(f"--matrix={_HERE / matrix}", *arguments),
            env=environment(**(_ONE_WORKER | changes)),
        )
        return Session(done.returncode, done.stdout, report)

    return run


@pytest.fixture(scope="session")
def run_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, Callable[[Path], Session]], Session]:
    """A session that many tests look at, made by whichever worker comes first."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def run(name: str, make: Callable[[Path], Session]) -> Session:
        kept = root / f"{name}.json"
        with FileLock(root / f"{name}.lock"):
            if not kept.exists():
                made = make(root / name)
                kept.write_text(json.dumps([made.exit_code, made.output]))
        return Session(*json.loads(kept.read_text()), root / name)

    return run


@pytest.fixture
def start_gate(
    tmp_path: Path, subject_environment: dict[str, str]
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a gate in an empty folder, its output in a pipe; it is killed with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "loragate", "gate", *arguments],
            # wherever it is called from
            cwd=tmp_path,
            env=subject_environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def sleeping_gate(
    start_gate: Callable[..., subprocess.Popen[str]],
) -> Callable[[], subprocess.Popen[str]]:
    """Starts a gate whose last case sleeps for longer than any test."""
    return lambda: start_gate(f"--subject={SUBJECT}", f"--matrix={_HERE / 'long_sleep.yaml'}")


@pytest.fixture
def wait_until_it_sleeps() -> Callable[[Path], None]:
    """Waits until the gate that writes these events runs its last case and has judged the other."""

    def wait(events: Path) -> None:
        deadline = time.monotonic() + 120
        while not _sleeps(events):
            assert time.monotonic() < deadline
            time.sleep(0.1)

    return wait


def _sleeps(events: Path) -> bool:
    if not events.exists():
        return False
    seen = read_events(events).events
    started = {e.run_id[-9:] for e in seen if isinstance(e, CaseStarted)}
    ended = {e.run_id[-9:] for e in seen if isinstance(e, CaseFinished)}
    return "tokens-13" in started and "tokens-21" in ended
