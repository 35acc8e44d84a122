"""Common to oracles: the place of an element in the user's terms, and equality of bits."""

from __future__ import annotations

import torch
from torch import Tensor

from loragate.core.plural import counted
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.inputs.pairs import local_experts
from loragate.inputs.placement import bits_of
from loragate.matrix.case import Case, Site
from loragate.protocol import Batch, Trial

# the runner of trials judges these: a lost device, and too little memory
DEVICE_ERRORS = (torch.AcceleratorError, torch.OutOfMemoryError, MemoryError)


def locate(case: Case, batch: Batch, row: int, column: int) -> dict[str, int | str]:
    """Token, slot, slice, and column within the slice of an element of the output; for a
    token-expert pair also its number among the token's choices, and its local expert (-1: not
    here)."""
    part = 0
    while column >= case.out_slices[part]:
        column -= case.out_slices[part]
        part += 1
    if batch.routes is None or case.site is Site.MOE_LAYER:
        slot = int(batch.token_slots[row])
        return {"token": row, "slot": slot, "slice": part, "column": column}
    token, choice = divmod(row, batch.routes.topk_ids.shape[1])
    expert = int(local_experts(batch.routes)[token, choice])
    slot = int(batch.token_slots[token])
    where = {"token": token, "choice": choice, "expert": expert, "slot": slot}
    return {**where, "slice": part, "column": column}


def differing(result: Tensor, wanted: Tensor) -> Tensor:
    """bool like both: where the bits are not the same."""
    return (bits_of(result) != bits_of(wanted)).view(result.shape)


def judge_bits(
    trial: Trial,
    batch: Batch,
    result: Tensor,
    wanted: Tensor,
    *,
    oracle: OracleName,
    failure: Failure,
    claim: str,
) -> Judgement | None:
    """A FAIL that names the first element whose bits differ, or None.

    `batch` is the one that `result` belongs to; `claim` names for the message what the result
    should equal.
    """
    mask = differing(result, wanted)
    count = int(mask.sum())
    if not count:
        return None
    row, column = (int(i) for i in mask.nonzero()[0])
    have, want = result[row, column].item(), wanted[row, column].item()
    message = (
        f"{counted(count, 'element differs', 'elements differ')} from {claim}, "
        f"in {counted(int(mask.any(1).sum()), 'row')}; "
        f"the first is {have!r}, should be {want!r}"
    )
    metrics = {"differing": float(count), "largest": _largest(result, wanted, mask)}
    where = locate(trial.case, batch, row, column)
    return Judgement(oracle, Verdict.FAIL, failure, message, metrics, where)


def _largest(result: Tensor, wanted: Tensor, mask: Tensor) -> float:
    gap = (result[mask].double() - wanted[mask].double()).abs()
    return torch.nan_to_num(gap, nan=float("inf")).max().item()


def passed(oracle: OracleName, **metrics: float) -> Judgement:
    return Judgement(oracle, Verdict.PASS, metrics=metrics)
