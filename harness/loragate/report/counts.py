"""Expected and executed results, one row a site of a subject. Pure; imports no torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from loragate.core.verdict import Verdict
from loragate.events.model import COMPILE_SITE, CompileResult, RunStarted
from loragate.report.outcomes import JUDGED, CaseOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Results of one site of one subject.

    `executed` were judged: passed + known + failed + inconclusive, where `known` are those that
    failed as the ledger of findings lists it. `skipped` are those that the plan left out and those
    that were skipped at run time; only the latter are among the expected. A case counts once,
    whatever the number of its draws and repeats.
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


def count_results(
    plan: RunStarted | None, cases: Sequence[CaseOutcome], compiles: Sequence[CompileResult]
) -> tuple[Count, ...]:
    """One row for every (subject, site) that was planned or has results, sorted."""
    expected: Counter[tuple[str, str]] = Counter()
    for row in plan.expected if plan else ():
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


def total_of(counts: Sequence[Count]) -> Count:
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
