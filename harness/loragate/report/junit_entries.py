"""What a JUnit document lists of a run: an entry for each case, kernel, host test and skip, and for
whatever else kept the run from passing. Pure.

Invariant: if the run did not pass, at least one entry is a failure or an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from loragate.core.verdict import EXIT_CODES, Judgement, Verdict
from loragate.events.model import COMPILE_SITE, CompileResult, Expected, HostTestFinished, Skipped
from loragate.report.host_tests import rerun_command
from loragate.report.known import HARMLESS
from loragate.report.outcomes import CaseOutcome, LegOutcome
from loragate.report.summary import Summary
from loragate.report.text import headline, one_line, shortened
from loragate.report.wording import figures, outcome_name, place

_LEGS = "gate.legs"
_RUN = "gate.run"
_MESSAGE_LIMIT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """`kind` and `detail` belong to a failure or an error; `output` is shown of a pass as well."""

    suite: str
    name: str
    verdict: Verdict
    leg: str = ""
    message: str = ""
    kind: str = ""
    detail: str = ""
    output: str = ""
    time_s: float = 0.0
    properties: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_red(self) -> bool:
        return self.verdict not in HARMLESS


def entries_of(summary: Summary) -> tuple[Entry, ...]:
    found = (*_results(summary), *_run(summary))
    entries = (*found, *_legs(summary.legs, found))
    if summary.verdict is Verdict.PASS or any(entry.is_red for entry in entries):
        return entries
    # no entry shows why: a reader must not take the run for a good one
    return (*entries, _of_run("verdict", summary.verdict, "\n".join(summary.reasons)))


def _results(summary: Summary) -> Iterator[Entry]:
    rows = summary.plan.expected if summary.plan else ()
    owners = {run_id: row for row in rows for run_id in row.run_ids}
    compiling = {row.subject: row.leg for row in rows if row.site == COMPILE_SITE}
    for case in summary.cases:
        owner = owners.get(case.run_id)
        yield _case(case, owner.leg if owner else "")
    for result in summary.compiles:
        yield _compile(result, compiling.get(result.subject, ""))
    yield from map(_host_test, summary.host_tests)
    yield from (_missing(run_id, owners[run_id]) for run_id in summary.missing)
    yield from map(_skipped, summary.plan.skipped if summary.plan else ())


def _case(case: CaseOutcome, leg: str) -> Entry:
    properties = {"verdict": outcome_name(case), "subject": case.subject}
    if case.known:
        properties["finding"] = ", ".join(finding.id for finding in case.known)
    if case.shown:
        properties |= {
            "seed": str(case.shown.seed),
            "draw": str(case.shown.draw),
            "repeat": str(case.shown.repeat),
            "worker": case.shown.worker,
        }
    replay = one_line(f"replay: {case.replay}")
    against = [case.message, *map(_evidence, case.evidence), replay]
    return Entry(
        suite=f"{case.subject}.{case.site}",
        name=_short(case.run_id, case.subject, case.site),
        verdict=_owed(case.verdict),
        leg=leg,
        message=_case_message(case),
        kind=case.failure or case.verdict,
        detail="\n".join(filter(None, against)),
        output="\n".join([*map(_evidence, case.judgements), replay]),
        time_s=case.shown.duration_s if case.shown else 0.0,
        properties=properties,
    )


def _case_message(case: CaseOutcome) -> str:
    """Kind, place, figures and the first line of the message of what decided."""
    decisive = next((j for j in case.evidence if j.verdict is case.verdict), None)
    facts = (place(decisive), figures(decisive)) if decisive else ()
    parts = (case.failure or case.verdict, *facts, headline(case.message))
    return shortened("; ".join(filter(None, parts)), _MESSAGE_LIMIT)


def _evidence(judgement: Judgement) -> str:
    kind = f" {judgement.failure}" if judgement.failure else ""
    parts = (place(judgement), figures(judgement), judgement.message)
    facts = "; ".join(filter(None, parts))
    return f"{judgement.oracle}: {judgement.verdict}{kind}{f': {facts}' if facts else ''}"


def _compile(result: CompileResult, leg: str) -> Entry:
    return Entry(
        suite=f"{result.subject}.{COMPILE_SITE}",
        name=f"{result.kernel}.{result.specialisation}.{result.arch}",
        verdict=_owed(result.verdict),
        leg=leg,
        message=_short_headline(result.message),
        kind=result.verdict,
        detail=result.message,
        properties={
            "verdict": result.verdict.value,
            "subject": result.subject,
            "compiled": str(result.compiled).lower(),
        },
    )


def _host_test(test: HostTestFinished) -> Entry:
    rerun = one_line(f"rerun: {rerun_command(test)}")
    where = one_line(f"at {test.place}") if test.place else ""
    return Entry(
        suite=test.leg,
        name=test.test,
        verdict=test.verdict,
        leg=test.leg,
        message=shortened("; ".join(filter(None, (headline(test.message), where))), _MESSAGE_LIMIT),
        kind=test.verdict,
        detail="\n".join(filter(None, (test.detail or test.message, where, rerun))),
        output="\n".join(filter(None, (rerun, test.output))),
        time_s=test.duration_s,
        properties={"verdict": test.verdict.value},
    )


def _missing(run_id: str, row: Expected) -> Entry:
    return Entry(
        suite=f"{row.subject}.{row.site}",
        name=_short(run_id, row.subject, row.site),
        verdict=Verdict.INCONCLUSIVE,
        leg=row.leg,
        message="planned, but never started",
        kind=Verdict.INCONCLUSIVE,
    )


def _skipped(skipped: Skipped) -> Entry:
    return Entry(
        suite=f"{skipped.subject}.{skipped.site}",
        name=_short(skipped.run_id, skipped.subject, skipped.site),
        verdict=Verdict.SKIP,
        message=_short_headline(skipped.reason),
        properties={"verdict": Verdict.SKIP.value, "subject": skipped.subject},
    )


def _run(summary: Summary) -> Iterator[Entry]:
    for verdict, reason in summary.of_run:
        yield _of_run(reason, verdict, reason)


def _of_run(name: str, verdict: Verdict, text: str) -> Entry:
    return Entry(
        suite=_RUN,
        name=shortened(headline(name), _MESSAGE_LIMIT),
        verdict=_owed(verdict),
        message=_short_headline(text),
        kind=verdict,
        detail=text,
    )


def _legs(legs: Iterable[LegOutcome], entries: Iterable[Entry]) -> Iterator[Entry]:
    """Legs that broke by themselves: the others show in their entries."""
    shown = {(entry.leg, entry.verdict) for entry in entries}
    for leg in legs:
        if leg.verdict is Verdict.PASS or _is_explained(leg, (leg.name, leg.verdict) in shown):
            continue
        end = leg.finished
        ended = f"{leg.verdict}, exit code {end.exit_code}" if end else leg.verdict.value
        log = one_line(f"log: {end.log_path}") if end and end.log_path else ""
        yield Entry(
            suite=_LEGS,
            name=leg.name,
            verdict=_owed(leg.verdict),
            message=_short_headline(leg.message or ended),
            kind=leg.verdict,
            detail="\n".join(filter(None, (leg.message, ended, log))),
            time_s=end.duration_s if end else 0.0,
            properties={"verdict": leg.verdict.value},
        )


def _is_explained(leg: LegOutcome, shown: bool) -> bool:
    """Whether the leg ended by itself, as its entries make it end."""
    end = leg.finished
    if not shown or end is None or end.exit_code != EXIT_CODES[leg.verdict].value:
        return False
    # the gate gives a reason of its own where it stopped a leg
    stopped = bool(leg.message)
    return leg.verdict is Verdict.FAIL or (leg.verdict is Verdict.INCONCLUSIVE and not stopped)


def _owed(verdict: Verdict) -> Verdict:
    """A result that was expected and is skipped is missing; only a planned skip is one."""
    return Verdict.INCONCLUSIVE if verdict is Verdict.SKIP else verdict


def _short(run_id: str, subject: str, site: str) -> str:
    # the name of the suite holds the rest
    return run_id.removeprefix(f"{subject}.{site}.")


def _short_headline(text: str) -> str:
    return shortened(headline(text), _MESSAGE_LIMIT)
