"""The streams of a step really run side by side.

On modelled streams: in each step some work of one stream has no order with some work of another.
A launch that reads nothing, such as filling a tensor, is no work.

On real streams such a pair is chosen from the trace, and the step runs once more with a handshake
before either of them: each stream waits, for a bounded time, until the other one has arrived. One
meeting is the proof. A driver has few queues, and two streams that share one, by chance, run one
after the other whatever their events say; streams that wait for each other never meet.
"""

from __future__ import annotations

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.execution.streams.interpreted import NeverSatisfied
from loragate.execution.streams.traced import TracedSteps, traced_steps
from loragate.execution.trace.overlap import overlapping
from loragate.matrix.case import Mix
from loragate.oracles.concurrency.race import needs_streams, never_satisfied
from loragate.oracles.evidence import passed
from loragate.protocol import Trial


class Overlap:
    name = OracleName.OVERLAP

    def applies(self, trial: Trial) -> str | None:
        if trial.case.mix is Mix.ALL_BASE:
            return "without adapters there is nothing to run beside the base layer"
        return needs_streams(trial)

    def judge(self, trial: Trial) -> Judgement:
        try:
            steps = traced_steps(trial)
        except NeverSatisfied as error:
            return never_satisfied(self.name, str(error))
        trace = steps.recorder.trace()
        found = [overlapping(trace, start, stop) for start, stop in steps.bounds]
        for step, pairs in enumerate(found):
            if not pairs:
                streams = ", ".join(trace.stream_names.values())
                message = (
                    f"step {step}: no work of one stream can run beside work of another one; "
                    f"streams used: {streams}"
                )
                return Judgement(self.name, Verdict.FAIL, Failure.SERIALISED, message)
        if trial.machine.device == "cuda":
            return self._shake_hands(trial, steps, found)
        return passed(self.name, pairs=float(min(map(len, found))))

    def _shake_hands(
        self, trial: Trial, steps: TracedSteps, found: list[list[tuple[int, int]]]
    ) -> Judgement:
        from loragate.execution.streams.handshake import Meeting

        meeting = Meeting(trial.machine.device)
        parties = {
            steps.recorder.calls[launch]: party
            for pairs in found
            for party, launch in enumerate(pairs[-1])
        }

        def before_call(number: int) -> None:
            if number in parties:
                meeting.arrive(parties[number])

        again = traced_steps(trial, before_call=before_call)
        met, missed = meeting.counts()
        metrics = {"met": float(met), "missed": float(missed)}
        if not met and again.recorder.number_of_calls != steps.recorder.number_of_calls:
            message = "fresh instances make different calls, so that the handshake was misplaced"
            return Judgement(self.name, Verdict.INCONCLUSIVE, message=message, metrics=metrics)
        if not met:
            message = f"all of {missed} arrivals at a handshake waited in vain"
            return Judgement(self.name, Verdict.FAIL, Failure.SERIALISED, message, metrics)
        return passed(self.name, **metrics)
