"""The times of the kernels of a captured step, as the profiler has them.

The profiler runs in a process of its own. CUPTI stays attached to a process that was profiled once,
and goes on taking time in each of its launches and copies (pytorch #144455): on an H200 the host
took twice as long for a step behind the first profile as before it.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import torch

from loragate.bench.graphs_rows import ReplayRow
from loragate.bench.graphs_step import captured_step
from loragate.core.machine import Machine

_REPLAYS = 50

# microseconds of all kernels of the step of a row
Profiler = Callable[[ReplayRow, Machine], float]


@contextmanager
def profiler() -> Iterator[Profiler]:
    """Sums the times of the kernels of steps while nothing else runs in this process. An error of
    the other process is raised here."""
    # a forked process cannot use CUDA
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        yield lambda row, machine: pool.submit(_profile, row, machine).result()


@torch.no_grad()
def _profile(row: ReplayRow, machine: Machine) -> float:
    """The times of all kernels, copies and fills of one replay, added up."""
    with captured_step(row, machine) as graph:
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(_REPLAYS):
                graph.replay()
            torch.cuda.synchronize()
    # the other process needs the memory as well
    torch.cuda.empty_cache()
    events = [event for event in profile.events() if event.device_type.name == "CUDA"]
    return sum(float(event.time_range.elapsed_us()) for event in events) / _REPLAYS
