"""The same step gives the same bits, on the same instance and on a fresh one, where the subject
promises it. A difference points to a race, an atomic addition or leftover state.

The caller goes on with what is its own: it writes over the mapping as soon as a step is prepared,
over adapters once they are loaded, and over the result of the first run, where no later one may
write.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from loragate.core.plural import counted
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.execution.session import Session, inputs_of
from loragate.inputs import DataKind, copy_batch
from loragate.inputs.mapping import BASE_ROW
from loragate.inputs.pool_changes import copied, factors_of, is_small
from loragate.oracles.evidence import judge_bits, passed
from loragate.protocol import BaseLayer, Batch, Pool, Trial

# an interpreter runs one program after the other: a second run can only show leftover state
_REPEATS_INTERPRETED, _REPEATS = 1, 10
# elements of a result
_MOST_COPIED = 1 << 22


class Repeat:
    name = OracleName.REPEAT

    def applies(self, trial: Trial) -> str | None:
        if trial.capabilities.deterministic:
            return None
        return "the subject does not promise equal bits from run to run"

    def judge(self, trial: Trial) -> Judgement:
        pool, batch, base = inputs_of(trial, DataKind.SIGNED)
        session = Session(trial, base, pool)
        result = session.step(copy_batch(batch))
        # large ones have no memory for a copy
        is_watched = result.numel() <= _MOST_COPIED
        first = result.clone() if is_watched else result
        if is_watched:
            # a subject may run in this mode, which leaves only code of this mode change its results
            with torch.inference_mode():
                result.fill_(float("nan"))
        repeats = _REPEATS_INTERPRETED if trial.machine.interpreted else _REPEATS
        for number in range(repeats + 1):
            fresh = number == repeats
            own = copy_batch(batch)
            # called between the preparation and the kernels
            overwrite = partial(own.token_slots.fill_, BASE_ROW)
            used = _with_overwritten_adapters(trial, base, pool) if fresh else session
            again = used.step(own, overwrite)
            wrong = self._compare(trial, batch, again, first, fresh=fresh)
            if is_watched:
                wrong = wrong or self._kept(result)
            if wrong is not None:
                return wrong
        return passed(self.name, runs=float(repeats + 2))

    def _compare(
        self, trial: Trial, batch: Batch, again: Tensor, first: Tensor, *, fresh: bool
    ) -> Judgement | None:
        return judge_bits(
            trial,
            batch,
            again,
            first,
            oracle=self.name,
            failure=Failure.NONDETERMINISTIC,
            claim="an earlier run on another instance" if fresh else "the first run",
        )

    def _kept(self, result: Tensor) -> Judgement | None:
        changed = int((~result.isnan()).sum())
        if not changed:
            return None
        message = f"a later step wrote {counted(changed, 'element')} of the result of the first"
        return Judgement(self.name, Verdict.FAIL, Failure.FOREIGN_MEMORY, message)


def _with_overwritten_adapters(trial: Trial, base: BaseLayer | None, pool: Pool) -> Session:
    """A session whose adapters are written over once they are loaded, but for large ones."""
    if not is_small(pool):
        return Session(trial, base, pool)
    given = copied(pool)
    session = Session(trial, base, given)
    for values in factors_of(given):
        values.fill_(float("nan"))
    return session
