"""The verdict of one trial, and what the listed findings excuse of it. Pure; imports no torch.

Invariant: a listed finding excuses the judgements that it names, up to the size that it lists, and
nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from loragate.core.verdict import Judgement, Verdict, worst
from loragate.events.model import CaseFinished, Event, KnownFinding
from loragate.findings.ledger import (
    Finding,
    Judged,
    Line,
    audit,
    exceeded_finding,
    known_finding,
    observe_cases,
)

# judgements with one of these do not count against a case
HARMLESS = frozenset({Verdict.PASS, Verdict.SKIP})


def listed_findings(events: Iterable[Event]) -> tuple[KnownFinding, ...]:
    """The findings that were listed when the run started, each once, sorted by id."""
    listed = {event for event in events if isinstance(event, KnownFinding)}
    return tuple(sorted(listed, key=lambda entry: (entry.finding.id, repr(entry))))


def ledger_lines(events: Iterable[Event]) -> tuple[Line, ...]:
    """What this run showed of each listed finding."""
    events = tuple(events)
    ends = [event for event in events if isinstance(event, CaseFinished)]
    judged = [Judged(end.run_id, end.draw, j) for end in ends for j in end.judgements]
    judged.sort(key=repr)
    listed = listed_findings(events)
    return tuple(
        line
        # entries about several subjects have one id
        for e in listed
        for line in audit([e.finding], e.version, observe_cases([e.finding], judged))
    )


def known_in(case: CaseFinished, listed: Iterable[KnownFinding]) -> tuple[Finding, ...]:
    """The listed findings that a trial shows."""
    listed = tuple(listed)
    found = (_known(case.run_id, judgement, listed) for judgement in case.judgements)
    return tuple(dict.fromkeys(finding for finding in found if finding is not None))


def excused(case: CaseFinished, listed: Iterable[KnownFinding]) -> CaseFinished:
    """The trial as it would be if the judgements that are listed had passed."""
    listed = tuple(listed)
    case = explained(case, listed)
    if not known_in(case, listed):
        return case
    judgements = tuple(
        Judgement(j.oracle, Verdict.PASS) if _known(case.run_id, j, listed) else j
        for j in case.judgements
    )
    # a failure outside of the oracles keeps its verdict; otherwise the judgements decide
    by_oracles = case.verdict is Verdict.FAIL and case.failure is None
    verdict = Verdict.PASS if by_oracles else case.verdict
    return replace(case, verdict=verdict, judgements=judgements)


def explained(case: CaseFinished, listed: Iterable[KnownFinding]) -> CaseFinished:
    """The trial with messages that say where a judgement exceeds what a finding lists."""
    listed = tuple(listed)
    judgements = tuple(_explained(case.run_id, j, listed) for j in case.judgements)
    return case if judgements == case.judgements else replace(case, judgements=judgements)


def standing(case: CaseFinished) -> Verdict:
    """The verdict of a trial, never better than its own evidence."""
    against = [j.verdict for j in case.judgements if j.verdict not in HARMLESS]
    verdict = worst([case.verdict, *against])
    failed = case.failure or next((j.failure for j in case.judgements if j.failure), None)
    if failed is not None and verdict is not Verdict.FAIL:
        # too little memory or a lost device is neither a skip nor a pass
        return Verdict.INFRA
    if verdict is Verdict.PASS and all(j.verdict is not Verdict.PASS for j in case.judgements):
        return Verdict.INCONCLUSIVE
    return verdict


def _known(run_id: str, judgement: Judgement, listed: Iterable[KnownFinding]) -> Finding | None:
    found = (known_finding([e.finding], e.version, run_id, judgement) for e in listed)
    return next((finding for finding in found if finding is not None), None)


def _explained(run_id: str, judgement: Judgement, listed: tuple[KnownFinding, ...]) -> Judgement:
    if _known(run_id, judgement, listed):
        return judgement
    beyond = (exceeded_finding([e.finding], e.version, run_id, judgement) for e in listed)
    found = next((one for one in beyond if one is not None), None)
    if found is None:
        return judgement
    finding, excess = found
    note = f"exceeds what finding {finding.id} lists: {excess}"
    return replace(judgement, message=f"{note}\n{judgement.message}" if judgement.message else note)
