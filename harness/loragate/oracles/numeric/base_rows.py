"""A row without an adapter gets the base model, bit for bit.

At a site that works in place base rows of the output keep their bits, unless the subject says that
it adds zero to them; so do pairs whose expert is not here and, of a subject that promises to read
live ranks only, the slices of a pair that its adapter does not have. In each slice they hold
negative zeros, which even an added zero would change, and, if it has four columns, a NaN and an
Inf, as those of a base layer may. At the other sites they equal the base layer alone: the same
subject with empty slots and a batch of the same shape, so that the base GEMM is the same too. For a
subject whose bits depend on the place of a row that batch keeps its slots, which are empty, instead
of having base rows only.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from loragate.core.verdict import Failure, Judgement, OracleName
from loragate.execution.session import Session, inputs_of
from loragate.inputs import DataKind, copy_batch
from loragate.inputs.mapping import BASE_ROW, make_token_slots
from loragate.inputs.pairs import out_rows
from loragate.matrix.case import IN_PLACE_SITES, LINEAR_SITES, ExpertMap, Site
from loragate.oracles.evidence import judge_bits, passed
from loragate.protocol import BaseLayer, Batch, Pool, Trial


class BaseRows:
    name = OracleName.BASE_ROWS

    def applies(self, trial: Trial) -> str | None:
        token_slots = make_token_slots(trial.case, trial.seed, 0)
        if trial.case.expert_map is ExpertMap.PARALLEL and trial.case.tokens:
            return None
        return None if (token_slots == BASE_ROW).any() else "the batch has no base rows"

    def judge(self, trial: Trial) -> Judgement:
        pool, batch, base = inputs_of(trial, DataKind.SIGNED)
        kept = _kept(trial, pool, batch)
        if trial.case.site in IN_PLACE_SITES:
            _mark(batch.out, kept, trial)
        alone = _base_alone(trial, base, batch)
        result = Session(trial, base, pool).step(copy_batch(batch))
        wanted = torch.where(kept, alone, result)
        if trial.capabilities.adds_zero_to_base_rows:
            is_zero = (wanted == 0) & (result == 0) & ~torch.signbit(result)
            wanted = torch.where(is_zero, result, wanted)
        wrong = judge_bits(
            trial,
            batch,
            result,
            wanted,
            oracle=self.name,
            failure=Failure.BASE_ROW_CHANGED,
            claim="the base layer alone",
        )
        return wrong or passed(self.name, rows=float(kept.all(1).sum()))


def _kept(trial: Trial, pool: Pool, batch: Batch) -> Tensor:
    """bool like out: what no adapter may change."""
    slots = out_rows(batch).slots.to(batch.out.device)
    kept = (slots == BASE_ROW)[:, None].expand(batch.out.shape).clone()
    have = trial.capabilities
    if trial.case.site is Site.MOE_DELTA and have.skips_dead_ranks and have.rank_per_slice:
        for part, columns in enumerate(_slices(trial)):
            absent = [slot for slot, ranks in enumerate(pool.ranks) if not ranks[part]]
            kept[:, columns] |= torch.isin(slots, slots.new_tensor(absent))[:, None]
    return kept


def _mark(out: Tensor, kept: Tensor, trial: Trial) -> None:
    """Give what is kept the values that little else than keeping them would leave."""
    for columns in _slices(trial):
        marks = {columns.start: -0.0, columns.stop - 1: -0.0}
        # a sum of zero and NaN may be another NaN
        if columns.stop - columns.start > 3 and not trial.capabilities.adds_zero_to_base_rows:
            marks |= {columns.start + 1: math.nan, columns.stop - 2: -math.inf}
        for column, value in marks.items():
            out[:, column].masked_fill_(kept[:, column], value)


def _slices(trial: Trial) -> list[slice]:
    """The columns of each slice of the output."""
    ends = list(accumulate(trial.case.out_slices, initial=0))
    return [slice(start, stop) for start, stop in pairwise(ends)]


def _base_alone(trial: Trial, base: BaseLayer | None, batch: Batch) -> Tensor:
    if trial.case.site in IN_PLACE_SITES:
        return batch.out
    batch = copy_batch(batch)
    if trial.case.site in LINEAR_SITES or trial.capabilities.place_invariant:
        base_only = torch.full_like(batch.token_slots, BASE_ROW)
        batch = replace(batch, token_slots=base_only)
    return Session(trial, base).step(batch)
