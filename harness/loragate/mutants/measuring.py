"""Measures the reach of every unit, on sound code: in it everything must pass."""

from __future__ import annotations

import os
import queue
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from loragate.core.child_process import ProcessPool, run_module
from loragate.core.errors import CommandError
from loragate.core.verdict import ExitCode, Verdict
from loragate.core.warm_server import WarmServer, environment_of_forks
from loragate.faults.planting import package_folder
from loragate.mutants.host_tests import COLLECTION
from loragate.mutants.planting import HOST_TESTS, plant, planted_package
from loragate.mutants.reach import Reach, reach_of
from loragate.mutants.tracing import instrument, read_trace
from loragate.mutants.units import IMPORT, Ended, Kind, Order, Unit, read_transcript
from loragate.mutants.warm import run_order, server_of_mutants

_PLANNING_S = 120.0
# without any sign of life
_PATIENCE_S = 900.0
_PARTS_PER_JOB = 4
_GOOD = (Verdict.PASS, Verdict.SKIP)

# cases, and files of host tests
Part = tuple[tuple[Unit, ...], tuple[str, ...]]


def planned_cases(tier: str = "smoke", *, gpu: bool = False) -> tuple[str, ...]:
    """The run ids that a gate of a tier runs here. Raises CommandError."""
    done = run_module(
        "loragate.mutants.planned", tier, env=environment_of_forks(gpu=gpu), timeout=_PLANNING_S
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise CommandError(f"planning failed: {' '.join(last)}", ExitCode.INFRASTRUCTURE)
    return tuple(done.stdout.decode().split())


def measure_reach(digest: str, jobs: int, progress: Callable[[str], None]) -> Reach:
    """Raises CommandError if a case or a test of sound code does not pass."""
    processes = ProcessPool()
    cases = [Unit(Kind.CASE, name) for name in planned_cases()]
    with tempfile.TemporaryDirectory(prefix="loragate-reach-") as name:
        folder = Path(name)
        plant(None, folder / "planted")
        instrument(planted_package(folder / "planted"))
        parts = _parts(cases, folder / "planted", jobs)
        servers: queue.SimpleQueue[WarmServer] = queue.SimpleQueue()
        for number in range(jobs):
            servers.put(server_of_mutants(processes, folder / f"server-{number}.txt"))
        with ThreadPoolExecutor(jobs) as pool:
            try:
                orders = [_order_of(folder, number, *part) for number, part in enumerate(parts)]
                started = [pool.submit(_run_part, order, servers) for order in orders]
                for number, part in enumerate(as_completed(started), 1):
                    # a part that failed ends the rest
                    part.result()
                    progress(f"{number} of {len(started)} parts are measured")
                found = [part.result() for part in started]
            finally:
                # an interrupt must not wait for what is running
                pool.shutdown(wait=False, cancel_futures=True)
                processes.close()
        ended = [entry for part in found for entry in part]
        idle = files_without_tests([name for order in orders for name in order.tests], ended)
        if idle:
            progress(f"all tests are skipped here, and kill nothing, in {', '.join(idle)}")
        return _reach_of(digest, ended, cases, folder, compiled_modules())


def _parts(cases: Sequence[Unit], root: Path, jobs: int) -> list[Part]:
    """Small enough that all jobs end at about the same time."""
    count = min(len(cases), _PARTS_PER_JOB * jobs)
    dealt: list[Part] = [(tuple(cases[first::count]), ()) for first in range(count)]
    files = sorted(path for name in HOST_TESTS for path in (root / name).rglob("test_*.py"))
    return dealt + [((), (str(path.relative_to(root)),)) for path in files]


def _order_of(folder: Path, number: int, units: tuple[Unit, ...], tests: tuple[str, ...]) -> Order:
    return Order(
        root=str(folder / "planted"),
        transcript=str(folder / f"transcript-{number}.jsonl"),
        log=str(folder / f"log-{number}.txt"),
        units=units,
        traces=str(folder / f"traces-{number}"),
        tests=tests,
    )


def _run_part(order: Order, servers: queue.SimpleQueue[WarmServer]) -> tuple[Ended, ...]:
    server = servers.get()
    try:
        failure = run_order(server, order, _PATIENCE_S)
    finally:
        servers.put(server)
    story = read_transcript(Path(order.transcript))
    if failure is not None or not story.finished:
        log = Path(order.log).read_text(encoding="utf-8", errors="replace").strip()
        raise CommandError(f"the reach was not measured: {log[-1000:]}", ExitCode.INFRASTRUCTURE)
    return story.ended


def files_without_tests(files: Sequence[str], ended: Sequence[Ended]) -> list[str]:
    """Files of host tests of which none has passed on sound code: they need a GPU, or a library
    that is not there."""
    with_tests = {entry.unit.partition("::")[0] for entry in ended if _is_unit(entry)}
    return [name for name in files if name not in with_tests]


def _reach_of(
    digest: str, ended: Sequence[Ended], cases: Sequence[Unit], folder: Path, compiled: set[str]
) -> Reach:
    bad = [entry for entry in ended if entry.verdict not in _GOOD]
    names = {entry.unit for entry in ended}
    lost = [case.name for case in cases if case.name not in names]
    if bad or lost:
        first = f"{bad[0].unit}: {bad[0].message}" if bad else f"{lost[0]} did not end"
        text = f"{len(bad) + len(lost)} cases or tests do not pass without a mutant: {first}"
        raise CommandError(text, ExitCode.INFRASTRUCTURE)
    traces = {entry.unit: read_trace(Path(entry.trace)) for entry in ended if entry.trace}
    wanted = [entry for entry in ended if _is_unit(entry)]
    case_names = {case.name for case in cases}
    units = [
        Unit(Kind.CASE if e.unit in case_names else Kind.TEST, e.unit, e.seconds) for e in wanted
    ]
    lines = [_with_collection(traces, entry.unit) for entry in wanted]
    return reach_of(digest, units, lines, traces[IMPORT], compiled)


def _is_unit(entry: Ended) -> bool:
    auxiliary = entry.unit == IMPORT or entry.unit.startswith(COLLECTION)
    # what is skipped on sound code says nothing
    return not auxiliary and entry.verdict is Verdict.PASS


def _with_collection(traces: dict[str, dict[str, set[int]]], unit: str) -> dict[str, set[int]]:
    """The lines of a unit, with those that run when the module of a test is collected."""
    found = {module: set(lines) for module, lines in traces[unit].items()}
    for module, lines in traces.get(COLLECTION + unit.partition("::")[0], {}).items():
        found.setdefault(module, set()).update(lines)
    return found


def compiled_modules() -> set[str]:
    """The modules that the compile leg runs or compiles."""
    package = package_folder()
    path = os.pathsep.join([str(package.parent), environment_of_forks()["PYTHONPATH"]])
    done = run_module(
        "loragate.mutants.compile_reach",
        str(package),
        env=environment_of_forks() | {"PYTHONPATH": path},
        timeout=_PATIENCE_S,
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip()[-1000:]
        raise CommandError(f"the compile leg was not traced: {last}", ExitCode.INFRASTRUCTURE)
    return set(done.stdout.decode().split())
