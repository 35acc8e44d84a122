"""The same step gives the same bits, on the same instance and on a fresh one, where the subject
promises it. A difference points to a race, an atomic addition or leftover state."""

from __future__ import annotations

from loragate.core.verdict import Failure, Judgement, OracleName
from loragate.execution.session import Session, inputs_of
from loragate.inputs import DataKind, copy_batch
from loragate.oracles.evidence import judge_bits, passed
from loragate.protocol import Trial

# an interpreter runs one program after the other: a second run can only show leftover state
_REPEATS_INTERPRETED, _REPEATS = 1, 10


class Repeat:
    name = OracleName.REPEAT

    def applies(self, trial: Trial) -> str | None:
        if trial.capabilities.deterministic:
            return None
        return "the subject does not promise equal bits from run to run"

    def judge(self, trial: Trial) -> Judgement:
        pool, batch, base = inputs_of(trial, DataKind.SIGNED)
        session = Session(trial, base, pool)
        first = session.step(copy_batch(batch))
        repeats = _REPEATS_INTERPRETED if trial.machine.interpreted else _REPEATS
        for number in range(repeats + 1):
            fresh = number == repeats
            again = (Session(trial, base, pool) if fresh else session).step(copy_batch(batch))
            wrong = judge_bits(
                trial,
                batch,
                again,
                first,
                oracle=self.name,
                failure=Failure.NONDETERMINISTIC,
                claim="an earlier run on another instance" if fresh else "the first run",
            )
            if wrong is not None:
                return wrong
        return passed(self.name, runs=float(repeats + 2))
