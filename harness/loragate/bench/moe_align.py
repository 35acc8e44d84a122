"""Times the alignment of `bench moe`: the token-expert pairs of a step are sorted and tiled.

Invariant: an alignment is timed only after the delta that uses it was compared with fp64. All
subjects have the same step, and buffers for the largest step of the table, as in a server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from loragate.bench.contender import Contender, Yardstick
from loragate.bench.moe_delta import Resident, make_step, open_resident
from loragate.bench.moe_figures import AlignFigures, ExpertsFigures
from loragate.bench.moe_rows import ALIGN_TOKENS, AlignRow, DeltaRow, ExpertsRow
from loragate.bench.timer import Clock
from loragate.core.machine import Machine
from loragate.matrix.case import Path


@dataclass(frozen=True, slots=True)
class _Timed:
    subject: str
    experts: int

    def __str__(self) -> str:
        return f"{self.subject} with {self.experts} experts"


def measure_aligns(
    rows: Sequence[AlignRow], contenders: Sequence[Contender], machine: Machine, clock: Clock
) -> Iterator[AlignFigures]:
    """Raises WrongResult."""
    if not rows:
        return
    largest = replace(rows[0], tokens=max(ALIGN_TOKENS)).delta
    resident = open_resident(largest.case, contenders, machine)
    for row in rows:
        yield AlignFigures(row, clock(_checked_calls(row.id, row.delta, resident, machine)))


def measure_experts(
    rows: Sequence[ExpertsRow], contenders: Sequence[Contender], machine: Machine, clock: Clock
) -> Iterator[ExpertsFigures]:
    """Few and many experts take turns. Raises WrongResult."""
    if not rows:
        return
    largest = replace(rows[0], tokens=max(ALIGN_TOKENS)).deltas
    residents = [open_resident(delta.case, contenders, machine) for delta in largest]
    for row in rows:
        yield _measure_experts(row, residents, machine, clock)


def _measure_experts(
    row: ExpertsRow, residents: Sequence[Resident], machine: Machine, clock: Clock
) -> ExpertsFigures:
    calls: dict[_Timed, Callable[[], object]] = {}
    for delta, resident in zip(row.deltas, residents, strict=True):
        experts = delta.case.experts
        where = f"{row.id} with {experts} experts"
        for name, call in _checked_calls(where, delta, resident, machine).items():
            calls[_Timed(name, experts)] = call
    times = clock(calls)
    few, many = (
        {of.subject: us for of, us in times.items() if of.experts == delta.case.experts}
        for delta in row.deltas
    )
    return ExpertsFigures(row, few, many)


def _checked_calls(
    where: str, delta: DeltaRow, resident: Resident, machine: Machine
) -> Mapping[str, Callable[[], object]]:
    """The alignment for the step of `delta`, by subject. Raises WrongResult."""
    batch = make_step(delta, machine)
    routes = batch.routes
    assert routes is not None
    resident.prepare(batch.token_slots)
    yardstick = Yardstick.of_step(delta.case, resident.pool, batch)
    start, calls = batch.out.clone(), {}
    for name, instance in resident.instances.items():
        # a path that aligns for every batch size
        aligning = instance.on_path(Path.ONE_SHOT)
        batch.out.copy_(start)
        yardstick.check(name, where, aligning.apply(batch.x, batch.out, routes))
        calls[name] = partial(aligning.assign, routes)
    return calls
