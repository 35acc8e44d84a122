"""What a case asks for has happened: drafts were accepted and others rejected, graphs were
replayed, kernels of adapters were launched. An engine that quietly does without gives right answers
and shows nothing."""

from __future__ import annotations

from collections.abc import Iterator

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.engine.evidence import Evidence
from loragate.engine.requests import EngineCounts
from loragate.matrix.case import Case
from loragate.matrix.engine_case import Active, Graphs, Speculation
from loragate.oracles.engine.session import inapplicable, judged
from loragate.protocol import Trial


class Liveness:
    name = OracleName.LIVENESS

    def applies(self, trial: Trial) -> str | None:
        return inapplicable(trial)

    def judge(self, trial: Trial) -> Judgement:
        return judged(self.name, trial, lambda evidence: _judged(trial.case, evidence))


def _judged(case: Case, evidence: Evidence) -> Judgement:
    wanted = list(_wanted(case, evidence.counts))
    known = {what: count for what, count in wanted if count is not None}
    idle = [what for what, count in known.items() if count == 0]
    unknown = ", ".join(what for what, count in wanted if count is None)
    uncounted = f"the engine does not count {unknown}" if unknown else ""
    metrics = {what: float(count) for what, count in known.items()}
    if idle:
        message = f"none of these in a case that asks for them: {', '.join(idle)}"
        return Judgement(OracleName.LIVENESS, Verdict.FAIL, Failure.IDLE, message, metrics=metrics)
    if not known:
        reason = uncounted or "the case asks for no counts"
        return Judgement(OracleName.LIVENESS, Verdict.SKIP, message=reason)
    # what is known decides; the message says what was not looked at
    return Judgement(OracleName.LIVENESS, Verdict.PASS, message=uncounted, metrics=metrics)


def _wanted(case: Case, counts: EngineCounts) -> Iterator[tuple[str, int | None]]:
    if case.speculation is not Speculation.NONE:
        yield "drafts accepted", counts.drafts_accepted
        yield "drafts rejected", counts.drafts_rejected
    if case.graphs is not Graphs.NONE:
        yield "graphs replayed", counts.graphs_replayed
    if case.active is not Active.NONE:
        yield "kernels launched", counts.kernels_launched
