"""What a server does with one instance of a layer, step by step, for the sequence oracle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from loragate.inputs import DataKind, copy_batch, make_batch, make_pool
from loragate.inputs.mapping import BASE_ROW
from loragate.inputs.pool_changes import (
    is_small,
    reordered,
    trimmed,
    with_zero_scales,
    without_slice,
)
from loragate.matrix.case import Case, Mix, Quantisation, Ranks, Site, Write
from loragate.oracles.numeric.golden_layer import rounds_always
from loragate.protocol import Batch, Pool, Trial, unsupported

_SMALLER = 3


@dataclass(frozen=True, slots=True)
class Scene:
    """A change of the slots, then a step. `loads`: slot -> the pool with its new adapter, or None
    to empty it. `same_as`: what the fresh instance has in their place. `moved_rows`: the step
    before again, its slots for other rows. `all_slots`: rows use every slot in turn. `beside`: of a
    layer with other weights and adapters, which runs a step between the preparation and the kernels
    of the next scene. `alone`: also a step in which one of the rows keeps its adapter."""

    what: str
    loads: dict[int, Pool | None]
    tokens: int
    mix: Mix
    same_as: dict[int, Pool | None] = field(default_factory=dict)
    moved_rows: bool = False
    all_slots: bool = False
    beside: Case | None = None
    alone: bool = False


def scenes(trial: Trial, kind: DataKind) -> Iterator[Scene]:
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
    # not in the order of a fresh instance
    everything: dict[int, Pool | None] = dict.fromkeys(range(last, -1, -1), pool)
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
        yield from _more_scenes(trial, pool, mix)


def _more_scenes(trial: Trial, pool: Pool, mix: Mix) -> Iterator[Scene]:
    case = trial.case
    last = case.slots - 1
    # no two slots have the same adapter: rows that are taken for those of each other's would not
    # show
    loads: dict[int, Pool | None] = {0: pool, last: pool}
    if last:
        loads[last - 1] = None
    what = "all slots, and one of several emptied"
    # such data may round where other kernels run
    exact = case.quantisation is Quantisation.NONE and rounds_always(case) is None
    small = _smaller(trial)
    yield Scene(what, loads, case.tokens, mix, all_slots=True, alone=exact, beside=small)
    what = "the same slots for other rows"
    yield Scene(what, {}, case.tokens, mix, moved_rows=True, beside=case)
    yield Scene("a step of another instance before the kernels", {}, case.tokens, mix)
    # rows without an adapter are not stored, and a layer rounds in between
    if case.site is not Site.MOE_LAYER and case.write is Write.ADD:
        # as a server does that reads all adapters into one buffer
        pool.a.neg_()
        loads = {**dict.fromkeys(range(last), pool), last: with_zero_scales(pool)}
        none: dict[int, Pool | None] = {last: None}
        what = "a scale of zero, and other adapters from the memory of those before"
        yield Scene(what, loads, case.tokens, mix, same_as=none, all_slots=True)


def _smaller(trial: Trial) -> Case | None:
    """A layer of smaller sizes, if there is one that the subject supports."""
    case = trial.case
    smaller = replace(case, rank=max(1, case.rank // 2), slots=max(1, case.slots // 2))
    if smaller == case or unsupported(smaller, trial.capabilities) is not None:
        return None
    return smaller


def batch_of(trial: Trial, kind: DataKind, scene: Scene, step: int) -> Batch:
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


def alone(batch: Batch, empty: Tensor) -> tuple[Batch, Tensor]:
    """The batch with one row that has an adapter, where there is one, and base rows otherwise; that
    row and those of empty slots, whose results stay what they are: int64."""
    live = ((batch.token_slots != BASE_ROW) & ~empty).nonzero().flatten()
    row = live[len(live) // 2 :][:1]
    result = copy_batch(batch)
    result.token_slots.fill_(BASE_ROW)
    result.token_slots[row] = batch.token_slots[row]
    return result, torch.cat([row, empty.nonzero().flatten()])
