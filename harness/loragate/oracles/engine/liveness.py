"""What a case asks for has happened: drafts were accepted and others rejected, graphs were
replayed, kernels of adapters were launched, and those of no other implementation. An engine that
quietly does without gives right answers and shows nothing."""

from __future__ import annotations

from collections.abc import Iterator

from loragate.core.sequential import Decision
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.engine.properties import liveness
from loragate.engine.requests import EngineCounts
from loragate.matrix.case import Case
from loragate.matrix.engine_case import Active, Ends, Graphs, Speculation, Weights
from loragate.oracles.engine.session import inapplicable, judged
from loragate.protocol import Trial


class Liveness:
    name = OracleName.LIVENESS

    def applies(self, trial: Trial) -> str | None:
        return inapplicable(trial)

    def judge(self, trial: Trial) -> Judgement:
        return judged(self.name, trial, lambda found: _judged(trial.case, found.answers.counts))


def _judged(case: Case, counts: EngineCounts) -> Judgement:
    name, wanted = OracleName.LIVENESS, dict(_wanted(case, counts))
    if others := (counts.others_launched or 0) + (counts.others_captured or 0):
        message = f"another implementation's kernels served layers: {others} ran or were captured"
        return Judgement(name, Verdict.FAIL, Failure.IDLE, message)
    if not wanted:
        return Judgement(name, Verdict.SKIP, message="the case asks for no counts")
    found = liveness(wanted)
    message = "; ".join(found.details)
    metrics = {what: float(count) for what, count in wanted.items() if count is not None}
    if found.decision is Decision.FAIL:
        return Judgement(name, Verdict.FAIL, Failure.IDLE, message, metrics)
    verdict = Verdict.PASS if found.decision is Decision.PASS else Verdict.SKIP
    return Judgement(name, verdict, message=message, metrics=metrics)


def _wanted(case: Case, counts: EngineCounts) -> Iterator[tuple[str, int | None]]:
    if case.speculation is not Speculation.NONE:
        yield "drafts accepted", counts.drafts_accepted
        yield "drafts rejected", counts.drafts_rejected
    if case.graphs is not Graphs.NONE and not _may_lack_even_steps(case):
        yield "graphs replayed", counts.graphs_replayed
    if case.active is not Active.NONE:
        yield "kernels launched", _launched(counts)


def _may_lack_even_steps(case: Case) -> bool:
    """A graph of decode steps is for as many drafts of each request, in vLLM: in 3 of 20 random
    texts n-grams never found them for all requests of a step. Answers that end early have fewer
    such steps."""
    if case.graphs is not Graphs.FULL_DECODE or case.speculation is not Speculation.NGRAM:
        return False
    return case.weights is Weights.RANDOM or case.ends is Ends.STOP


def _launched(counts: EngineCounts) -> int | None:
    """By a call, or by a graph that has them."""
    if counts.kernels_launched == 0 and counts.graphs_replayed:
        return counts.kernels_captured
    return counts.kernels_launched
