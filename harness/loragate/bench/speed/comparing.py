"""`bench KIND --against REV`: opens the processes of both builds, and judges the rows.

Invariant: one measurement is not enough for a change, because where the memory of a process lies
lasts as long as the process. A change that the first one shows is looked for by new processes. A
call whose processes are too far apart to be judged is measured by more of them, and then judged by
all together, with a chance of a false alarm that allows for each of these judgements.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loragate.bench.kinds import KINDS
from loragate.bench.speed.builds import Build, build_against, installed_build
from loragate.bench.speed.figures import SpeedFigures
from loragate.bench.speed.lanes import ProcessLane
from loragate.bench.speed.orders import Begin
from loragate.bench.speed.resources import compare_resources
from loragate.bench.speed.rounds import (
    FEWEST_PROCESSES,
    MOST_PROCESSES,
    NO_CONTROLS,
    Controls,
    Lanes,
    sample_row,
)
from loragate.bench.speed.statistics import Change, Comparison, Samples, compare, confirmed
from loragate.core.checkout import project_root
from loragate.core.child_process import ProcessPool, python_module
from loragate.core.gpus import (
    HOST_BUDGET_BYTES,
    DriverError,
    free_bytes_of,
    list_gpus,
    visible_gpus,
    workers_that_fit,
)
from loragate.core.host import free_host_bytes
from loragate.core.machine import Machine
from loragate.core.plural import counted

_WORKER = "loragate.bench.speed.worker"
# with three times the processes chance moves a call by 0.6 of what it did
_MOST_AGAIN = 2

# a row and a call of it
_Key = tuple[str, str]
Progress = Callable[[str], None]
# new processes of both builds for the rows with these ids
OpenLanes = Callable[[Sequence[str]], AbstractContextManager[Lanes]]


@dataclass(frozen=True, slots=True)
class Request:
    """The rows of a kind, by id in the order of its table, and the seed of the table if it has
    one."""

    kind: str
    rows: tuple[str, ...]
    seed: int | None
    against: str


def compare_builds(request: Request, machine: Machine, progress: Progress) -> SpeedFigures:
    """Measure the rows with the present build and with the one that `against` names.

    Raises ValueError for a build that cannot be found, CommandError for one that cannot be
    measured.
    """
    with tempfile.TemporaryDirectory(prefix="loragate-builds-") as folder:
        before = build_against(request.against, project_root(), Path(folder) / "before")
        builds = (before, installed_build(Path(folder) / "now"))
        cache = _cache_folder()
        opener = _Opener(request, builds, cache)
        opener.compile(progress)
        found = judge_rows(request.rows, opener.open, progress, KINDS[request.kind].controls)
        progress("resources")
        resources = compare_resources(builds, machine, cache)
    return SpeedFigures(request.kind, request.against, found, resources)


def judge_rows(
    rows: Sequence[str],
    open_lanes: OpenLanes,
    progress: Progress,
    controls: Controls = NO_CONTROLS,
) -> tuple[Comparison, ...]:
    """One result for each call of each row but the controls, in their order."""
    first = _sample(rows, open_lanes, progress, controls)
    found = {_key(item): item for item in compare(first)}
    known = {_key(item): item for item in first}
    changed = {key for key in known if found[key].change in (Change.SLOWER, Change.FASTER)}
    open_calls = {key for key in known if found[key].change is Change.UNDECIDED}
    for _ in range(_MOST_AGAIN):
        wanted = {row for row, _ in changed | open_calls}
        if not wanted:
            break
        progress(f"{counted(len(wanted), 'row')} measured once more: changed or undecided")
        again = _sample([row for row in rows if row in wanted], open_lanes, progress, controls)
        more = {_key(item): item for item in again}
        for item in compare([more[key] for key in known if key in changed], others=first):
            found[_key(item)] = confirmed(found[_key(item)], item)
        known |= {key: known[key].with_more(more[key]) for key in open_calls}
        for item in _judged_together(known, open_calls, first):
            found[_key(item)] = item
        open_calls = {key for key in open_calls if found[key].change is Change.UNDECIDED}
        changed = set()
    return tuple(found.values())


def _judged_together(
    known: Mapping[_Key, Samples], keys: Collection[_Key], first: Sequence[Samples]
) -> tuple[Comparison, ...]:
    """Calls with the processes of all measurements. `first`: of the first one, all calls."""
    joined = [known[key] for key in known if key in keys]
    others = [item for item in first if _key(item) not in keys]
    # each judgement could raise an alarm, and no other measurement confirms it
    return compare(joined, others=others, judgements=len(first) * _MOST_AGAIN)


def _key(item: Samples | Comparison) -> _Key:
    return item.row, item.call


def _sample(
    rows: Sequence[str], open_lanes: OpenLanes, progress: Progress, controls: Controls
) -> tuple[Samples, ...]:
    generator = np.random.default_rng(len(rows))
    found: list[Samples] = []
    with open_lanes(rows) as lanes:
        for number, row in enumerate(rows, start=1):
            found += sample_row(row, lanes, generator, controls)
            progress(f"[{number}/{len(rows)}] {row}")
    return tuple(found)


class _Opener:
    """Starts the processes of both builds."""

    def __init__(self, request: Request, builds: Sequence[Build], cache: Path) -> None:
        self._request, self._builds, self._cache = request, builds, cache
        # asked once: the noise of all measurements of a run is pooled
        self._count = processes_of_each(KINDS[request.kind].process_bytes, os.environ)

    def compile(self, progress: Progress) -> None:
        """Compile the kernels of each build once, before its processes need them: one build after
        the other, since a process of each row, which is what compiles, has its own memory."""
        for build in self._builds:
            progress(f"compiling {build.name}")
            with self._started([build], self._request.rows, compiles=True) as lanes:
                lanes[0].calls()

    @contextmanager
    def open(self, rows: Sequence[str]) -> Iterator[Lanes]:
        count = self._count
        builds = [build for build in self._builds for _ in range(count)]
        with self._started(builds, rows, compiles=False) as lanes:
            yield [lanes[:count], lanes[count:]]

    @contextmanager
    def _started(
        self, builds: Sequence[Build], rows: Sequence[str], *, compiles: bool
    ) -> Iterator[list[ProcessLane]]:
        """A process of each of `builds`; none of them outlives the context."""
        pool, lanes = ProcessPool(), list[ProcessLane]()
        try:
            for build in builds:
                lanes.append(self._start(build, pool, rows, compiles=compiles))
            yield lanes
        finally:
            for lane in lanes:
                lane.end()

    def _start(
        self, build: Build, pool: ProcessPool, rows: Sequence[str], *, compiles: bool
    ) -> ProcessLane:
        command = python_module(_WORKER, self._request.kind, str(build.folder))
        begin = Begin(tuple(rows), self._request.seed, compiles)
        environ = build.environment(os.environ, self._cache)
        return ProcessLane(build.name, command, begin, pool, environ)


def processes_of_each(process_bytes: int, environ: Mapping[str, str]) -> int:
    """Of two builds, how many processes fit on the GPU, which is the first visible one, and into
    the memory of the host; the fewest where the driver says nothing of the GPU."""
    try:
        listed = list_gpus(environ)
    except DriverError:
        return FEWEST_PROCESSES
    (gpu, *_) = visible_gpus(environ, listed) or ("",)
    on_gpu = workers_that_fit(free_bytes_of(gpu, listed), process_bytes)
    fitting = min(on_gpu, free_host_bytes() // HOST_BUDGET_BYTES) // 2
    return max(FEWEST_PROCESSES, min(MOST_PROCESSES, fitting))


def _cache_folder() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir)
