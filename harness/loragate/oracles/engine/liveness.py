"""What a case asks for has happened: drafts were accepted and others rejected, graphs were
replayed, kernels of adapters were launched, and those of no other implementation. An engine that
quietly does without gives right answers and shows nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeAlias

from loragate.core.sequential import Decision
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.engine.evidence import Evidence
from loragate.engine.ngrams import is_drafted_right
from loragate.engine.properties import liveness
from loragate.engine.requests import EngineCounts
from loragate.matrix.case import Case
from loragate.matrix.engine_case import Active, Ends, Graphs, Speculation, Weights
from loragate.oracles.engine.session import inapplicable, judged
from loragate.protocol import Trial

# the tokens of a prompt and those of its answer
Text: TypeAlias = tuple[Sequence[int], Sequence[int]]


class Liveness:
    name = OracleName.LIVENESS

    def applies(self, trial: Trial) -> str | None:
        return inapplicable(trial)

    def judge(self, trial: Trial) -> Judgement:
        return judged(self.name, trial, partial(_of_evidence, trial.case))


def _of_evidence(case: Case, found: Evidence) -> Judgement:
    answers = zip(found.world.batch, found.answers.mixed, strict=True)
    texts = [(asked.request.prompt, answer.tokens) for asked, answer in answers]
    return _judged(case, found.answers.counts, texts)


def _judged(case: Case, counts: EngineCounts, texts: Sequence[Text] = ()) -> Judgement:
    name, wanted = OracleName.LIVENESS, dict(_wanted(case, counts, texts))
    if others := (counts.others_launched or 0) + (counts.others_captured or 0):
        message = f"another implementation's kernels served layers: {others} ran or were captured"
        return Judgement(name, Verdict.FAIL, Failure.IDLE, message)
    if not wanted:
        return Judgement(name, Verdict.SKIP, message="the case asks for no counts")
    live = liveness(wanted)
    message = "; ".join(live.details)
    metrics = {what: float(count) for what, count in wanted.items() if count is not None}
    if live.decision is Decision.FAIL:
        return Judgement(name, Verdict.FAIL, Failure.IDLE, message, metrics)
    verdict = Verdict.PASS if live.decision is Decision.PASS else Verdict.SKIP
    return Judgement(name, verdict, message=message, metrics=metrics)


def _wanted(
    case: Case, counts: EngineCounts, texts: Sequence[Text]
) -> Iterator[tuple[str, int | None]]:
    if case.speculation is not Speculation.NONE:
        if not _may_lack_right_drafts(case, texts):
            yield "drafts accepted", counts.drafts_accepted
        yield "drafts rejected", counts.drafts_rejected
    if case.graphs is not Graphs.NONE and not _may_lack_even_steps(case):
        yield "graphs replayed", counts.graphs_replayed
    if case.active is not Active.NONE:
        yield "kernels launched", _launched(counts)


def _may_lack_right_drafts(case: Case, texts: Sequence[Text]) -> bool:
    """Random texts repeat themselves by accident: in one of 30 there was no place where whatever
    drafter must be right, and the prompt lookup of transformers never was."""
    if case.speculation is not Speculation.NGRAM or case.weights is not Weights.RANDOM:
        return False
    return not any(is_drafted_right(prompt, answer) for prompt, answer in texts)


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
