"""Kernels work for the tiles that a batch has and for nothing else.

Counted while they are interpreted: programs, operations of dots, and bytes that are loaded and
stored, in `prepare` and `apply` together. All adapters have the same rank.

* Slots without rows cost nothing: loaded or empty, the counts are the same.
* It does not matter which slots are in use: the same rows with their adapters in other slots, in
  the same order, cost the same.
* The second tile costs at most as much as the first one. This is judged where the batch has room
  for two tiles of any height; at an MoE site each token then chooses the same experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

import torch

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.execution.kernel_work import Work as Counts
from loragate.execution.kernel_work import counted_work
from loragate.execution.session import Session, base_of
from loragate.inputs import DataKind, copy_batch, make_batch, make_pool
from loragate.inputs.mapping import BASE_ROW
from loragate.matrix.case import Execution, Ranks
from loragate.oracles.evidence import passed
from loragate.protocol import BaseLayer, Batch, Pool, Trial

_KIND = DataKind.EXACT
# no implementation has tiles of more rows
_TALLEST = 128


class Work:
    name = OracleName.WORK

    def applies(self, trial: Trial) -> str | None:
        if not trial.machine.interpreted:
            return "only the interpreter counts what a kernel loads, stores and multiplies"
        if trial.case.execution is not Execution.EAGER:
            return "a capture warms up with other batches than the one that is counted"
        if not trial.capabilities.work_follows_tiles:
            return "the subject does not promise that its work follows from the tiles of a batch"
        return None if trial.case.tokens else "the batch has no rows"

    def judge(self, trial: Trial) -> Judgement:
        # adapters that differ in rank differ in work
        trial = replace(trial, case=replace(trial.case, ranks=Ranks.FULL))
        bench = _Bench(trial)
        wrong = _of_slots(bench) or _of_tiles(bench)
        return wrong or passed(self.name, **_metrics(bench.first))


class _Bench:
    """Counts the work of one batch with its adapters in various slots."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.base: BaseLayer | None = base_of(trial, _KIND)
        self.pool: Pool = make_pool(
            trial.case, trial.seed, _KIND, trial.machine, trial.capabilities
        )
        self.batch: Batch = make_batch(trial.case, trial.seed, 0, _KIND, trial.machine)
        self.first = self.work(self.batch)

    def work(self, batch: Batch, empty: frozenset[int] = frozenset()) -> Counts:
        """Of one step, with adapters in all slots but the `empty` ones."""
        session = Session(self.trial, self.base)
        for slot in range(self.trial.case.slots):
            if slot not in empty:
                session.instance.load(slot, self.pool)
        with counted_work() as counts:
            session.step(copy_batch(batch))
        return counts

    def with_slots(self, token_slots: torch.Tensor) -> Batch:
        return replace(self.batch, token_slots=token_slots.int())


def _of_slots(bench: _Bench) -> Judgement | None:
    """A FAIL if the work depends on the adapters of idle slots, or on which slots are in use."""
    slots, num_slots = bench.batch.token_slots, bench.trial.case.slots
    active = sorted(set(slots.tolist()) - {BASE_ROW})
    idle = frozenset(range(num_slots)) - set(active)
    if idle:
        wrong = _compare(bench.first, bench.work(bench.batch, idle), "with empty idle slots")
        if wrong is not None:
            return wrong
    for places in _placements(len(active), num_slots):
        table = dict(zip(active, places, strict=True))
        moved = torch.tensor([table.get(slot, slot) for slot in slots.tolist()])
        counts = bench.work(bench.with_slots(moved))
        wrong = _compare(bench.first, counts, f"with slots {places} in place of {active}")
        if wrong is not None:
            return wrong
    return None


def _placements(count: int, num_slots: int) -> Iterator[list[int]]:
    """Ascending slots for the active adapters: the first ones, and as far apart as possible."""
    if count and count < num_slots:
        yield list(range(count))
        yield [*range(count - 1), num_slots - 1]


def _of_tiles(bench: _Bench) -> Judgement | None:
    """A FAIL if the second tile costs more than the first one."""
    trial = bench.trial
    if trial.case.tokens < 2 * _TALLEST:
        return None
    if bench.batch.routes is not None:
        ids = bench.batch.routes.topk_ids
        ids.copy_(torch.arange(ids.shape[1]).expand_as(ids))
    counts = []
    for tiles in range(3):
        slots = torch.full((trial.case.tokens,), BASE_ROW)
        slots[: tiles * _TALLEST] = trial.case.slots - 1
        counts.append(bench.work(bench.with_slots(slots)))
    none, one, two = (asdict(each) for each in counts)
    for name in none:
        if two[name] - one[name] > one[name] - none[name]:
            message = (
                f"{name}: {none[name]} for base rows only, {one[name]} with {_TALLEST} rows of an "
                f"adapter, {two[name]} with {2 * _TALLEST}; allowed: growth in proportion"
            )
            return _failure(message, two[name], 2 * one[name] - none[name])
    return None


def _compare(first: Counts, other: Counts, how: str) -> Judgement | None:
    was, now = asdict(first), asdict(other)
    for name in was:
        if was[name] != now[name]:
            message = f"{name}: {was[name]}, but {now[name]} for the same rows {how}"
            return _failure(message, now[name], was[name])
    return None


def _failure(message: str, counted: int, allowed: int) -> Judgement:
    metrics = {"counted": float(counted), "allowed": float(allowed)}
    return Judgement(OracleName.WORK, Verdict.FAIL, Failure.EXTRA_WORK, message, metrics)


def _metrics(counts: Counts) -> dict[str, float]:
    return {name: float(value) for name, value in asdict(counts).items()}
