"""With adapters in other slots, rows in another order and experts renumbered, the result is
permuted in the same way and does not change otherwise.

Where the subject promises that a row's bits do not depend on its place, this must hold for the bits
on zero-mean data, otherwise on data that leaves nothing to round.
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor

from loragate.core.verdict import Failure, Judgement, OracleName
from loragate.execution.session import Session, inputs_of
from loragate.inputs import DataKind, copy_batch, reordered_rows
from loragate.inputs.base_experts import reordered_base
from loragate.inputs.batch import rows_of
from loragate.inputs.draw import number
from loragate.inputs.pool_changes import reordered, reordered_experts
from loragate.matrix.case import LINEAR_SITES, MOE_SITES, Quantisation
from loragate.oracles.evidence import judge_bits, passed
from loragate.protocol import BaseExperts, Batch, Trial


class Permute:
    name = OracleName.PERMUTE

    def applies(self, trial: Trial) -> str | None:
        if trial.case.quantisation is not Quantisation.NONE and _kind(trial) is DataKind.EXACT:
            return "a quantised product rounds on any data"
        if trial.case.slots > 1 or trial.case.tokens > 1 or trial.case.experts > 1:
            return None
        return "one row and one slot cannot change places"

    def judge(self, trial: Trial) -> Judgement:
        kind = _kind(trial)
        pool, batch, base = inputs_of(trial, kind)
        result = Session(trial, base, pool).step(copy_batch(batch))
        order = _order(trial, "slots", trial.case.slots)
        rows = torch.tensor(_order(trial, "rows", trial.case.tokens), dtype=torch.int64)
        moved = reordered_rows(_renumbered(batch, order), rows)
        pool = reordered(pool, order)
        if trial.case.site in MOE_SITES:
            experts = _order(trial, "experts", trial.case.experts)
            if trial.case.ep > 1 and kind is DataKind.SIGNED:
                # moving experts between ranks changes the order of the sums
                experts.sort()
            pool = reordered_experts(pool, experts)
            moved = _reassigned(moved, experts)
            if isinstance(base, BaseExperts):
                base = reordered_base(base, experts)
        session = Session(trial, base, pool)
        again = session.step(moved)
        # the sign of a zero sum depends on the order of its terms
        zero = 0.0 if kind is DataKind.EXACT else -0.0
        wrong = judge_bits(
            trial,
            moved,
            again + zero,
            result[rows_of(rows, len(result) // max(len(rows), 1)).to(result.device)] + zero,
            oracle=self.name,
            failure=Failure.NOT_EQUIVARIANT,
            claim="the same rows in another order, with adapters and experts in other places",
        )
        return wrong or passed(self.name)


def _kind(trial: Trial) -> DataKind:
    own_sums = trial.case.site not in LINEAR_SITES
    promised = trial.capabilities.place_invariant and own_sums
    return DataKind.SIGNED if promised else DataKind.EXACT


def _order(trial: Trial, purpose: str, count: int) -> list[int]:
    """A random order that is not the identity, if there is one."""
    order = list(range(count))
    random.Random(number(trial.seed, f"permute-{purpose}")).shuffle(order)
    if count > 1 and order == sorted(order):
        order.reverse()
    return order


def _renumbered(batch: Batch, order: list[int]) -> Batch:
    """The same rows after the adapter of slot `order[i]` has moved to slot i."""
    place = {slot: index for index, slot in enumerate(order)}
    slots = [place.get(slot, slot) for slot in batch.token_slots.tolist()]
    return replace(batch, token_slots=torch.tensor(slots, dtype=torch.int32))


def _reassigned(batch: Batch, order: list[int]) -> Batch:
    """The same rows after local expert `order[i]` has become local expert i."""
    routes = batch.routes
    assert routes is not None
    place = torch.tensor(order, device=routes.topk_ids.device).argsort().int()

    def renumbered(ids: Tensor) -> Tensor:
        # ids of no expert stay what they are
        named = (ids >= 0) & (ids < len(place))
        return torch.where(named, place[ids.long().clamp(0, len(place) - 1)], ids)

    if routes.expert_map is not None:
        routes = replace(routes, expert_map=renumbered(routes.expert_map))
    else:
        routes.topk_ids.copy_(renumbered(routes.topk_ids))
    return replace(batch, routes=routes)
