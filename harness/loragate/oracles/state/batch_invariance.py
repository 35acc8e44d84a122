"""The bits of a row do not depend on the rest of its batch, as far as the subject promises it.

Half of the tokens stay as they are, in their places; the others get new and larger values, and
then other adapters and experts, each only where it is promised. The tokens that stayed must keep
their bits on data that rounds. The size of the batch stays the same: plans depend on it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from loragate.core.verdict import Failure, Judgement, OracleName
from loragate.execution.session import Session, inputs_of
from loragate.inputs import DataKind, copy_batch, make_batch
from loragate.inputs.batch import rows_of
from loragate.inputs.draw import number
from loragate.oracles.evidence import judge_bits, passed
from loragate.protocol import Batch, Others, Trial

_KEPT = 2
_LARGER = 8.0
_CLAIMS = {
    Others.VALUES: "the same rows beside rows with other values",
    Others.SLOTS: "the same rows beside rows with other adapters",
}


class BatchInvariance:
    name = OracleName.BATCH_INVARIANCE

    def applies(self, trial: Trial) -> str | None:
        if not trial.capabilities.batch_invariant:
            return "the subject does not promise that a row does not depend on its batch"
        return None if trial.case.tokens > 1 else "the batch has no other rows"

    def judge(self, trial: Trial) -> Judgement:
        pool, batch, base = inputs_of(trial, DataKind.SIGNED)
        session = Session(trial, base, pool)
        first = session.step(copy_batch(batch)).clone()
        kept = _kept(trial, batch)
        rows = rows_of(kept, len(first) // trial.case.tokens).to(first.device)
        for others, changed in _changed(trial, batch, kept):
            wanted = session.step(copy_batch(changed)).clone()
            result = wanted.clone()
            result[rows] = first[rows]
            wrong = judge_bits(
                trial,
                batch,
                result,
                wanted,
                oracle=self.name,
                failure=Failure.BATCH_DEPENDENT,
                claim=_CLAIMS[others],
            )
            if wrong is not None:
                return wrong
        return passed(self.name, rows=float(len(rows)))


def _kept(trial: Trial, batch: Batch) -> Tensor:
    """int64: the tokens that stay, one with an adapter among them where there is one."""
    rng = random.Random(number(trial.seed, "kept"))
    served = (batch.token_slots >= 0).nonzero().flatten().tolist()
    tokens = rng.sample(range(trial.case.tokens), max(1, trial.case.tokens // _KEPT))
    if served:
        tokens[0] = rng.choice(served)
    return torch.tensor(sorted(set(tokens)))


def _changed(trial: Trial, batch: Batch, kept: Tensor) -> Iterator[tuple[Others, Batch]]:
    other = make_batch(trial.case, trial.seed, 1, DataKind.SIGNED, trial.machine)
    if Others.VALUES in trial.capabilities.batch_invariant:
        same = replace(copy_batch(other), token_slots=batch.token_slots.clone())
        # the largest number of the batch, of a tile and of a column must not be one that stays
        same.x.mul_(_LARGER)
        same.out.mul_(_LARGER)
        if other.routes is not None and batch.routes is not None:
            same = replace(same, routes=replace(other.routes, topk_ids=batch.routes.topk_ids))
        yield Others.VALUES, _with_kept(same, batch, kept)
    if Others.SLOTS in trial.capabilities.batch_invariant:
        yield Others.SLOTS, _with_kept(other, batch, kept)


def _with_kept(other: Batch, batch: Batch, kept: Tensor) -> Batch:
    """`other`, with the kept tokens of `batch` in their places."""
    result = copy_batch(other)
    pairs = [(result.x, batch.x), (result.out, batch.out), (result.token_slots, batch.token_slots)]
    if result.routes is not None and batch.routes is not None:
        pairs.append((result.routes.topk_ids, batch.routes.topk_ids))
        if result.routes.weights is not None and batch.routes.weights is not None:
            pairs.append((result.routes.weights, batch.routes.weights))
    for target, source in pairs:
        rows = rows_of(kept, len(source) // len(batch.token_slots)).to(source.device)
        target[rows] = source[rows]
    return result
