"""`bench moe`: runs the tables one after the other, after compiling their kernels in parallel."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from typing import TypeVar

import torch

from loragate.bench.contender import Contender, find_contender
from loragate.bench.moe_delta import measure_aligns, measure_deltas
from loragate.bench.moe_figures import (
    AlignFigures,
    DeltaFigures,
    LayerFigures,
    MoEFigures,
    MoEMeasured,
)
from loragate.bench.moe_layer import measure_layers
from loragate.bench.moe_rows import PROJECTIONS, RANKS, AlignRow, DeltaRow, LayerRow, MoERow
from loragate.bench.timer import Clock, copy_bytes_per_s, in_turns
from loragate.core.machine import Machine, detect_machine
from loragate.subjects.vllm.package import headline

# up to this many rows, starting processes takes longer than compiling one after the other
_FEW = 8
# each takes a few GB of device memory
_MOST_PROCESSES = 16
_Key = TypeVar("_Key", bound=Hashable)


def run_moe(
    candidate: Contender,
    baseline: Contender | None,
    rows: Sequence[MoERow],
    machine: Machine,
    progress: Callable[[str], None],
) -> MoEFigures:
    """Measure `rows`. Raises WrongResult for a subject with a wrong result, and
    Unavailable for one that does not support them."""
    for contender in filter(None, (candidate, baseline)):
        for projection in PROJECTIONS:
            contender.require(DeltaRow(projection, max(RANKS), 1).case)
    names = [candidate.subject.name, *([baseline.subject.name] if baseline else [])]
    if len(rows) > _FEW:
        progress("compiling")
        for error in compile_in_parallel(names, rows):
            progress(f"not compiled ahead: {error}")
        progress("measuring")
    copied = copy_bytes_per_s()
    measured = []
    for figures in measure(candidate, baseline, rows, machine, in_turns, progress):
        measured.append(figures)
        progress(f"[{len(measured)}/{len(rows)}] {_line(figures)}")
    return MoEFigures(names[0], names[1] if baseline else None, copied, tuple(measured))


def measure(
    candidate: Contender,
    baseline: Contender | None,
    rows: Sequence[MoERow],
    machine: Machine,
    clock: Clock,
    progress: Callable[[str], None],
) -> Iterator[MoEMeasured]:
    """Raises WrongResult."""
    contenders = [candidate, *([baseline] if baseline else [])]
    deltas = [row for row in rows if isinstance(row, DeltaRow)]
    aligns = [row for row in rows if isinstance(row, AlignRow)]
    layers = [row for row in rows if isinstance(row, LayerRow)]
    return chain(
        measure_deltas(deltas, contenders, machine, clock),
        measure_aligns(aligns, contenders, machine, clock),
        measure_layers(layers, candidate, baseline, machine, clock, progress),
    )


def compile_in_parallel(names: Sequence[str], rows: Sequence[MoERow]) -> tuple[str, ...]:
    """Compile the kernels of the rows into Triton's cache. Returns errors without raising: they
    occur again when the row is measured, or they were a lack of memory."""
    processes = min(_MOST_PROCESSES, os.cpu_count() or 1, len(rows))
    # a forked process cannot use CUDA
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        futures = [(row, pool.submit(_compile, names, row)) for row in rows]
        ends = [(row, future.exception() or future.result()) for row, future in futures]
    return tuple(f"{row.id}: {error}" for row, error in ends if error)


def _compile(names: Sequence[str], row: MoERow) -> str | None:
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


def _line(figures: MoEMeasured) -> str:
    name = figures.row.id
    if isinstance(figures, DeltaFigures):
        best = {who: min(of.launch_us.values()) for who, of in figures.subjects.items()}
        times = ", ".join(f"{who} {us:.1f}" for who, us in best.items())
        return f"{name}: floor {figures.floor_us:.1f}, {times}"
    if isinstance(figures, AlignFigures):
        return f"{name}: " + ", ".join(f"{who} {us:.1f}" for who, us in figures.us.items())
    assert isinstance(figures, LayerFigures)
    return f"{name}: base {figures.base_us:.1f}, LoRA adds {figures.added:.0%}"
