"""Times the deltas of `bench moe`.

Invariant: a path is timed only after its result was compared with fp64. All subjects have the
same adapters and the same step, and buffers for the largest step of the table, as in a server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import cast

import torch
from torch import Tensor

from loragate.bench.contender import Contender, Yardstick
from loragate.bench.moe_calls import PathwiseInstance, delta_calls
from loragate.bench.moe_figures import DeltaFigures, PathTimes
from loragate.bench.moe_rows import TOKENS, DeltaRow
from loragate.bench.timer import Clock
from loragate.core.machine import Machine
from loragate.inputs import DataKind, make_pool, torch_dtype
from loragate.inputs.draw import Draw
from loragate.matrix.case import Case, Path, RouterWeights
from loragate.protocol import Batch, Pool, Routes
from loragate.subjects.lorakernels.moe_delta import MoEDelta

SEED = 1
# size of the outputs before the delta; deltas are about 1
_BASE_SIZE = 0.25


@dataclass(frozen=True, slots=True)
class Resident:
    """All subjects with the same adapters in their slots; the candidate is the first."""

    pool: Pool
    contenders: Sequence[Contender]
    instances: Mapping[str, PathwiseInstance]

    @property
    def candidate(self) -> MoEDelta:
        return cast(MoEDelta, self.instances[self.contenders[0].subject.name])

    def prepare(self, token_slots: Tensor) -> None:
        for instance in self.instances.values():
            instance.prepare(token_slots)


@dataclass(frozen=True, slots=True)
class _Timed:
    subject: str
    path: Path
    aligned: bool

    def __str__(self) -> str:
        with_alignment = " with alignment" if self.aligned else ""
        return f"{self.subject} {self.path}{with_alignment}"


def open_resident(case: Case, contenders: Sequence[Contender], machine: Machine) -> Resident:
    # the capabilities of the candidate decide for all how a slot is filled
    pool = make_pool(case, SEED, DataKind.SIGNED, machine, contenders[0].have)
    instances = {
        contender.subject.name: cast(PathwiseInstance, contender.open(case, machine, pool))
        for contender in contenders
    }
    return Resident(pool, contenders, instances)


def measure_deltas(
    rows: Sequence[DeltaRow],
    contenders: Sequence[Contender],
    machine: Machine,
    clock: Clock,
    cold: Clock | None = None,
) -> Iterator[DeltaFigures]:
    """Rows that share their adapters have to be adjacent. cold: times the calls that align with
    none of the operands in the cache. Raises WrongResult."""
    for _, group in groupby(rows, key=lambda row: replace(row, tokens=max(TOKENS))):
        yield from _measure_group(list(group), contenders, machine, _Clocks(clock, cold))


@dataclass(frozen=True, slots=True)
class _Clocks:
    warm: Clock
    cold: Clock | None


def _measure_group(
    rows: Sequence[DeltaRow], contenders: Sequence[Contender], machine: Machine, clocks: _Clocks
) -> Iterator[DeltaFigures]:
    largest = replace(rows[0], tokens=max(*TOKENS, *(row.tokens for row in rows)))
    resident = open_resident(largest.case, contenders, machine)
    for row in rows:
        yield _measure_row(row, resident, machine, clocks)


def _measure_row(
    row: DeltaRow, resident: Resident, machine: Machine, clocks: _Clocks
) -> DeltaFigures:
    batch = make_step(row, machine)
    resident.prepare(batch.token_slots)
    calls = _calls(row, resident, batch)
    yardstick, start = Yardstick.of_step(row.case, resident.pool, batch), batch.out.clone()
    errors = {}
    for timed, call in calls.items():
        batch.out.copy_(start)
        errors[timed] = yardstick.check(str(timed), row.id, call())
    # the reference takes more memory than what is timed
    del yardstick, start
    times, cold = clocks.warm(calls), None
    if clocks.cold:
        cold = clocks.cold({timed: call for timed, call in calls.items() if timed.aligned})
    return DeltaFigures(
        row,
        count_buckets(row.case, batch),
        resident.candidate.planned(row.tokens),
        {name: _times_of(name, times, errors, cold) for name in resident.instances},
    )


def _calls(
    row: DeltaRow, resident: Resident, batch: Batch
) -> Mapping[_Timed, Callable[[], Tensor]]:
    calls: dict[_Timed, Callable[[], Tensor]] = {}
    for contender in resident.contenders:
        name = contender.subject.name
        instance = resident.instances[name]
        is_candidate = contender is resident.contenders[0]
        # a baseline is judged by its best path, whatever its plan would choose
        paths = [path for path in row.paths if is_candidate or path is not Path.PLAN]
        for path, both in delta_calls(row.case, contender.have, instance, batch, paths).items():
            calls[_Timed(name, path, False)] = both.launch
            if path is Path.PLAN or not is_candidate:
                calls[_Timed(name, path, True)] = both.aligned_launch
    return calls


def _times_of(
    name: str,
    times: Mapping[_Timed, float],
    errors: Mapping[_Timed, float],
    cold: Mapping[_Timed, float] | None,
) -> PathTimes:
    mine = [timed for timed in times if timed.subject == name]
    return PathTimes(
        {timed.path.value: times[timed] for timed in mine if not timed.aligned},
        {timed.path.value: times[timed] for timed in mine if timed.aligned},
        max(errors[timed] for timed in mine),
        None
        if cold is None
        else {of.path.value: us for of, us in cold.items() if of.subject == name},
    )


def make_step(row: DeltaRow, machine: Machine) -> Batch:
    """Equal runs of rows over the slots, experts drawn uniformly without order."""
    case = row.case
    draw = Draw(machine, SEED, "step", row.tokens)
    scores = draw.uniform(0, 1, case.tokens, case.experts)
    topk_ids = scores.topk(case.top_k, dim=1).indices.int()
    weights = None
    if case.router is RouterWeights.OUTPUT:
        weights = draw.uniform(0.3, 0.9, case.tokens, case.top_k)
    dtype = torch_dtype(case.dtype)
    return Batch(
        draw.normal(case.x_rows, case.in_features).to(dtype),
        torch.tensor(row.token_slots, dtype=torch.int32),
        (draw.normal(case.out_rows, case.out_features) * _BASE_SIZE).to(dtype),
        Routes(topk_ids.contiguous(), None, weights),
    )


def count_buckets(case: Case, batch: Batch) -> int:
    """The number of combinations of slot and expert that have rows."""
    assert batch.routes is not None
    ids = batch.routes.topk_ids.long()
    slots = batch.token_slots.to(ids.device).long()
    return int(torch.bincount((slots[:, None] * case.experts + ids).flatten()).count_nonzero())
