"""`bench engine`: what adapters cost in a whole engine of vLLM, with its own kernels and with the
plug-in.

Three engines of a model run beside each other, each in a process of its own, and are timed in
turns. They are started at the same time, which takes most of the time that the benchmark needs.

Invariant: no time is reported of an engine whose adapters were served by anything but the kernels
that it is named after.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import cast

from loragate.bench.contender import Contender, Unavailable
from loragate.bench.engine_figures import (
    EngineFigures,
    EngineRowFigures,
    KernelCounts,
    ServedFigures,
)
from loragate.bench.engine_folders import write_adapter, write_model
from loragate.bench.engine_rows import LAYERS, EngineRow, Serving, Work
from loragate.bench.engine_setup import order_of
from loragate.bench.graphs_rows import MODELS, RANK
from loragate.core.machine import Machine
from loragate.core.verdict import ExitCode
from loragate.engine.process import EngineError, EngineProcess

_TARGETS = "loragate.bench.engine_served"
# prompts wait for the host, whose speed changes from one second to the next: the same load of an
# engine took 585 to 676 ms within a minute. A step of a graph does not
ROUNDS = MappingProxyType({Work.DECODE: 5, Work.PREFILL: 15, Work.SERVE: 15})
# of all that a process does
_DEADLINE_S = 900.0
Progress = Callable[[str], None]


class TimedProcess(EngineProcess):
    """A loragate.bench.engine_served.TimedEngine in its process. A call raises EngineError."""

    methods = ("prepare", "kernel_counts", "replay_us", "measure", "close")

    def prepare(self, adapter: Path, rows: Sequence[EngineRow]) -> None:
        self._call("prepare", adapter, tuple(rows))

    def kernel_counts(self) -> KernelCounts:
        return cast(KernelCounts, self._call("kernel_counts"))

    def replay_us(self, row: EngineRow) -> float:
        return cast(float, self._call("replay_us", row))

    def measure(self, row: EngineRow) -> float:
        return cast(float, self._call("measure", row))


@dataclass(frozen=True, slots=True)
class _Ready:
    engine: TimedProcess
    start_s: float


def run_engine(
    candidate: Contender,
    baseline: Contender | None,
    rows: Sequence[EngineRow],
    machine: Machine,
    progress: Progress,
) -> EngineFigures:
    """Measure `rows`. Raises Unavailable for other subjects, for an engine that fails, and for one
    that was served by other kernels than it should."""
    _require(candidate, baseline)
    measured: list[EngineRowFigures] = []
    engines: list[ServedFigures] = []
    try:
        for model in dict.fromkeys(row.model for row in rows):
            own = [row for row in rows if row.model == model]
            found, served = _measure_model(model, own, progress)
            measured += found
            engines += served
    except EngineError as error:
        raise Unavailable(str(error), ExitCode.INFRASTRUCTURE) from error
    return EngineFigures(Serving.LORAKERNELS, Serving.VLLM, tuple(measured), tuple(engines))


def _require(candidate: Contender, baseline: Contender | None) -> None:
    if candidate.subject.name != Serving.LORAKERNELS:
        raise Unavailable(f"{candidate.subject.name} is no plug-in of vLLM", ExitCode.USAGE)
    if baseline is None:
        message = "engines are those of vLLM, with its own kernels as the baseline"
        raise Unavailable(message, ExitCode.USAGE)


def _measure_model(
    model: str, rows: Sequence[EngineRow], progress: Progress
) -> tuple[list[EngineRowFigures], list[ServedFigures]]:
    with tempfile.TemporaryDirectory(prefix="loragate-engine-") as path:
        folder = Path(path)
        write_model(folder / model, MODELS[model], LAYERS[model])
        write_adapter(folder / "adapter", MODELS[model], LAYERS[model], rank=RANK)
        progress(f"{model}: starting three engines of {LAYERS[model]} layers")
        with _engines(folder, model, rows) as ready:
            served = [
                ServedFigures(model, serving, one.start_s, one.engine.kernel_counts())
                for serving, one in ready.items()
            ]
            _check(served)
            progress(", ".join(f"{one.serving} after {one.start_s:.0f} s" for one in served))
            return _time({s: one.engine for s, one in ready.items()}, rows, progress), served


def _check(served: Sequence[ServedFigures]) -> None:
    for one in served:
        if one.problem is not None:
            raise Unavailable(one.problem, ExitCode.INFRASTRUCTURE)


@contextmanager
def _engines(
    folder: Path, model: str, rows: Sequence[EngineRow]
) -> Iterator[dict[Serving, _Ready]]:
    """Three engines that are ready to be timed; all of them have ended afterwards, also if one
    cannot be started. Raises EngineError."""
    with ExitStack() as stack:
        with ThreadPoolExecutor(len(Serving)) as pool:
            starts = {s: pool.submit(_start, s, folder, model, rows) for s in Serving}
        ready = {s: start.result() for s, start in starts.items() if _has_result(start)}
        for one in ready.values():
            stack.enter_context(one.engine)
        for start in starts.values():
            # raises the error of one that was not started
            start.result()
        yield ready


def _has_result(start: Future[_Ready]) -> bool:
    return start.exception() is None


def _start(serving: Serving, folder: Path, model: str, rows: Sequence[EngineRow]) -> _Ready:
    begin = time.monotonic()
    engine = TimedProcess(
        f"{_TARGETS}:{serving}",
        order_of(folder / model),
        deadline_s=_DEADLINE_S,
        log=folder / f"{serving}.log",
    )
    with ExitStack() as stack:
        stack.push(engine)
        engine.prepare(folder / "adapter", rows)
        # it goes on
        stack.pop_all()
    return _Ready(engine, time.monotonic() - begin)


def _time(
    engines: Mapping[Serving, TimedProcess], rows: Sequence[EngineRow], progress: Progress
) -> list[EngineRowFigures]:
    """The median of rounds, in which the engines take turns for each row."""
    replays = {
        row: {serving: engine.replay_us(row) for serving, engine in engines.items()}
        for row in rows
        if row.work is Work.DECODE
    }
    found = []
    for row in rows:
        times: dict[Serving, list[float]] = {serving: [] for serving in engines}
        for number in range(ROUNDS[row.work]):
            for serving in _rotated(list(engines), number):
                times[serving].append(engines[serving].measure(row))
        us = {serving: median(measured) for serving, measured in times.items()}
        found.append(EngineRowFigures(row, us, replays.get(row, {})))
        progress(f"{row.id}: " + ", ".join(f"{s} {time_us:.3f} us" for s, time_us in us.items()))
    return found


def _rotated(items: list[Serving], by: int) -> list[Serving]:
    by %= len(items)
    return items[by:] + items[:by]
