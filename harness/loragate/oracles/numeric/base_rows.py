"""A row without an adapter gets the base model, bit for bit.

At a site that works in place base rows of the output keep their bits, including a negative zero,
which even an added zero would change, unless the subject says that it adds one; so do pairs whose
expert is not here. At the other sites they equal the base layer alone: the same subject with empty
slots and a batch of the same shape, so that the base GEMM is the same too. For a subject whose bits
depend on the place of a row that batch keeps its slots, which are empty, instead of having base
rows only.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from loragate.core.verdict import Failure, Judgement, OracleName
from loragate.execution.session import Session, inputs_of
from loragate.inputs import DataKind, copy_batch
from loragate.inputs.mapping import BASE_ROW, make_token_slots
from loragate.inputs.pairs import out_rows
from loragate.matrix.case import IN_PLACE_SITES, LINEAR_SITES, ExpertMap
from loragate.oracles.evidence import judge_bits, passed
from loragate.protocol import BaseLayer, Batch, Trial


class BaseRows:
    name = OracleName.BASE_ROWS

    def applies(self, trial: Trial) -> str | None:
        token_slots = make_token_slots(trial.case, trial.seed, 0)
        if trial.case.expert_map is ExpertMap.PARALLEL and trial.case.tokens:
            return None
        return None if (token_slots == BASE_ROW).any() else "the batch has no base rows"

    def judge(self, trial: Trial) -> Judgement:
        pool, batch, base = inputs_of(trial, DataKind.SIGNED)
        rows = (out_rows(batch).slots == BASE_ROW).nonzero().flatten().to(batch.x.device)
        batch.out[rows, 0] = -0.0
        alone = _base_alone(trial, base, batch)
        result = Session(trial, base, pool).step(copy_batch(batch))
        wanted = result.clone()
        wanted[rows] = alone[rows]
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
        return wrong or passed(self.name, rows=float(len(rows)))


def _base_alone(trial: Trial, base: BaseLayer | None, batch: Batch) -> Tensor:
    if trial.case.site in IN_PLACE_SITES:
        return batch.out
    batch = copy_batch(batch)
    if trial.case.site in LINEAR_SITES or trial.capabilities.place_invariant:
        base_only = torch.full_like(batch.token_slots, BASE_ROW)
        batch = replace(batch, token_slots=base_only)
    return Session(trial, base).step(batch)
