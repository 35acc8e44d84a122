"""Events of a run -> one verdict, one exit code, and the reasons. Pure; imports no torch.

Invariant: PASS means that everything that was planned ran, and passed or failed as listed.
Whatever is missing, skipped at run time or undecided keeps a run from being green.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from loragate.findings.ledger import VERDICTS, Line, State
from loragate.report.events import (
    COMPILE_SITE,
    CompileResult,
    Event,
    Expected,
    Note,
    RunFinished,
    RunStarted,
)
from loragate.report.log import EventLog
from loragate.report.outcomes import (
    JUDGED,
    CaseOutcome,
    LegOutcome,
    case_outcomes,
    compile_outcomes,
    ledger_lines,
    leg_outcomes,
)
from loragate.verdict import ExitCode, Verdict, worst

_Found = TypeVar("_Found", RunStarted, RunFinished)

EXIT_CODES: Mapping[Verdict, ExitCode] = {
    Verdict.PASS: ExitCode.OK,
    Verdict.FAIL: ExitCode.WRONG,
    Verdict.INFRA: ExitCode.INFRASTRUCTURE,
    Verdict.INCONCLUSIVE: ExitCode.INCOMPLETE,
    Verdict.SKIP: ExitCode.INCOMPLETE,
}

# what the exit codes mean, for people
EXIT_MEANINGS: Mapping[ExitCode, str] = {
    ExitCode.OK: "every expected case ran and passed",
    ExitCode.WRONG: "a result is not what it must be",
    ExitCode.INCOMPLETE: "nothing is known to be wrong, but not everything was judged",
    ExitCode.INFRASTRUCTURE: "the machine or the harness failed, not the kernels",
    ExitCode.USAGE: "the command line or a file of cases is not valid",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Results of one site of one subject.

    `executed` were judged: passed + known + failed + inconclusive, where `known` are those that
    failed as the ledger lists it. `skipped` are those that the plan
    left out and those that were skipped at run time; only the latter are among the expected.
    """

    subject: str
    site: str
    expected: int
    executed: int
    passed: int
    known: int
    failed: int
    inconclusive: int
    infra: int
    skipped: int

    @property
    def missing(self) -> int:
        return max(0, self.expected - self.executed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """`reasons` say why the verdict is not PASS, the gravest first; `missing` are the run ids
    that were planned and of which nothing was heard; `ledger` is what became of the findings that
    are listed about cases."""

    verdict: Verdict
    exit_code: ExitCode
    reasons: tuple[str, ...]
    counts: tuple[Count, ...]
    cases: tuple[CaseOutcome, ...]
    missing: tuple[str, ...]
    legs: tuple[LegOutcome, ...]
    compiles: tuple[CompileResult, ...]
    ledger: tuple[Line, ...]
    notes: tuple[str, ...]
    plan: RunStarted | None
    finished: RunFinished | None

    @property
    def total(self) -> Count:
        return _total(self.counts)

    @property
    def known(self) -> tuple[CaseOutcome, ...]:
        """Cases that failed as listed and in no other way, in order of their ids."""
        return tuple(case for case in self.cases if case.is_known)

    @property
    def troubles(self) -> tuple[CaseOutcome, ...]:
        """Cases that did not pass, wrong answers first, else in order of their ids."""
        order = (Verdict.FAIL, Verdict.INFRA, Verdict.INCONCLUSIVE, Verdict.SKIP)
        return tuple(case for verdict in order for case in self.cases if case.verdict is verdict)


def summarize(log: EventLog) -> Summary:
    """Judge a run. The order of the events does not matter."""
    plan = _last(log.events, RunStarted)
    finished = _last(log.events, RunFinished)
    cases = case_outcomes(log.events)
    compiles = compile_outcomes(log.events)
    legs = leg_outcomes(log.events)
    ledger = ledger_lines(log.events)
    counts = _counts(plan, cases, compiles)
    planned = {run_id for row in _expected(plan) for run_id in row.run_ids}
    missing = tuple(sorted(planned - {case.run_id for case in cases}))
    findings = [
        *_case_findings(cases),
        *_compile_findings(compiles),
        *_leg_findings(legs),
        *_ledger_findings(ledger),
        *_gaps(counts, missing),
        *_run_findings(plan, finished),
    ]
    verdict = worst([verdict for verdict, _ in findings] or [Verdict.PASS])
    return Summary(
        verdict=verdict,
        exit_code=EXIT_CODES[verdict],
        reasons=_by_gravity(findings),
        counts=counts,
        cases=cases,
        missing=missing,
        legs=legs,
        compiles=compiles,
        ledger=ledger,
        notes=(*_notes(log.events), *_left_out(log)),
        plan=plan,
        finished=finished,
    )


Finding = tuple[Verdict, str]

_CASE_WORDS: Mapping[Verdict, str] = {
    Verdict.FAIL: "wrong",
    Verdict.INFRA: "stopped by the machine or the harness",
    Verdict.INCONCLUSIVE: "undecided",
    Verdict.SKIP: "skipped at run time",
}


def _case_findings(cases: Sequence[CaseOutcome]) -> Iterable[Finding]:
    tally = Counter(case.verdict for case in cases)
    for verdict, words in _CASE_WORDS.items():
        if tally[verdict]:
            noun = "case" if tally[verdict] == 1 else "cases"
            grave = Verdict.INCONCLUSIVE if verdict is Verdict.SKIP else verdict
            yield grave, f"{tally[verdict]} {noun} {words}"


def _compile_findings(compiles: Sequence[CompileResult]) -> Iterable[Finding]:
    for result in compiles:
        if result.verdict is not Verdict.PASS:
            grave = Verdict.INCONCLUSIVE if result.verdict is Verdict.SKIP else result.verdict
            text = f"{result.kernel} for {result.arch} ({result.specialisation})"
            yield grave, f"compile {result.verdict}: {text}: {result.message}"


def _leg_findings(legs: Sequence[LegOutcome]) -> Iterable[Finding]:
    for leg in legs:
        if leg.verdict is not Verdict.PASS:
            grave = Verdict.INCONCLUSIVE if leg.verdict is Verdict.SKIP else leg.verdict
            detail = f": {leg.message}" if leg.message else ""
            yield grave, f"leg {leg.name}: {leg.verdict}{detail}"


def _ledger_findings(ledger: Iterable[Line]) -> Iterable[Finding]:
    for line in ledger:
        if line.state is State.STALE:
            entry = line.finding
            yield (
                VERDICTS[line.state],
                f"finding {entry.id} stopped reproducing: remove it or narrow its version range, "
                f"{entry.subject} {entry.versions} ({line.observation.text})",
            )


def _gaps(counts: Sequence[Count], missing: Sequence[str]) -> Iterable[Finding]:
    if missing:
        noun = "planned case was" if len(missing) == 1 else "planned cases were"
        yield Verdict.INCONCLUSIVE, f"{len(missing)} {noun} never started"
    for count in counts:
        if count.missing:
            where = f"{count.subject}/{count.site}"
            yield (
                Verdict.INCONCLUSIVE,
                f"{where}: {count.executed} of {count.expected} expected executed",
            )


def _run_findings(plan: RunStarted | None, finished: RunFinished | None) -> Iterable[Finding]:
    if plan is None:
        yield Verdict.INCONCLUSIVE, "no plan is recorded, so nothing can be complete"
    elif sum(row.count for row in plan.expected) == 0:
        yield Verdict.INCONCLUSIVE, "the plan expects nothing, so nothing was shown"
    if finished is None:
        yield Verdict.INCONCLUSIVE, "the run did not come to its end"


def _counts(
    plan: RunStarted | None, cases: Sequence[CaseOutcome], compiles: Sequence[CompileResult]
) -> tuple[Count, ...]:
    """One row for every (subject, site) that was planned or heard of, sorted."""
    expected: Counter[tuple[str, str]] = Counter()
    for row in _expected(plan):
        expected[row.subject, row.site] += row.count
    found: dict[tuple[str, str], Counter[Verdict]] = defaultdict(Counter)
    for case in cases:
        found[case.subject, case.site][case.verdict] += 1
    for result in compiles:
        found[result.subject, COMPILE_SITE][result.verdict] += 1
    left_out = Counter((s.subject, s.site) for s in (plan.skipped if plan else ()))
    known = Counter((case.subject, case.site) for case in cases if case.is_known)
    keys = sorted(expected.keys() | found.keys() | left_out.keys())
    return tuple(_count(key, expected[key], found[key], left_out[key], known[key]) for key in keys)


def _count(
    key: tuple[str, str], expected: int, found: Counter[Verdict], left_out: int, known: int
) -> Count:
    subject, site = key
    return Count(
        subject=subject,
        site=site,
        expected=expected,
        executed=sum(found[verdict] for verdict in JUDGED),
        passed=found[Verdict.PASS] - known,
        known=known,
        failed=found[Verdict.FAIL],
        inconclusive=found[Verdict.INCONCLUSIVE],
        infra=found[Verdict.INFRA],
        skipped=found[Verdict.SKIP] + left_out,
    )


def _total(counts: Sequence[Count]) -> Count:
    return Count(
        subject="total",
        site="",
        expected=sum(count.expected for count in counts),
        executed=sum(count.executed for count in counts),
        passed=sum(count.passed for count in counts),
        known=sum(count.known for count in counts),
        failed=sum(count.failed for count in counts),
        inconclusive=sum(count.inconclusive for count in counts),
        infra=sum(count.infra for count in counts),
        skipped=sum(count.skipped for count in counts),
    )


def _by_gravity(findings: Sequence[Finding]) -> tuple[str, ...]:
    order = (Verdict.FAIL, Verdict.INFRA, Verdict.INCONCLUSIVE)
    return tuple(dict.fromkeys(text for verdict in order for v, text in findings if v is verdict))


def _expected(plan: RunStarted | None) -> tuple[Expected, ...]:
    return plan.expected if plan else ()


def _last(events: Sequence[Event], kind: type[_Found]) -> _Found | None:
    found = [event for event in events if isinstance(event, kind)]
    return max(found, key=repr) if found else None


def _notes(events: Iterable[Event]) -> Iterable[str]:
    return dict.fromkeys(event.text for event in events if isinstance(event, Note))


def _left_out(log: EventLog) -> Iterable[str]:
    for number, what in (
        (log.unknown, "of a kind that this version does not know"),
        (log.damaged, "torn or damaged"),
        (log.foreign, "of another run"),
    ):
        if number:
            yield f"{number} records {what} were left out"
