"""A step after other steps equals the same step on a fresh instance.

One instance sees what happens in a server: a large batch, a smaller one, one of base rows only, a
slot that gets a smaller adapter with one slice fewer, an adapter that leaves its slot and returns
in another. If adapters are small, also a slot that is emptied beside others, a batch with the same
adapters for other rows, a step of another instance that comes in between, and an adapter that a
scale of zero turns off. After each scene the step is repeated on a fresh instance with the same
adapters; whatever differs is left over from before (sglang #8103, #29468, vllm #42120).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from loragate.core.plural import counted
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.execution.runners import WriteInput
from loragate.execution.session import Session, base_of
from loragate.inputs import DataKind, copy_batch, make_batch, make_pool
from loragate.inputs.mapping import BASE_ROW
from loragate.inputs.placement import bits_of, owned, whole
from loragate.inputs.pool import (
    is_small,
    reordered,
    trimmed,
    with_doubled_scales_of,
    with_zero_scales,
    without_slice,
)
from loragate.matrix.case import Case, Mix, Ranks, Site, Write
from loragate.oracles.evidence import judge_bits, passed
from loragate.protocol import BaseLayer, Batch, Pool, Trial

_SMALLER = 3


@dataclass(frozen=True, slots=True)
class Scene:
    """A change of the slots, then a step. `loads`: slot -> the pool with its new adapter, or None
    to empty it. `same_as`: what the fresh instance has in their place. `moved_rows`: the step
    before again, its slots for other rows. `all_slots`: rows use every slot in turn.
    `interrupts`: an instance with other adapters runs the step between the next one's preparation
    and kernels."""

    what: str
    loads: dict[int, Pool | None]
    tokens: int
    mix: Mix
    same_as: dict[int, Pool | None] = field(default_factory=dict)
    moved_rows: bool = False
    all_slots: bool = False
    interrupts: bool = False


class Sequence:
    name = OracleName.SEQUENCE

    def applies(self, trial: Trial) -> str | None:
        return None

    def judge(self, trial: Trial) -> Judgement:
        # nothing to round, so that a difference is state and never the order of a sum
        kind = DataKind.EXACT
        base = base_of(trial, kind)
        session = Session(trial, base)
        # as a server does that starts
        for slot in range(trial.case.slots):
            session.instance.unload(slot)
        resident: dict[int, Pool | None] = {}
        between: WriteInput | None = None
        count = 0
        for count, scene in enumerate(_scenes(trial, kind)):
            for slot, pool in scene.loads.items():
                _move(session, slot, pool)
            resident |= scene.loads | scene.same_as
            batch = _batch(trial, kind, scene, count)
            own, other = copy_batch(batch), copy_batch(batch)
            if scene.moved_rows:
                # a step that is prepared and never run, with the slots of the step before
                before = replace(scene, moved_rows=False, all_slots=True)
                session.instance.prepare(_batch(trial, kind, before, count - 1).token_slots)
            result = session.step(own, between)
            # memory has place for two instances
            between = None
            # nothing precedes the first step
            if count:
                fresh = _fresh_instance(trial, base, resident)
                wanted = fresh.step(other)
                wrong = self._compare(trial, scene, batch, result, wanted)
                wrong = wrong or self._surroundings(scene, own, other)
                if wrong is not None:
                    return wrong
                del fresh
                if scene.interrupts:
                    between = partial(_other_instance(trial, base).step, copy_batch(batch))
        return passed(self.name, steps=float(count + 1))

    def _compare(
        self,
        trial: Trial,
        scene: Scene,
        batch: Batch,
        result: Tensor,
        wanted: Tensor,
    ) -> Judgement | None:
        return judge_bits(
            trial,
            batch,
            result + 0.0,
            wanted + 0.0,
            oracle=self.name,
            failure=Failure.STALE_STATE,
            claim=f"a fresh instance ({scene.what})",
        )

    def _surroundings(self, scene: Scene, own: Batch, other: Batch) -> Judgement | None:
        """A FAIL if the step wrote in other places than the fresh instance: after its own rows lie
        those of an earlier, larger batch."""
        mask = bits_of(whole(own.out)) != bits_of(whole(other.out))
        count = int((mask & ~owned(own.out)).sum())
        if not count:
            return None
        written = counted(count, "element around out was", "elements around out were")
        message = f"{written} written, which a fresh instance does not do "
        message += f"({scene.what})"
        return Judgement(self.name, Verdict.FAIL, Failure.STALE_STATE, message)


def _scenes(trial: Trial, kind: DataKind) -> Iterator[Scene]:
    case = trial.case
    # every slice and rank of a slot is in use before a smaller adapter replaces it
    full = replace(case, ranks=Ranks.FULL)
    pool = make_pool(full, trial.seed, kind, trial.machine, trial.capabilities)
    # a mixed one may lack the very slice that stays
    small = trimmed(
        make_pool(full, trial.seed + 1, kind, trial.machine, trial.capabilities),
        max(1, case.rank // 4),
    )
    if trial.capabilities.rank_per_slice and len(case.slices) > 1:
        small = without_slice(small, len(case.slices) - 1)
    last, few = case.slots - 1, max(1, case.tokens // _SMALLER)
    mix = case.mix if case.mix is Mix.SHUFFLED else Mix.RAGGED
    everything: dict[int, Pool | None] = dict.fromkeys(range(case.slots), pool)
    yield Scene("first step", everything, case.tokens, mix)
    yield Scene("a smaller batch after a larger one", {}, few, mix)
    yield Scene("base rows only after rows with adapters", {}, few, Mix.ALL_BASE)
    yield Scene("a smaller adapter in place of a larger one", {last: small}, few, mix)
    if last:
        # slot 0 gets the adapter that was in the last slot at first
        moved = reordered(pool, [last, *range(1, last), 0])
        loads: dict[int, Pool | None] = {last: None, 0: moved}
        yield Scene("an adapter that moved, and the slot that it left", loads, case.tokens, mix)
    # each scene loads all adapters once more
    if is_small(pool):
        yield from _more_scenes(case, pool, mix)


def _more_scenes(case: Case, pool: Pool, mix: Mix) -> Iterator[Scene]:
    last = case.slots - 1
    # no two slots have the same adapter: rows that are taken for those of each other's would not
    # show
    loads: dict[int, Pool | None] = {0: pool, last: pool}
    if last:
        loads[last - 1] = None
    what = "all slots, and one of several emptied"
    yield Scene(what, loads, case.tokens, mix, all_slots=True)
    what = "the same slots for other rows"
    yield Scene(what, {}, case.tokens, mix, moved_rows=True, interrupts=True)
    yield Scene("a step of another instance before the kernels", {}, case.tokens, mix)
    # rows without an adapter are not stored, and a layer rounds in between
    if case.site is not Site.MOE_LAYER and case.write is Write.ADD:
        off = with_zero_scales(pool)
        none: dict[int, Pool | None] = {last: None}
        yield Scene("a scale of zero", {last: off}, case.tokens, mix, same_as=none)


def _batch(trial: Trial, kind: DataKind, scene: Scene, step: int) -> Batch:
    case = replace(trial.case, tokens=scene.tokens, mix=scene.mix)
    batch = make_batch(case, trial.seed, step - scene.moved_rows, kind, trial.machine)
    slots = batch.token_slots
    if scene.all_slots or scene.moved_rows:
        in_turn = (-1 - torch.arange(len(slots), dtype=slots.dtype)) % case.slots
        slots = torch.where(slots == BASE_ROW, slots, in_turn)
    if scene.moved_rows:
        slots = _moved(slots)
    return replace(batch, token_slots=slots)


def _moved(slots: Tensor) -> Tensor:
    """The same slots for other rows: neither for the first nor for the last ones where others in
    between have different slots."""
    edge = max(0, min(len(slots) // 3, len(slots) // 2 - 1))
    first, inner, last = slots.tensor_split([edge, len(slots) - edge])
    if (inner == inner[:1]).all():
        return slots.roll(1)
    return torch.cat([first, inner.roll(1), last])


def _move(session: Session, slot: int, pool: Pool | None) -> None:
    if pool is None:
        # a server also empties what is empty, as vllm does with each slot that gets an adapter
        for _ in range(2):
            session.instance.unload(slot)
    else:
        session.instance.load(slot, pool)


def _other_instance(trial: Trial, base: BaseLayer | None) -> Session:
    """With an adapter in every slot, none of which the instance under test has, nor its scale."""
    full, kind = replace(trial.case, ranks=Ranks.FULL), DataKind.EXACT
    own, others = (
        make_pool(full, trial.seed + after, kind, trial.machine, trial.capabilities)
        for after in (0, 2)
    )
    others = with_doubled_scales_of(own, others)
    return _fresh_instance(trial, base, dict.fromkeys(range(trial.case.slots), others))


def _fresh_instance(
    trial: Trial, base: BaseLayer | None, resident: dict[int, Pool | None]
) -> Session:
    session = Session(trial, base)
    for slot, pool in resident.items():
        if pool is not None:
            session.instance.load(slot, pool)
    return session
