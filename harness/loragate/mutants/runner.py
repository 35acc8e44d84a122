"""Plants one mutant at a time and job, each in a process and a checkout of its own.

Invariant: whatever a planted process does - hang, die, or write nonsense - no other mutant loses
its result, and no process or file is left behind, not even when the command is interrupted.
"""

from __future__ import annotations

import os
import queue
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from loragate.core.child_process import ProcessPool, python_module
from loragate.core.verdict import Failure, Verdict
from loragate.core.warm_server import ServerDied, WarmServer, environment_of_forks
from loragate.mutants.model import Fate, Mutant, Result
from loragate.mutants.ordering import Kill, ordered, quick
from loragate.mutants.planting import plant
from loragate.mutants.reach import Reach, site_of
from loragate.mutants.sources import Place, place_of
from loragate.mutants.units import (
    IMPORT,
    LEAST_DEADLINE_S,
    Ended,
    Kind,
    Order,
    Unit,
    read_transcript,
)
from loragate.mutants.warm import run_order, server_of_mutants

# beyond the longest deadline within the process, which writes its stacks then
_GRACE_S = 60.0
_COMPILE_LEG_S = 900.0
# of units, on sound code, before the compile leg
_FIRST_S = 30.0
_LAST_LINES = 6
COMPILE_LEG = "compile leg"
# what judged a process that crashed or hung
_OF_A_PROCESS = _AT_IMPORT, _IN_A_UNIT = ("import", "process")
# how faulthandler begins the stacks of a process that it ends
_TIMEOUT = "Timeout ("


@dataclass(slots=True, kw_only=True)
class Setup:
    """What all mutants of a run share. `known`: the file with the names of all host tests; `logs`:
    a folder; `gpu_cases`: what runs on a GPU in place of the units of `reach`; `kills` grows while
    mutants run."""

    reach: Reach
    known: Path
    logs: Path
    jobs: int = 2
    least_deadline_s: float = LEAST_DEADLINE_S
    gpu_cases: tuple[Unit, ...] = ()
    kills: list[Kill] = field(default_factory=list)

    @property
    def gpu(self) -> bool:
        return bool(self.gpu_cases)

    @property
    def sound_units(self) -> tuple[Unit, ...]:
        """What must pass without a mutant before any is planted. Reach was measured on sound code,
        so that without a GPU the quickest unit of each kind shows whether units run at all."""
        if self.gpu:
            return self.gpu_cases
        kinds = ([u for u in self.reach.units if u.kind is kind] for kind in Kind)
        return tuple(min(units, key=lambda unit: unit.seconds) for units in kinds if units)

    def units_of(self, mutant: Mutant, place: Place) -> tuple[Unit, ...]:
        """What may kill a mutant, in a good order."""
        if not self.gpu:
            units = self.reach.units_of(mutant.module, place)
        else:
            # of the cases that need a GPU it is known which sites reach the module
            sites = self.reach.sites_of(mutant.module)
            near = [unit for unit in self.gpu_cases if site_of(unit) in sites]
            units = tuple(near) or self.gpu_cases
        return ordered(units, mutant.module, mutant.function, list(self.kills))

    def cache_of(self, mutant: Mutant, place: Place, folder: Path) -> Path:
        """Of compiled kernels. A kernel is known by its code and that of its callees, but not by
        the constants of modules and the defaults of arguments."""
        in_code = place.lines is not None and mutant.line in place.lines
        return (self.logs if self.gpu and in_code else folder) / "triton-cache"


def run_all(
    mutants: Sequence[Mutant], texts: Mapping[str, str], setup: Setup
) -> Generator[tuple[Mutant, Result]]:
    """Each mutant with its result, as soon as that is known and in no order. Closing the generator
    ends what is running. `texts`: the sound modules by path."""
    processes = ProcessPool()
    servers: queue.SimpleQueue[WarmServer] = queue.SimpleQueue()
    for number in range(setup.jobs):
        log = setup.logs / f"server-{number}.txt"
        servers.put(server_of_mutants(processes, log, gpu=setup.gpu))

    def run(mutant: Mutant) -> tuple[Mutant, Result]:
        server = servers.get()
        try:
            return mutant, run_one(mutant, texts[mutant.module], setup, server, processes)
        finally:
            servers.put(server)

    with ThreadPoolExecutor(setup.jobs) as pool:
        try:
            for done in as_completed([pool.submit(run, mutant) for mutant in mutants]):
                yield done.result()
        finally:
            processes.close()
            pool.shutdown(cancel_futures=True)
            while not servers.empty():
                servers.get().close()


def run_one(
    mutant: Mutant, text: str, setup: Setup, server: WarmServer, processes: ProcessPool
) -> Result:
    """Never raises because of what was planted."""
    begin = time.monotonic()
    place = place_of(text, mutant.line, mutant.end_line)
    units = setup.units_of(mutant, place)
    with tempfile.TemporaryDirectory(prefix="loragate-mutant-") as name:
        folder = Path(name)
        plant(mutant, folder / "planted")
        cache = setup.cache_of(mutant, place, folder)
        compiles = not setup.gpu and mutant.module in setup.reach.compiled
        # what survives the first units may take minutes of others, where compiling takes seconds
        first, others = quick(units, _FIRST_S) if compiles else (units, ())
        try:
            ended = _killer(first, folder, cache, setup, server)
            if ended is None and compiles:
                ended = _compile_leg(folder, processes)
            if ended is None:
                ended = _killer(others, folder, cache, setup, server)
        except ServerDied as error:
            return Result(id=mutant.id, fate=Fate.BROKEN, message=str(error))
    seconds, count = round(time.monotonic() - begin, 1), len(units)
    if ended is None:
        fate = Fate.NEEDS_GPU if mutant.needs_gpu and not setup.gpu else Fate.SURVIVED
        return Result(id=mutant.id, fate=fate, units=count, seconds=seconds)
    setup.kills.append(Kill(mutant.module, mutant.function, ended.unit))
    return Result(
        id=mutant.id,
        fate=Fate.KILLED,
        killer=ended.unit,
        judge=ended.judge,
        kind=ended.kind or ended.verdict.value,
        message=_first_line(ended.message),
        units=count,
        seconds=seconds,
    )


