"""The result does not depend on which stream is ahead.

On modelled streams the launches of two steps are done again in other orders that the events allow,
from the same memory: all of them where they are few, otherwise each stream as early and as late as
possible, and orders drawn from the seed of the trial. The data need no rounding, so that each order
must give the bits of the host's order, which are also those of the sequential form.
"""

from __future__ import annotations

from torch import Tensor

from loragate.core.verdict import Failure, Judgement, OracleName
from loragate.execution.streams.interpreted import NeverSatisfied
from loragate.execution.streams.replay import difference, replayed
from loragate.execution.streams.traced import (
    TracedSteps,
    sequential_results,
    traced_steps,
)
from loragate.execution.trace.orders import Order, legal_orders
from loragate.oracles.concurrency.race import needs_streams, never_satisfied
from loragate.oracles.evidence import judge_bits, passed
from loragate.protocol import Trial

# each order is two steps in the interpreter
_ORDERS = 8


class Schedule:
    name = OracleName.SCHEDULE

    def applies(self, trial: Trial) -> str | None:
        return needs_streams(trial)

    def judge(self, trial: Trial) -> Judgement:
        try:
            steps = traced_steps(trial, replays=True)
            return self._judge(trial, steps)
        except NeverSatisfied as error:
            return never_satisfied(self.name, str(error))

    def _judge(self, trial: Trial, steps: TracedSteps) -> Judgement:
        recorded = [result.clone() for result in steps.results]
        wanted = sequential_results(trial)
        if wanted is not None:
            wrong = self._compare(trial, steps, recorded, wanted, "the sequential form")
            if wrong is not None:
                return wrong
        trace = steps.recorder.trace()
        usual, *others = legal_orders(trace, limit=_ORDERS, seed=trial.seed)
        order: Order
        for order in (usual, *others):
            try:
                results = replayed(steps, order)
            except NeverSatisfied as error:
                place = difference(trace, order, usual)
                return never_satisfied(self.name, f"{error}, with {place}")
            claim = f"the order of the host, with {difference(trace, order, usual)}"
            wrong = self._compare(trial, steps, results, recorded, claim)
            if wrong is not None:
                return wrong
        return passed(self.name, orders=float(1 + len(others)))

    def _compare(
        self,
        trial: Trial,
        steps: TracedSteps,
        results: list[Tensor],
        wanted: list[Tensor],
        claim: str,
    ) -> Judgement | None:
        for step, batch in enumerate(steps.batches):
            wrong = judge_bits(
                trial,
                batch,
                # either zero is right where forms add in another order
                results[step] + 0.0,
                wanted[step] + 0.0,
                oracle=self.name,
                failure=Failure.SCHEDULE_DEPENDENT,
                claim=f"{claim} (step {step})",
            )
            if wrong is not None:
                return wrong
        return None
