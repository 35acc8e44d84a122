"""Compiles the kernels of many rows in parallel, before they are measured one after the other."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Protocol, TypeVar

import torch

from loragate.bench.contender import Contender, find_contender
from loragate.bench.select import Row
from loragate.bench.timer import Clock
from loragate.core.machine import Machine, detect_machine
from loragate.subjects.vllm.package import headline

# up to this many rows, starting processes takes longer than compiling one after the other
_FEW = 8
# each takes a few GB of device memory
_MOST_PROCESSES = 16
_Key = TypeVar("_Key", bound=Hashable)


class Measure(Protocol):
    """A function of a module, which another process can find by its name."""

    def __call__(
        self,
        candidate: Contender,
        baseline: Contender | None,
        rows: Sequence[Any],
        machine: Machine,
        clock: Clock,
        progress: Callable[[str], None],
    ) -> Iterator[object]: ...


def compile_ahead(
    measure: Measure, names: Sequence[str], rows: Sequence[Row], progress: Callable[[str], None]
) -> None:
    """Compile the kernels of the rows, unless they are few; `names` are those of the candidate and
    of the baseline, if there is one."""
    if len(rows) <= _FEW:
        return
    progress("compiling")
    for error in compile_in_parallel(measure, names, rows):
        progress(f"not compiled ahead: {error}")
    progress("measuring")


def compile_in_parallel(
    measure: Measure, names: Sequence[str], rows: Sequence[Row]
) -> tuple[str, ...]:
    """Compile the kernels of the rows into Triton's cache. Returns errors without raising: they
    occur again when the row is measured, or they were a lack of memory."""
    processes = min(_MOST_PROCESSES, os.cpu_count() or 1, len(rows))
    # a forked process cannot use CUDA
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        futures = [(row, pool.submit(_compile, measure, names, row)) for row in rows]
        ends = [(row, future.exception() or future.result()) for row, future in futures]
    return tuple(f"{row.id}: {error}" for row, error in ends if error)


def _compile(measure: Measure, names: Sequence[str], row: Row) -> str | None:
    """The error as text: an exception of a compiler may not be picklable, which would break the
    whole pool."""
    try:
        candidate, *others = map(find_contender, names)
        baseline = others[0] if others else None
        for _ in measure(candidate, baseline, [row], detect_machine(), _once, _ignore):
            torch.cuda.synchronize()
        # the other processes need the memory as well
        torch.cuda.empty_cache()
    except Exception as error:
        return headline(error)
    return None


def _ignore(line: str) -> None:
    """Drops the progress of a compilation; the measurement prints it again."""


def _once(calls: Mapping[_Key, Callable[[], object]]) -> dict[_Key, float]:
    """The Clock of a compilation: every call already ran when its result was checked."""
    return dict.fromkeys(calls, 0.0)