def failure_of_sound_code(setup: Setup) -> str:
    """What fails without a mutant, or ""."""
    processes = ProcessPool()
    server = server_of_mutants(processes, setup.logs / "server-sound.txt", gpu=setup.gpu)
    with tempfile.TemporaryDirectory(prefix="loragate-mutant-") as name:
        folder = Path(name)
        plant(None, folder / "planted")
        try:
            cache = setup.logs / "triton-cache"
            ended, _ = _run_units(setup.sound_units, folder, cache, setup, server)
        except ServerDied as error:
            return str(error)
        finally:
            processes.close()
            server.close()
    return f"{ended.unit} fails without a mutant: {ended.message}" if ended else ""


def _killer(
    units: Sequence[Unit], folder: Path, cache: Path, setup: Setup, server: WarmServer
) -> Ended | None:
    """The first unit that fails the gate because of the mutant. One that fails on sound code as
    well, in a process that has run the same units, fails because of what these leave behind, and
    kills nothing. Raises ServerDied."""
    while True:
        ended, ran = _run_units(units, folder, cache, setup, server)
        if ended is None or ended.judge in _OF_A_PROCESS or len(ran) < 2:
            return ended
        alone = [unit for unit in ran if unit.name == ended.unit]
        if not alone or _run_units(alone, folder, cache, setup, server)[0] is not None:
            return ended
        if ended.unit != _failing_on_sound_code(ran, folder, setup, server):
            return ended
        units = [unit for unit in units if unit.name != ended.unit]


def _failing_on_sound_code(
    units: Sequence[Unit], folder: Path, setup: Setup, server: WarmServer
) -> str:
    with tempfile.TemporaryDirectory(prefix="sound-", dir=folder) as name:
        plant(None, Path(name) / "planted")
        ended, _ = _run_units(units, Path(name), setup.logs / "triton-cache", setup, server)
    return ended.unit if ended else ""


def _run_units(
    units: Sequence[Unit], folder: Path, cache: Path, setup: Setup, server: WarmServer
) -> tuple[Ended | None, list[Unit]]:
    """What fails the gate, or None, and the units that have run. Raises ServerDied."""
    if not units:
        return None, []
    transcript = folder / "transcript.jsonl"
    # of an earlier process
    transcript.unlink(missing_ok=True)
    order = Order(
        root=str(folder / "planted"),
        transcript=str(transcript),
        log=str(folder / "log.txt"),
        units=tuple(units),
        known=str(setup.known),
        cache=str(cache),
        least_deadline_s=setup.least_deadline_s,
    )
    patience = max(unit.deadline_s(setup.least_deadline_s) for unit in units) + _GRACE_S
    failure = run_order(server, order, patience)
    story = read_transcript(transcript)
    through = {ended.unit for ended in story.ended}
    ran = [unit for unit in units if unit.name in through]
    failed = next((ended for ended in story.ended if ended.fails_gate), None)
    if failed is not None or (failure is None and story.finished):
        return failed, ran
    if failure is Failure.CRASH and _TIMEOUT in _text(folder / "planted" / "stacks.txt"):
        failure = Failure.HANG
    if not story.current:
        raise ServerDied(f"the process ended between two units: {_last(folder / 'log.txt')}")
    ended = Ended(
        unit=story.current,
        verdict=Verdict.FAIL,
        judge=_AT_IMPORT if story.current == IMPORT else _IN_A_UNIT,
        kind=(failure or Failure.CRASH).value,
        message=_last(folder / "log.txt"),
    )
    return ended, ran


def _compile_leg(folder: Path, processes: ProcessPool) -> Ended | None:
    """The compile leg of the gate on the planted package; it compiles what has changed."""
    log = folder / "compile.txt"
    environment = environment_of_forks(gpu=True)
    path = os.pathsep.join([str(folder / "planted" / "kernels"), environment["PYTHONPATH"]])
    begin = time.monotonic()
    with log.open("wb") as output:
        child = processes.start(
            python_module("loragate.compile_leg"),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment | {"PYTHONPATH": path},
            cwd=folder,
        )
        try:
            code = child.wait(_COMPILE_LEG_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            processes.end(child)
    if code == 0:
        return None
    lines = [line for line in _text(log).splitlines() if not line.startswith("pass:")]
    return Ended(
        unit=COMPILE_LEG,
        verdict=Verdict.FAIL,
        judge=COMPILE_LEG,
        kind=Failure.HANG.value if code is None else f"exit code {code}",
        message=next((line for line in lines if ":" in line and "compile leg:" not in line), ""),
        seconds=time.monotonic() - begin,
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _last(log: Path) -> str:
    fatal = [line for line in _text(log).splitlines() if line.startswith("Fatal Python error")]
    if fatal:
        return fatal[-1]
    # the last line of a traceback says most
    return " | ".join(reversed(_text(log).strip().splitlines()[-_LAST_LINES:]))


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:500]
