"""`bench moe`: runs the tables one after the other, after compiling their kernels in parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

from loragate.bench.compiling import compile_ahead
from loragate.bench.contender import Contender
from loragate.bench.moe_align import measure_aligns, measure_experts
from loragate.bench.moe_delta import measure_deltas
from loragate.bench.moe_figures import (
    AlignFigures,
    DeltaFigures,
    ExpertsFigures,
    LayerFigures,
    MoEFigures,
    MoEMeasured,
)
from loragate.bench.moe_layer import measure_layers
from loragate.bench.moe_rows import (
    FEW_EXPERTS,
    MANY_EXPERTS,
    AlignRow,
    DeltaRow,
    ExpertsRow,
    LayerRow,
    MoERow,
    deltas_of,
)
from loragate.bench.timer import Clock, copy_bytes_per_s, in_turns, in_turns_cold
from loragate.core.machine import Machine


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
        for row in rows:
            for delta in deltas_of(row):
                contender.require(delta.case)
    names = [candidate.subject.name, *([baseline.subject.name] if baseline else [])]
    compile_ahead(measure, names, rows, progress)
    copied = copy_bytes_per_s()
    measured = []
    found = measure(candidate, baseline, rows, machine, in_turns, progress, cold=in_turns_cold)
    for figures in found:
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
    *,
    cold: Clock | None = None,
) -> Iterator[MoEMeasured]:
    """`cold`: of deltas, the time with nothing in the cache. Raises WrongResult."""
    contenders = [candidate, *([baseline] if baseline else [])]
    deltas = [row for row in rows if isinstance(row, DeltaRow)]
    aligns = [row for row in rows if isinstance(row, AlignRow)]
    experts = [row for row in rows if isinstance(row, ExpertsRow)]
    layers = [row for row in rows if isinstance(row, LayerRow)]
    return chain(
        measure_deltas(deltas, contenders, machine, clock, cold),
        measure_aligns(aligns, contenders, machine, clock),
        measure_experts(experts, contenders, machine, clock),
        measure_layers(layers, candidate, baseline, machine, clock, progress),
    )


def _line(figures: MoEMeasured) -> str:
    name = figures.row.id
    if isinstance(figures, DeltaFigures):
        best = {who: min(of.launch_us.values()) for who, of in figures.subjects.items()}
        return f"{name}: floor {figures.floor_us:.1f}, {_times(best)}"
    if isinstance(figures, AlignFigures):
        return f"{name}: {_times(figures.us)}"
    if isinstance(figures, ExpertsFigures):
        few, many = _times(figures.few_us), _times(figures.many_us)
        return f"{name}: {FEW_EXPERTS} experts {few}; {MANY_EXPERTS} experts {many}"
    assert isinstance(figures, LayerFigures)
    return f"{name}: base {figures.base_us:.1f}, LoRA adds {figures.added:.0%}"


def _times(us: Mapping[str, float]) -> str:
    return ", ".join(f"{who} {microseconds:.1f}" for who, microseconds in us.items())
