"""The result does not depend on which stream is ahead.

On modelled streams the launches of two steps are done again in other orders that the events allow,
from the same memory: all of them where they are few, otherwise one for every place where a stream
may be held back, and orders drawn from the seed of the trial and the number of the draw. Then the
programs of every launch run from the last one to the first, as no device promises an order of them.
The data need no rounding, so that each order must give the bits of the host's order, which are also
those of the sequential form.

The measurements say how many orders were done; if not all of them, how many are cuts and draws.

On real streams a kernel that spins delays one stream at one record, wait or change of streams at a
time, inside a capture as well: at every such place where they are few, else at some drawn ones.
"""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.execution.streams.interpreted import NeverSatisfied
from loragate.execution.streams.replay import difference, programs_reversed, replayed
from loragate.execution.streams.traced import (
    TracedSteps,
    queued_steps,
    sequential_results,
    steps_of,
    traced_steps,
)
from loragate.execution.trace.orders import Kind, Order, legal_orders
from loragate.oracles.concurrency.race import needs_streams, never_satisfied
from loragate.oracles.evidence import judge_bits, passed
from loragate.protocol import Batch, Trial

# each order is two steps in the interpreter
_ORDERS = 12
# each of them is two steps, and a capture where the case is one of graphs
_DELAYS = 16


class Schedule:
    name = OracleName.SCHEDULE

    def applies(self, trial: Trial) -> str | None:
        return needs_streams(trial)

    def judge(self, trial: Trial) -> Judgement:
        if trial.machine.device == "cuda":
            return self._judge_delays(trial)
        try:
            steps = traced_steps(trial, replays=True)
            return self._judge(trial, steps)
        except NeverSatisfied as error:
            return never_satisfied(self.name, str(error))

    def _judge(self, trial: Trial, steps: TracedSteps) -> Judgement:
        recorded = [result.clone() for result in steps.results]
        wanted = sequential_results(trial)
        if wanted is not None:
            wrong = self._compare(trial, steps.batches, recorded, wanted, "the sequential form")
            if wrong is not None:
                return wrong
        trace = steps.recorder.trace()
        orders = legal_orders(trace, limit=_ORDERS, seed=trial.seed)
        usual = next(iter(orders))
        for order, how in orders.items():
            place = f"{difference(trace, order, usual)} ({how.kind} {how.number})"
            try:
                results = replayed(steps, order)
            except NeverSatisfied as error:
                return never_satisfied(self.name, f"{error}, with {place}")
            claim = f"the order of the host, with {place}"
            wrong = self._compare(trial, steps.batches, results, recorded, claim)
            if wrong is not None:
                return wrong
        wrong = self._reverse(trial, steps, usual, recorded)
        if wrong is not None:
            return wrong
        kinds = Counter(how.kind for how in orders.values())
        cuts, draws = float(kinds[Kind.CUT]), float(kinds[Kind.DRAW])
        return passed(self.name, orders=float(len(orders)), cuts=cuts, draws=draws)

    def _reverse(
        self, trial: Trial, steps: TracedSteps, usual: Order, recorded: list[Tensor]
    ) -> Judgement | None:
        try:
            with programs_reversed():
                results = replayed(steps, usual)
        except NeverSatisfied:
            # on a device the program that is waited for would run at the same time
            return None
        claim = "the order of the host, with the programs of every launch from last to first"
        return self._compare(trial, steps.batches, results, recorded, claim)

    def _judge_delays(self, trial: Trial) -> Judgement:
        from loragate.execution.streams.delays import chosen_places, delayed

        batches = steps_of(trial)
        with delayed() as places:
            first = queued_steps(trial, places.passes)
        wanted = sequential_results(trial)
        if wanted is not None:
            wrong = self._compare(trial, batches, first, wanted, "the sequential form")
            if wrong is not None:
                return wrong
        chosen = chosen_places(places.passed, limit=_DELAYS, seed=trial.seed)
        delays = 0
        for place in chosen:
            with delayed(place) as places_again:
                results = queued_steps(trial, places_again.passes)
            # a later run may pass fewer places than the first one
            delays += places_again.passed > place
            claim = f"a run without delays, with a delay at place {place} of {places.passed}"
            wrong = self._compare(trial, batches, results, first, claim)
            if wrong is not None:
                return wrong
        if chosen and not delays:
            message = f"none of the {len(chosen)} delays happened: later runs pass fewer places"
            return Judgement(self.name, Verdict.INCONCLUSIVE, message=message)
        return passed(self.name, places=float(places.passed), delays=float(delays))

    def _compare(
        self,
        trial: Trial,
        batches: list[Batch],
        results: list[Tensor],
        wanted: list[Tensor],
        claim: str,
    ) -> Judgement | None:
        for step, batch in enumerate(batches):
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
