"""Plants one fault at a time, each in its own process with its own copy of the package.

Invariant: whatever a planted process does - hang, die, or write nonsense - no other fault loses its
result, and no process or file is left behind, not even when the command is interrupted.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from loragate.core.child_process import ProcessPool, python_module
from loragate.core.verdict import Failure, Verdict
from loragate.faults.fates import fate_by_anyone, fate_of_fault
from loragate.faults.model import Control, Fate, Fault, Needs, Outcome, Sighting
from loragate.faults.order import Order, Suite, read_transcript, write_order
from loragate.faults.planting import StaleAnchor, package_folder, plant

_HARNESS = Path(__file__).resolve().parents[2]
_LAST_LINES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How planted processes run: compiled on a GPU or in the interpreter, how many at a time,
    and after how many seconds one counts as hanging."""

    gpu: bool = False
    jobs: int = 2
    deadline_s: float = 90.0


def run_all(
    planted: Sequence[Fault | Control], suites: Sequence[Suite], setup: Setup
) -> Generator[tuple[Fault | Control, tuple[Outcome, ...]]]:
    """Outcomes by suite, in the order given, each as soon as it is known. Closing the generator
    ends what is running."""
    processes = ProcessPool()

    def run(one: Fault | Control) -> tuple[Outcome, ...]:
        return tuple(run_one(one, suite, setup, processes) for suite in suites)

    with ThreadPoolExecutor(setup.jobs) as pool:
        try:
            yield from zip(planted, pool.map(run, planted), strict=True)
        finally:
            processes.close()
            pool.shutdown(cancel_futures=True)


def run_one(
    planted: Fault | Control, suite: Suite, setup: Setup, processes: ProcessPool | None = None
) -> Outcome:
    """Plant one fault or control and run one suite. Never raises because of what was planted."""
    if isinstance(planted, Fault) and planted.needs is Needs.GPU and not setup.gpu:
        return Outcome(name=planted.name, fate=Fate.NOT_RUN, message="needs a GPU")
    started = time.monotonic()
    try:
        sightings = _run_planted(planted, suite, setup, processes or ProcessPool())
    except StaleAnchor as error:
        return Outcome(name=planted.name, fate=Fate.BROKEN, message=str(error))
    seconds = time.monotonic() - started
    if suite is Suite.BASELINE or isinstance(planted, Control):
        return fate_by_anyone(planted.name, sightings, seconds)
    return fate_of_fault(planted, sightings, seconds)


def _run_planted(
    planted: Fault | Control, suite: Suite, setup: Setup, processes: ProcessPool
) -> tuple[Sighting, ...]:
    with tempfile.TemporaryDirectory(prefix="loragate-fault-") as name:
        folder = Path(name)
        plant(planted.edit, package_folder(), folder / "planted")
        order = Order(
            planted=str(folder / "planted"),
            module=planted.edit.module if planted.edit else None,
            suite=suite,
            cases=planted.cases,
            checks=planted.checks,
        )
        write_order(order, folder / "order.json")
        failure = _run_child(folder, setup, processes)
        transcript = read_transcript(folder / "transcript.jsonl")
        log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    if failure is None and transcript.finished:
        return transcript.sightings
    return (*transcript.sightings, _death(transcript.current, failure, log))


def _run_child(folder: Path, setup: Setup, processes: ProcessPool) -> Failure | None:
    """Run the process to its end. Returns how it failed, or None."""
    files = (str(folder / "order.json"), str(folder / "transcript.jsonl"))
    with (folder / "log.txt").open("wb") as log:
        child = processes.start(
            python_module("loragate.faults.child", *files),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(folder, setup),
            cwd=folder,
        )
        try:
            code = child.wait(setup.deadline_s)
        except subprocess.TimeoutExpired:
            return Failure.HANG
        finally:
            processes.end(child)
    return None if code == 0 else Failure.CRASH


def _environment(folder: Path, setup: Setup) -> dict[str, str]:
    # the planted package comes before the one that is installed
    paths = [str(folder / "planted"), str(_HARNESS), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONDONTWRITEBYTECODE": "1",
        # a kernel that was compiled for another fault must not be reused
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    if not setup.gpu:
        environment["TRITON_INTERPRET"] = "1"
    return environment


def _death(current: str, failure: Failure | None, log: str) -> Sighting:
    # the last line of a traceback says most
    last_lines = " | ".join(reversed(log.strip().splitlines()[-_LAST_LINES:]))
    if current in ("", "import") and failure is not Failure.HANG:
        # it failed before any judge could run
        message = f"the process failed to start: {last_lines}"
        return Sighting(
            judge=current or "start",
            case="",
            verdict=Verdict.INFRA,
            failure=Failure.CRASH,
            message=message,
        )
    kind = failure or Failure.CRASH
    message = f"{kind} of the process: {last_lines}".rstrip(": ")
    return Sighting(judge=current, case="", verdict=Verdict.FAIL, failure=kind, message=message)
