"""`bench streams`: runs its tables, after compiling their kernels in parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from loragate.bench.compiling import compile_ahead
from loragate.bench.contender import Contender
from loragate.bench.streams_figures import StreamFigures
from loragate.bench.streams_gdn import measure_gdns
from loragate.bench.streams_linear import measure_linears
from loragate.bench.streams_measured import LinearFigures, StreamMeasured
from loragate.bench.streams_moe import measure_moes
from loragate.bench.streams_rows import (
    SINGLE_STREAM_FORMS,
    GDNRow,
    LinearRow,
    MoERow,
    StreamRow,
)
from loragate.bench.timer import Clock, in_turns
from loragate.core.machine import Machine


def run_streams(
    candidate: Contender,
    baseline: Contender | None,
    rows: Sequence[StreamRow],
    machine: Machine,
    progress: Callable[[str], None],
) -> StreamFigures:
    """Measure `rows`. Raises WrongResult for a subject with a wrong result, and Unavailable for
    one that does not support them."""
    names = [candidate.subject.name, *([baseline.subject.name] if baseline else [])]
    for row in rows:
        candidate.require(row.case)
        if baseline and isinstance(row, LinearRow):
            baseline.require(row.case)
    compile_ahead(measure, names, rows, progress)
    measured = []
    for figures in measure(candidate, baseline, rows, machine, in_turns, progress):
        measured.append(figures)
        progress(f"[{len(measured)}/{len(rows)}] {_line(figures)}")
    return StreamFigures(names[0], names[1] if baseline else None, tuple(measured))


def measure(
    candidate: Contender,
    baseline: Contender | None,
    rows: Sequence[StreamRow],
    machine: Machine,
    clock: Clock,
    progress: Callable[[str], None],
) -> Iterator[StreamMeasured]:
    """Raises WrongResult."""
    linears = [row for row in rows if isinstance(row, LinearRow)]
    gdns = [row for row in rows if isinstance(row, GDNRow)]
    moes = [row for row in rows if isinstance(row, MoERow)]
    return chain(
        measure_linears(linears, candidate, baseline, machine, clock, progress),
        measure_gdns(gdns, candidate, machine, clock),
        measure_moes(moes, candidate, machine, clock),
    )


def _line(figures: StreamMeasured) -> str:
    forms, name = figures.forms, figures.row.id
    if not isinstance(figures, LinearFigures):
        times = ", ".join(f"{form} {us:.1f}" for form, us in forms.us.items())
        return f"{name}: {times}, planned ({forms.chosen}) {forms.planned_us:.1f}"
    single = forms.fastest(SINGLE_STREAM_FORMS) - figures.base_us
    line = f"{name}: base {figures.base_us:.1f}, one stream +{single:.1f}"
    line += f", two +{figures.dual_added_us:.1f}, planned +{figures.planned_added_us:.1f}"
    theirs = figures.baseline_added_us
    return line if theirs is None else f"{line}, baseline with two +{theirs:.1f}"
