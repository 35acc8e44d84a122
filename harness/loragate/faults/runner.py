"""Plants one fault at a time, each in its own process with its own copy of the package.

Invariant: whatever a planted process does - hang, die, or write nonsense - no other fault loses its
result, and no process or file is left behind, not even when the command is interrupted.
"""

from __future__ import annotations

import os
import queue
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from loragate.core.child_process import ProcessPool
from loragate.core.verdict import Failure, OracleName, Verdict
from loragate.core.warm_server import ServerDied, WarmServer, environment_of_forks
from loragate.faults.fates import fate_by_anyone, fate_of_fault
from loragate.faults.gate_contents import GateContents, UnknownItem, gate_contents
from loragate.faults.model import (
    Control,
    Edit,
    Fate,
    Fault,
    Killer,
    Needs,
    Outcome,
    Part,
    Sighting,
)
from loragate.faults.order import IMPORT, Begun, Order, Suite, read_transcript, write_order
from loragate.faults.planting import StaleAnchor, package_folder, plant
from loragate.faults.sound import SOUND_DEADLINE_S, failures_of, sound_orders
from loragate.matrix.case import Case, Tier

_LAST_LINES = 8
_SLOW_ORACLES = frozenset({OracleName.GUARD, OracleName.COMPILE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How planted processes run: compiled on a GPU or in the interpreter, how many at a time,
    and after how many seconds one counts as hanging. `quick` leaves the slowest oracles out
    where they need not detect the fault."""

    gpu: bool = False
    jobs: int = 2
    deadline_s: float = 240.0
    quick: bool = False

    @property
    def gate(self) -> GateContents:
        """What a plain run of the gate executes on such a machine."""
        return gate_contents(Tier.PREMERGE if self.gpu else Tier.SMOKE)


def run_all(
    planted: Sequence[Fault | Control], suites: Sequence[Suite], setup: Setup
) -> Generator[tuple[Fault | Control, tuple[Outcome, ...]]]:
    """Outcomes by suite, in the order given, each as soon as it is known. What must detect the
    faults runs without any of them first. Closing the generator ends what is running."""
    processes = ProcessPool()
    servers: queue.SimpleQueue[WarmServer] = queue.SimpleQueue()

    with tempfile.TemporaryDirectory(prefix="loragate-servers-") as logs:
        for number in range(setup.jobs):
            log = Path(logs) / f"{number}.txt"
            servers.put(server_of_faults(processes, log, gpu=setup.gpu))
        with ThreadPoolExecutor(setup.jobs) as pool:
            try:
                failures = _failures(planted, setup, servers, pool) if Suite.GATE in suites else {}

                def run(one: Fault | Control) -> tuple[Outcome, ...]:
                    with _one_of(servers) as server:
                        return tuple(_run_sound(one, s, setup, server, failures) for s in suites)

                yield from zip(planted, pool.map(run, planted), strict=True)
            finally:
                processes.close()
                pool.shutdown(cancel_futures=True)
                while not servers.empty():
                    servers.get().close()


def _failures(
    planted: Sequence[Fault | Control],
    setup: Setup,
    servers: queue.SimpleQueue[WarmServer],
    pool: ThreadPoolExecutor,
) -> Mapping[Killer, str]:
    """Those that must detect one of the faults, but fail without it."""

    def run(order: Order) -> tuple[Sighting, ...]:
        with _one_of(servers) as server:
            return run_unchanged(order, setup, server)

    killers = _killers_here(planted, setup)
    orders = sound_orders(killers, setup.gate, setup.jobs)
    return failures_of(killers, [s for found in pool.map(run, orders) for s in found])


@contextmanager
def _one_of(servers: queue.SimpleQueue[WarmServer]) -> Iterator[WarmServer]:
    server = servers.get()
    try:
        yield server
    finally:
        servers.put(server)


def _killers_here(planted: Sequence[Fault | Control], setup: Setup) -> list[Killer]:
    """What must detect the faults that can be planted here, each once."""
    found: dict[Killer, None] = {}
    for one in planted:
        if isinstance(one, Fault) and (setup.gpu or one.needs is Needs.CPU):
            # a fault that names what the gate does not run is broken anyway
            with suppress(UnknownItem):
                setup.gate.check(one.items)
                found.update(dict.fromkeys(one.killers))
    return list(found)


def run_unchanged(order: Order, setup: Setup, server: WarmServer) -> tuple[Sighting, ...]:
    """What the items of an order say of the unchanged package."""
    try:
        return run_order(order, None, replace(setup, deadline_s=SOUND_DEADLINE_S), server)
    except ServerDied as error:
        return (Sighting(judge="start", case="", verdict=Verdict.INFRA, message=str(error)),)


def _run_sound(
    planted: Fault | Control,
    suite: Suite,
    setup: Setup,
    server: WarmServer,
    failures: Mapping[Killer, str],
) -> Outcome:
    """As `run_one`, but nothing is shown to what fails without a fault."""
    if suite is Suite.GATE and isinstance(planted, Fault):
        for killer in planted.killers:
            if killer in failures:
                return Outcome(name=planted.name, fate=Fate.BROKEN, message=failures[killer])
    return run_one(planted, suite, setup, server)


def server_of_faults(processes: ProcessPool, log: Path, *, gpu: bool = False) -> WarmServer:
    """Which forks the planted processes; not started yet."""
    return WarmServer("loragate.faults.server", processes, log, environment_of_forks(gpu=gpu))


def run_one(planted: Fault | Control, suite: Suite, setup: Setup, server: WarmServer) -> Outcome:
    """Plant one fault or control and run one suite. Never raises because of what was planted."""
    if isinstance(planted, Fault) and planted.needs is Needs.GPU and not setup.gpu:
        return Outcome(name=planted.name, fate=Fate.NOT_RUN, message="needs a GPU")
    started = time.monotonic()
    try:
        order = _order(planted, suite, setup)
        sightings = run_order(order, planted.edit, setup, server)
    except (StaleAnchor, UnknownItem, ServerDied) as error:
        return Outcome(name=planted.name, fate=Fate.BROKEN, message=str(error))
    seconds = time.monotonic() - started
    if suite is Suite.BASELINE or isinstance(planted, Control):
        return fate_by_anyone(planted.name, sightings, seconds)
    return fate_of_fault(planted, sightings, seconds)


def _order(planted: Fault | Control, suite: Suite, setup: Setup) -> Order:
    """Raises UnknownItem where the gate would not execute what must detect the fault."""
    gate = setup.gate
    if isinstance(planted, Fault) and not planted.items:
        again = f"loragate faults --find-killers {planted.name}"
        raise UnknownItem(f"nothing is named that must detect it; search with `{again}`")
    gate.check(planted.items)

    def ids(part: Part) -> tuple[str, ...]:
        return tuple(item.id for item in planted.items if item.part is part)

    left_out = _SLOW_ORACLES if setup.quick else frozenset()
    if isinstance(planted, Fault):
        left_out -= {killer.by for killer in planted.killers}
    cases = [gate.cases[name] for name in ids(Part.CASE)]
    return Order(
        module=planted.edit.module if planted.edit else None,
        suite=suite,
        cases=tuple(replace(c, oracles=_without(c, left_out)) for c in cases),
        tests=ids(Part.HOST_TEST),
        launches=ids(Part.LAUNCH),
    )


def _without(case: Case, left_out: Set[OracleName]) -> tuple[OracleName, ...]:
    return tuple(oracle for oracle in case.oracles if oracle not in left_out)


def run_order(
    order: Order, edit: Edit | None, setup: Setup, server: WarmServer
) -> tuple[Sighting, ...]:
    """What a process reports that has a copy of the package with `edit`. Raises StaleAnchor and
    ServerDied."""
    with tempfile.TemporaryDirectory(prefix="loragate-fault-") as name:
        folder = Path(name)
        plant(edit, package_folder(), folder / "planted")
        write_order(order, folder / "order.json")
        # it may be ended before it writes anything
        (folder / "log.txt").touch()
        # whatever it writes, it has to end in time
        failure = server.run(os.fsencode(folder), lambda: 0, setup.deadline_s)
        transcript = read_transcript(folder / "transcript.jsonl")
        log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    if failure is None and transcript.finished:
        return transcript.sightings
    return (*transcript.sightings, _death(transcript.current, failure, log))


def _death(current: Begun | None, failure: Failure | None, log: str) -> Sighting:
    # the last line of a traceback says most
    last_lines = " | ".join(reversed(log.strip().splitlines()[-_LAST_LINES:]))
    if (current is None or current.judge == IMPORT) and failure is not Failure.HANG:
        # it failed before any judge could run
        message = f"the process failed to start: {last_lines}"
        return Sighting(
            judge=current.judge if current else "start",
            case="",
            verdict=Verdict.INFRA,
            failure=Failure.CRASH,
            message=message,
        )
    kind, at = failure or Failure.CRASH, current or Begun("start")
    message = f"{kind} of the process: {last_lines}".rstrip(": ")
    return Sighting(
        judge=at.judge,
        case=at.case,
        verdict=Verdict.FAIL,
        failure=kind,
        message=message,
        part=at.part,
    )
