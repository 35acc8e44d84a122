"""`bench graphs`: what a captured decode step costs, on the device, on the host and in memory.

The sum of the times of its kernels is that of the profiler, in another process, over replays of the
same step right behind those that are timed. The host's work is a step of the graph runner, from the
mapping on the CPU to the queued replay, and it is told apart from the call that launches the graph,
which is CUDA's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from statistics import median

import torch

from loragate.bench.contender import Contender, Unavailable
from loragate.bench.graphs_figures import (
    GraphFigures,
    GraphMeasured,
    MemoryFigures,
    ReplayFigures,
)
from loragate.bench.graphs_host import host_turns
from loragate.bench.graphs_profile import Profiler, profiler
from loragate.bench.graphs_rows import (
    MAX_TOKENS,
    SLOTS,
    GraphRow,
    HostRow,
    MemoryRow,
    ReplayRow,
)
from loragate.bench.graphs_step import WARM_UP, captured_step, decode_model
from loragate.bench.lorakernels_decode import DecodeSteps
from loragate.bench.timer import Clock
from loragate.core.machine import Machine
from loragate.core.verdict import ExitCode

_REPLAYS = 50


def run_graphs(
    candidate: Contender,
    baseline: Contender | None,
    rows: Sequence[GraphRow],
    machine: Machine,
    progress: Callable[[str], None],
) -> GraphFigures:
    """Measure `rows`. Raises Unavailable for another subject."""
    if candidate.subject.name != "lorakernels":
        raise Unavailable(f"{candidate.subject.name} has no graph runner", ExitCode.USAGE)
    found: dict[GraphRow, GraphMeasured] = {}
    with profiler() as profile:
        for _, of_a_model in groupby(rows, key=lambda row: row.model):
            # one model at a time: not all of them fit beside each other on every device
            for measured in _measure(list(of_a_model), machine, profile):
                found[measured.row] = measured
                progress(f"[{len(found)}/{len(rows)}] {measured.row.id}")
            torch.cuda.empty_cache()
    return GraphFigures(candidate.subject.name, tuple(found[row] for row in rows))


@dataclass(frozen=True, slots=True)
class StepTime:
    """Microseconds of a captured step on the device."""

    row: ReplayRow
    step_us: float


def measure(
    candidate: Contender,
    baseline: Contender | None,
    rows: Sequence[ReplayRow],
    machine: Machine,
    clock: Clock,
    progress: Callable[[str], None],
) -> Iterator[StepTime]:
    """The steps of the rows, which `clock` captures: what two builds are compared by. The time of
    the host and the memory that is reserved are no times of a device."""
    for row in rows:
        yield _step_time(row, decode_model(row.model, SLOTS, machine), clock)
        if machine.device == "cuda":
            torch.cuda.empty_cache()


@torch.no_grad()
def _step_time(row: ReplayRow, model: DecodeSteps, clock: Clock) -> StepTime:
    slots = torch.tensor(row.token_slots, dtype=torch.int32)
    with model.adapters():
        model.inputs.write(slots, {"ids": torch.arange(row.tokens)})
        model.buffers.batch.prepare(slots)
        step = partial(model.step, row.tokens)
        # a clock that times nothing compiles the kernels
        step()
        return StepTime(row, clock({"step": step})["step"])


@torch.no_grad()
def _measure(
    rows: Sequence[GraphRow], machine: Machine, profile: Profiler
) -> Iterator[GraphMeasured]:
    """The rows of one model. The host's turns are spread over the whole time that the others
    take."""
    hosts = [row for row in rows if isinstance(row, HostRow)]
    models = [decode_model(row.model, row.slots, machine) for row in hosts]
    with host_turns(hosts, models) as turns:
        for row in rows:
            if not isinstance(row, HostRow):
                turns.take()
                yield _measure_one(row, machine, profile)
                torch.cuda.empty_cache()
        yield from turns.figures()


def _measure_one(row: ReplayRow | MemoryRow, machine: Machine, profile: Profiler) -> GraphMeasured:
    if isinstance(row, ReplayRow):
        return _replay(row, machine, profile)
    return _memory(row, machine)


def _replay(row: ReplayRow, machine: Machine, profile: Profiler) -> ReplayFigures:
    with captured_step(row, machine) as graph:
        replay_us = _device_us(graph.replay)
    return ReplayFigures(row, replay_us, profile(row, machine))


def _device_us(launch: Callable[[], None]) -> float:
    """Microseconds of one of many launches that are queued behind each other."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    times: list[float] = []
    for _ in range(WARM_UP):
        start.record()
        for _ in range(_REPLAYS):
            launch()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / _REPLAYS)
    return median(times)


def _memory(row: MemoryRow, machine: Machine) -> MemoryFigures:
    """What a step of the largest batch needs with adapters, beyond one of base rows: their buffers,
    and what else is in use at the peak."""
    model = decode_model(row.model, SLOTS, machine)
    slots = torch.arange(MAX_TOKENS, dtype=torch.int32) % SLOTS
    peaks = []
    with model.adapters():
        for mapping in (slots, torch.full_like(slots, -1)):
            model.inputs.write(mapping, {"ids": torch.arange(MAX_TOKENS)})
            model.buffers.batch.prepare(mapping)
            # whatever is made on first use
            model.step(MAX_TOKENS)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model.step(MAX_TOKENS)
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated() - before)
    used = model.allocated + peaks[0] - peaks[1]
    return MemoryFigures(row, model.buffers.num_bytes, used)
