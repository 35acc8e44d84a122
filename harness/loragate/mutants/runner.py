"""Plants one mutant at a time and job, each in a process and a checkout of its own.

Invariant: whatever a planted process does - hang, die, or write nonsense - no other mutant loses
its result, and no process or file is left behind, not even when the command is interrupted.
"""

from __future__ import annotations

import queue
import tempfile
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from loragate.core.child_process import ProcessPool
from loragate.core.warm_server import ServerDied, WarmServer
from loragate.mutants.killing import (
    NotSound,
    Planted,
    check_compile_leg,
    killing_compile_leg,
    killing_unit,
)
from loragate.mutants.model import Fate, Mutant, Result
from loragate.mutants.ordering import Kill, quick
from loragate.mutants.planting import plant
from loragate.mutants.setup import Setup
from loragate.mutants.sources import place_of
from loragate.mutants.units import Ended, Unit
from loragate.mutants.warm import server_of_mutants

# of units, on sound code, before the compile leg
_FIRST_S = 30.0


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
        try:
            ended = _killer(
                units, Planted(folder, cache, setup, server, processes), setup.compiles(mutant)
            )
        except (NotSound, ServerDied) as error:
            return Result(id=mutant.id, fate=Fate.BROKEN, message=_first_line(str(error)))
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


def _killer(units: Sequence[Unit], planted: Planted, compiles: bool) -> Ended | None:
    """Raises NotSound and ServerDied."""
    if not compiles:
        return killing_unit(units, planted)
    # what survives the first units may take minutes of others, where compiling takes seconds
    first, others = quick(units, _FIRST_S)
    return (
        killing_unit(first, planted)
        or killing_compile_leg(planted)
        or killing_unit(others, planted)
    )


def failure_of_sound_code(setup: Setup, mutants: Iterable[Mutant] = ()) -> str:
    """What fails without a mutant, or "". The compile leg runs if it may kill one of `mutants`."""
    processes = ProcessPool()
    server = server_of_mutants(processes, setup.logs / "server-sound.txt", gpu=setup.gpu)
    with tempfile.TemporaryDirectory(prefix="loragate-mutant-") as name:
        cache = setup.logs / "triton-cache"
        planted = Planted(Path(name), cache, setup, server, processes)
        plant(None, planted.folder / "planted")
        try:
            ended, _ = planted.run(setup.sound_units)
            if ended is None and any(setup.compiles(mutant) for mutant in mutants):
                check_compile_leg(planted)
        except (NotSound, ServerDied) as error:
            return str(error)
        finally:
            processes.close()
            server.close()
    return f"{ended.unit} fails without a mutant: {ended.message}" if ended else ""


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:500]
