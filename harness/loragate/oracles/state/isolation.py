"""An adapter full of Inf or NaN changes its own rows and nothing else; so does a row of x.

The rows of all other adapters and of the base keep the bits that they have beside good adapters.
Active adapters are spoiled, adapters without rows, slots that were never loaded, and adapters that
have left their slots. Where the subject shows the memory of a slot (A, B and scales), it is
overwritten there, past every check of a loader; otherwise such an adapter is loaded, and a loader
that refuses it with a ValueError has kept it out.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loragate.core.verdict import Failure, Judgement, OracleName
from loragate.execution.session import Session, inputs_of
from loragate.inputs import DataKind, copy_batch
from loragate.inputs.draw import number
from loragate.inputs.pairs import OutRows, out_rows
from loragate.matrix.case import Quantisation
from loragate.oracles.evidence import judge_bits, passed
from loragate.protocol import BaseLayer, Batch, Pool, Trial, subject_code

# active slots that are spoiled in turn; which ones depends on the draw
_MOST_ACTIVE = 2


@dataclass(frozen=True, slots=True)
class Scene:
    """A step on `session`, in which no row but those of the slot `spoiled` may differ, and those of
    a row of x that is `value`."""

    what: str
    session: Session
    spoiled: int | None = None
    row: int | None = None
    value: float = 0.0


class Isolation:
    name = OracleName.ISOLATION

    def applies(self, trial: Trial) -> str | None:
        if not trial.case.tokens:
            return "the batch has no rows"
        if (
            trial.case.quantisation is not Quantisation.NONE
            and not trial.capabilities.deterministic
        ):
            return "a quantised product rounds, and the subject does not promise equal bits"
        return None

    def judge(self, trial: Trial) -> Judgement:
        # nothing to round: the order of a sum may depend on the adapters of other rows
        pool, batch, base = inputs_of(trial, DataKind.EXACT)
        wanted = Session(trial, base, pool).step(copy_batch(batch))
        rows = out_rows(batch)
        scenes = 0
        for scene in _scenes(trial, base, pool, batch):
            scenes += 1
            given = copy_batch(batch)
            if scene.row is not None:
                given.x[scene.row] = scene.value
            result = scene.session.step(given).clone()
            own = _own_rows(scene, rows).to(result.device)
            result[own] = wanted[own]
            wrong = judge_bits(
                trial,
                batch,
                result + 0.0,
                wanted + 0.0,
                oracle=self.name,
                failure=Failure.NOT_ISOLATED,
                claim=f"the result without it ({scene.what})",
            )
            if wrong is not None:
                return wrong
        return passed(self.name, scenes=float(scenes))


def _scenes(trial: Trial, base: BaseLayer | None, pool: Pool, batch: Batch) -> Iterator[Scene]:
    """Lazily: the slots are as a scene describes them while it is the last one."""
    rng = random.Random(number(trial.seed, "isolation"))
    values = [float("inf"), float("nan")]
    rng.shuffle(values)
    active = sorted({slot for slot in batch.token_slots.tolist() if slot >= 0})
    idle = [slot for slot in range(trial.case.slots) if slot not in active]
    session = Session(trial, base, pool)
    if batch.x.is_floating_point() and trial.case.quantisation is Quantisation.NONE:
        for value in values:
            row = rng.randrange(len(batch.x))
            yield Scene(f"row {row} of x is all {value}", session, row=row, value=value)
    chosen = rng.sample(active, min(_MOST_ACTIVE, len(active)))
    for slot, value in zip(chosen, values, strict=False):
        if _spoil(trial, session, pool, slot, value):
            yield Scene(f"the adapter of slot {slot} is all {value}", session, slot)
        session.instance.load(slot, pool)
    if chosen:
        yield Scene("good adapters are in place of those that were all Inf or NaN", session)
    value = values[len(chosen) % 2]
    if idle:
        if _spoil_all(trial, session, pool, idle, value):
            yield Scene(f"adapters without rows are all {value}", session)
        empty = _empty_slots(trial, base, pool, idle, value)
        yield Scene(f"slots never loaded hold {value}", empty)
    if _spoil_all(trial, session, pool, range(trial.case.slots), value):
        for slot in range(trial.case.slots):
            session.instance.unload(slot)
        for slot in active:
            session.instance.load(slot, pool)
        yield Scene(f"adapters that were all {value} have left their slots", session)


def _own_rows(scene: Scene, rows: OutRows) -> Tensor:
    """The rows of the output that may differ."""
    if scene.row is not None:
        return (rows.x_rows == scene.row).nonzero().flatten()
    if scene.spoiled is not None:
        return (rows.slots == scene.spoiled).nonzero().flatten()
    return torch.empty(0, dtype=torch.int64)


def _spoil_all(
    trial: Trial, session: Session, pool: Pool, slots: Iterable[int], value: float
) -> bool:
    spoiled = [_spoil(trial, session, pool, slot, value) for slot in slots]
    return any(spoiled)


def _spoil(trial: Trial, session: Session, pool: Pool, slot: int, value: float) -> bool:
    """Put an adapter of nothing but `value` into a slot. False if the loader refuses it."""
    session.instance.load(slot, pool)
    if trial.capabilities.slot_memory is not None:
        _overwrite(trial, session, slot, value)
        return True
    try:
        session.instance.load(slot, _filled(pool, value))
    except ValueError:
        return False
    return True


def _empty_slots(
    trial: Trial, base: BaseLayer | None, pool: Pool, idle: list[int], value: float
) -> Session:
    """A fresh instance without adapters in the idle slots, and with `value` in their memory."""
    session = Session(trial, base)
    for slot in range(pool.num_slots):
        if slot not in idle:
            session.instance.load(slot, pool)
        elif trial.capabilities.slot_memory is not None:
            _overwrite(trial, session, slot, value)
    return session


def _overwrite(trial: Trial, session: Session, slot: int, value: float) -> None:
    assert trial.capabilities.slot_memory is not None
    with subject_code():
        for memory in trial.capabilities.slot_memory(session.instance.own, slot):
            memory.fill_(value)


def _filled(pool: Pool, value: float) -> Pool:
    """The same adapters with `value` in place of each weight, and with all ranks, so that those
    that another adapter does not have are left with it. Scales stay: B times the scale is `value`
    as well."""

    def filled(weights: Tensor) -> Tensor:
        return torch.full_like(weights, value)

    down = None if pool.down is None else _filled(pool.down, value)
    ranks = tuple((pool.a.shape[-2],) * len(row) for row in pool.ranks)
    return replace(pool, a=filled(pool.a), b=tuple(map(filled, pool.b)), ranks=ranks, down=down)
