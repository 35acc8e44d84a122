"""Events of a run -> one verdict, one exit code, and the reasons. Pure; imports no torch.

Invariant: PASS means that everything that was planned ran, and passed or failed as listed.
A run in which anything is missing, skipped at run time or inconclusive does not pass.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from loragate.core.plural import counted
from loragate.core.verdict import EXIT_CODES, ExitCode, Verdict, worst
from loragate.events.log import EventLog
from loragate.events.model import (
    COMPILE_SITE,
    HOST_LEG,
    CompileResult,
    Event,
    Expected,
    HostTestFinished,
    Note,
    RunFinished,
    RunStarted,
)
from loragate.findings.ledger import VERDICTS, Line, State
from loragate.report.by_oracle import OracleCount, count_oracles
from loragate.report.counts import Count, count_results, total_of
from loragate.report.draws import DrawOutcome, draw_outcomes, in_draws
from loragate.report.host_tests import bad_host_tests, host_test_outcomes
from loragate.report.known import ledger_lines
from loragate.report.outcomes import (
    CaseOutcome,
    LegOutcome,
    case_outcomes,
    compile_outcomes,
    leg_outcomes,
)

_Found = TypeVar("_Found", RunStarted, RunFinished)

# a verdict, and the reason for it
Finding = tuple[Verdict, str]

# what the exit codes mean, as reports put it
EXIT_MEANINGS: Mapping[ExitCode, str] = {
    ExitCode.OK: "every expected case ran and passed",
    ExitCode.WRONG: "a result is not what it must be",
    ExitCode.INCOMPLETE: "nothing is known to be wrong, but not everything was judged",
    ExitCode.INFRASTRUCTURE: "the machine or the harness failed, not the kernels",
    ExitCode.USAGE: "the command line or a file of cases is not valid",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """`reasons` say why the verdict is not PASS, the most severe first; `of_run` are those of them
    that belong to no case, kernel, test or leg. `missing` are run ids that were planned and never
    started. `draws` is empty for a run that runs each case once. `ledger` is what the run showed of
    the findings that are listed about cases."""

    verdict: Verdict
    exit_code: ExitCode
    reasons: tuple[str, ...]
    of_run: tuple[Finding, ...]
    counts: tuple[Count, ...]
    oracles: tuple[OracleCount, ...]
    draws: tuple[DrawOutcome, ...]
    cases: tuple[CaseOutcome, ...]
    missing: tuple[str, ...]
    legs: tuple[LegOutcome, ...]
    compiles: tuple[CompileResult, ...]
    host_tests: tuple[HostTestFinished, ...]
    ledger: tuple[Line, ...]
    notes: tuple[str, ...]
    plan: RunStarted | None
    finished: RunFinished | None

    @property
    def total(self) -> Count:
        return total_of(self.counts)

    @property
    def known(self) -> tuple[CaseOutcome, ...]:
        """Cases that failed as listed and in no other way, in order of their ids."""
        return tuple(case for case in self.cases if case.is_known)

    @property
    def troubles(self) -> tuple[CaseOutcome, ...]:
        """Cases that did not pass, wrong answers first, else in order of their ids."""
        order = (Verdict.FAIL, Verdict.INFRA, Verdict.INCONCLUSIVE, Verdict.SKIP)
        return tuple(case for verdict in order for case in self.cases if case.verdict is verdict)

    @property
    def bad_host_tests(self) -> tuple[HostTestFinished, ...]:
        """Those that neither passed nor were skipped, failures first."""
        return bad_host_tests(self.host_tests)


def summarize(log: EventLog, *, problems: Sequence[str] = ()) -> Summary:
    """Judge a run. The order of the events does not matter.

    problems: what kept the record from being complete; with one, the run is no better than INFRA.
    """
    plan = _last(log.events, RunStarted)
    finished = _last(log.events, RunFinished)
    cases = case_outcomes(log.events)
    compiles = compile_outcomes(log.events)
    legs = leg_outcomes(log.events)
    host_tests = host_test_outcomes(log.events)
    ledger = ledger_lines(log.events)
    counts = count_results(plan, cases, compiles)
    draws = draw_outcomes(log.events)
    planned = {run_id for row in _expected(plan) for run_id in row.run_ids}
    missing = tuple(sorted(planned - {case.run_id for case in cases}))
    of_run = (
        *_ledger_findings(ledger),
        *_gaps(row for row in counts if row.site == COMPILE_SITE),
        *_run_findings(plan, finished),
        *((Verdict.INFRA, problem) for problem in problems),
    )
    findings = [
        *_case_findings(cases, draws),
        *_compile_findings(compiles),
        *_host_test_findings(host_tests),
        *_leg_findings(legs),
        *_without_tests(legs, host_tests),
        *_never_started(missing),
        *_gaps(row for row in counts if row.site != COMPILE_SITE),
        *_draw_gaps(draws),
        *of_run,
    ]
    verdict = worst([verdict for verdict, _ in findings] or [Verdict.PASS])
    return Summary(
        verdict=verdict,
        exit_code=EXIT_CODES[verdict],
        reasons=_by_gravity(findings),
        of_run=of_run,
        counts=counts,
        oracles=count_oracles(cases),
        draws=draws,
        cases=cases,
        missing=missing,
        legs=legs,
        compiles=compiles,
        host_tests=host_tests,
        ledger=ledger,
        notes=(*_part_of(plan), *_notes(log.events), *log.left_out),
        plan=plan,
        finished=finished,
    )


_CASE_TEXTS: Mapping[Verdict, str] = {
    Verdict.FAIL: "wrong",
    Verdict.INFRA: "stopped by the machine or the harness",
    Verdict.INCONCLUSIVE: "inconclusive",
    Verdict.SKIP: "skipped at run time",
}


def _case_findings(cases: Sequence[CaseOutcome], draws: Sequence[DrawOutcome]) -> Iterable[Finding]:
    tally = Counter(case.verdict for case in cases)
    for verdict, text in _CASE_TEXTS.items():
        if tally[verdict]:
            grave = Verdict.INCONCLUSIVE if verdict is Verdict.SKIP else verdict
            where = in_draws(outcome.draw for outcome in draws if outcome.has(verdict))
            yield grave, f"{counted(tally[verdict], 'case')} {text}{where}"


def _compile_findings(compiles: Sequence[CompileResult]) -> Iterable[Finding]:
    for result in compiles:
        if result.verdict is not Verdict.PASS:
            grave = Verdict.INCONCLUSIVE if result.verdict is Verdict.SKIP else result.verdict
            text = f"{result.kernel} for {result.arch} ({result.specialisation})"
            yield grave, f"compile {result.verdict}: {text}: {result.message}"


def _host_test_findings(tests: Sequence[HostTestFinished]) -> Iterable[Finding]:
    tally = Counter(test.verdict for test in bad_host_tests(tests))
    texts = {**_CASE_TEXTS, Verdict.FAIL: "failed"}
    for verdict, number in tally.items():
        yield verdict, f"{counted(number, 'host test')} {texts[verdict]}"


def _leg_findings(legs: Sequence[LegOutcome]) -> Iterable[Finding]:
    for leg in legs:
        if leg.verdict is not Verdict.PASS:
            grave = Verdict.INCONCLUSIVE if leg.verdict is Verdict.SKIP else leg.verdict
            detail = f": {leg.message}" if leg.message else ""
            yield grave, f"leg {leg.name}: {leg.verdict}{detail}"


def _without_tests(
    legs: Sequence[LegOutcome], tests: Sequence[HostTestFinished]
) -> Iterable[Finding]:
    """Nobody plans how many host tests there are, but their leg has to judge one."""
    found = [test.verdict for test in tests if test.leg == HOST_LEG]
    if any(verdict is not Verdict.SKIP for verdict in found):
        return
    for leg in legs:
        if leg.name == HOST_LEG and leg.verdict is Verdict.PASS:
            why = "every test was skipped" if found else "no test was collected"
            yield Verdict.INCONCLUSIVE, f"leg {leg.name}: {why}"


def _ledger_findings(ledger: Iterable[Line]) -> Iterable[Finding]:
    for line in ledger:
        if line.state is State.STALE:
            entry = line.finding
            yield (
                VERDICTS[line.state],
                f"finding {entry.id} stopped reproducing: remove it or narrow its version range, "
                f"{entry.subject} {entry.versions} ({line.observation.text})",
            )


def _never_started(missing: Sequence[str]) -> Iterable[Finding]:
    if missing:
        what = counted(len(missing), "planned case was", "planned cases were")
        yield Verdict.INCONCLUSIVE, f"{what} never started"


def _gaps(counts: Iterable[Count]) -> Iterable[Finding]:
    for count in counts:
        if count.missing:
            where = f"{count.subject}/{count.site}"
            yield (
                Verdict.INCONCLUSIVE,
                f"{where}: {count.executed} of {count.expected} expected executed",
            )


def _draw_gaps(draws: Sequence[DrawOutcome]) -> Iterable[Finding]:
    short: dict[tuple[str, str], list[int]] = defaultdict(list)
    for outcome in draws:
        for count in outcome.counts:
            if count.missing:
                short[count.subject, count.site].append(outcome.draw)
    for (subject, site), numbers in sorted(short.items()):
        yield (
            Verdict.INCONCLUSIVE,
            f"{subject}/{site}: fewer executed than expected{in_draws(numbers)}",
        )


def _run_findings(plan: RunStarted | None, finished: RunFinished | None) -> Iterable[Finding]:
    if plan is None:
        yield Verdict.INCONCLUSIVE, "no plan is recorded, so nothing shows what is missing"
    elif not any(row.run_ids for row in plan.expected):
        yield Verdict.INCONCLUSIVE, "the plan expects no case, so nothing was shown about any"
    if finished is None:
        yield Verdict.INCONCLUSIVE, "the run did not come to its end"


def _by_gravity(findings: Sequence[Finding]) -> tuple[str, ...]:
    order = (Verdict.FAIL, Verdict.INFRA, Verdict.INCONCLUSIVE)
    return tuple(dict.fromkeys(text for verdict in order for v, text in findings if v is verdict))


def _expected(plan: RunStarted | None) -> tuple[Expected, ...]:
    return plan.expected if plan else ()


def _last(events: Sequence[Event], kind: type[_Found]) -> _Found | None:
    found = [event for event in events if isinstance(event, kind)]
    return max(found, key=repr) if found else None


def _part_of(plan: RunStarted | None) -> Iterable[str]:
    if plan is not None and plan.shard is not None:
        shard = f"{plan.shard.index}/{plan.shard.count}"
        yield f"this is shard {shard}; `loragate merge` judges the whole run"


def _notes(events: Iterable[Event]) -> Iterable[str]:
    return dict.fromkeys(event.text for event in events if isinstance(event, Note))
