"""One self-contained page for a run: no network, no framework, readable in light and dark.

The template only places what is prepared here, and escapes whatever comes from a run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from loragate.core.checkout import Tree
from loragate.core.verdict import Judgement, Verdict
from loragate.findings.ledger import Line
from loragate.report.by_oracle import OracleTable, oracle_table
from loragate.report.heatmap import GUTTER, ROW, Band, bands, tone
from loragate.report.kinds import Kind, kinds_of_trouble
from loragate.report.outcomes import CaseOutcome
from loragate.report.resources import ResourceTable, resource_table
from loragate.report.summary import EXIT_MEANINGS, Summary
from loragate.report.template import template
from loragate.report.text import headline, printable
from loragate.report.wording import (
    KNOWN,
    alike,
    bad_trials,
    limits,
    multiple,
    others,
    place,
    ratio,
)

_TITLES: Mapping[Verdict, str] = {
    Verdict.PASS: "Passed",
    Verdict.FAIL: "Wrong",
    Verdict.INCONCLUSIVE: "Incomplete",
    Verdict.SKIP: "Incomplete",
    Verdict.INFRA: "Infrastructure failure",
}
_CASES_OF_A_KIND = 2
# decades that the scale of error over threshold shows to either side of the threshold
_DECADES = 3


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the bar of results; `share` is a percentage of all that was expected."""

    label: str
    tone: str
    number: int
    share: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """One judgement, or several that read the same.

    `mark` is the position of the error on a logarithmic scale from 0 to 100 with the threshold at
    50. `headline` is the first line of the message, `stack` is the rest of it.
    """

    oracles: tuple[str, ...]
    judgement: Judgement
    headline: str
    stack: str
    tone: str
    multiple: str
    limits: tuple[tuple[str, str], ...]
    mark: float | None
    place: str
    others: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Trouble:
    """A case that did not pass. `passed` are the oracles that passed it; `trials` says which of
    several trials did not pass, "" if there was one."""

    case: CaseOutcome
    axes: tuple[tuple[str, str], ...]
    evidence: tuple[Evidence, ...]
    passed: tuple[str, ...]
    trials: str
    headline: str
    stack: str


@dataclass(frozen=True, slots=True)
class TroubleKind:
    """`shown` cases are visible, `folded` ones of the same kind are behind a click."""

    kind: Kind
    shown: tuple[Trouble, ...]
    folded: tuple[Trouble, ...]


@dataclass(frozen=True, slots=True)
class ListedFinding:
    """One entry of the ledger, and the cases that failed as it lists and in no other way."""

    line: Line
    cases: tuple[Trouble, ...]


@dataclass(frozen=True, slots=True)
class SkipGroup:
    reason: str
    run_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Page:
    summary: Summary
    title: str
    meaning: str
    segments: tuple[Segment, ...]
    kinds: tuple[TroubleKind, ...]
    ledger: tuple[ListedFinding, ...]
    bands: tuple[Band, ...]
    judged: OracleTable
    resources: ResourceTable | None
    skips: tuple[SkipGroup, ...]
    environment: tuple[tuple[str, str], ...]
    leg_seconds: float


def render_html(summary: Summary) -> str:
    """The whole page as text."""
    return template().render(page=_page(summary), gutter=GUTTER, row=ROW)


def _page(summary: Summary) -> Page:
    ends = [leg.finished.duration_s for leg in summary.legs if leg.finished]
    return Page(
        summary=summary,
        title=_TITLES[summary.verdict],
        meaning=EXIT_MEANINGS[summary.exit_code],
        segments=_segments(summary),
        kinds=tuple(map(_kind, kinds_of_trouble(summary.troubles))),
        ledger=_ledger(summary),
        bands=bands(summary),
        judged=oracle_table(summary.oracles),
        resources=resource_table(summary.compiles),
        skips=_skips(summary),
        environment=_environment(summary),
        leg_seconds=max(ends, default=0.0),
    )


def _segments(summary: Summary) -> tuple[Segment, ...]:
    total = summary.total
    parts = [
        ("passed", "calm", total.passed),
        (KNOWN, KNOWN, total.known),
        ("failed", "alarm", total.failed),
        ("inconclusive", "inconclusive", total.inconclusive),
        ("infra", "infra", total.infra),
    ]
    seen = sum(number for _, _, number in parts)
    parts.append(("not run", "missing", max(0, total.expected - seen)))
    whole = max(1, total.expected, seen)
    return tuple(
        Segment(label, name, number, 100 * number / whole)
        for label, name, number in parts
        if number
    )


def _kind(kind: Kind) -> TroubleKind:
    troubles = tuple(map(_trouble, kind.cases))
    return TroubleKind(kind, troubles[:_CASES_OF_A_KIND], troubles[_CASES_OF_A_KIND:])


def _ledger(summary: Summary) -> tuple[ListedFinding, ...]:
    # a case that shows two findings is listed under the first: an id is unique on a page
    cases = {
        line.finding: [case for case in summary.known if case.known[0] == line.finding]
        for line in summary.ledger
    }
    return tuple(
        ListedFinding(line, tuple(map(_trouble, cases[line.finding]))) for line in summary.ledger
    )


def _trouble(case: CaseOutcome) -> Trouble:
    shown = case.message in {judgement.message for judgement in case.evidence}
    first, stack = ("", "") if shown else _split(case.message)
    return Trouble(
        case=case,
        axes=_axes(case),
        evidence=tuple(map(_evidence, alike(case.evidence))),
        passed=tuple(j.oracle.value for j in case.judgements if j.verdict is Verdict.PASS),
        trials=bad_trials(case) if case.trials > 1 and case.bad_trials else "",
        headline=first,
        stack=stack,
    )


def _split(message: str) -> tuple[str, str]:
    """The first line of a message, and the stack that may follow it."""
    first = headline(message)
    return first, printable(message).strip().removeprefix(first).strip("\n")


def _axes(case: CaseOutcome) -> tuple[tuple[str, str], ...]:
    """The `axis-value` pairs of a run id; a part that is not a pair has an empty axis."""
    rest = case.run_id.removeprefix(f"{case.subject}.{case.site}.")
    pairs = (part.partition("-") for part in rest.split("."))
    return tuple((axis, value) if dash else ("", axis) for axis, dash, value in pairs)


def _evidence(judgements: tuple[Judgement, ...]) -> Evidence:
    first, times = judgements[0], ratio(judgements[0])
    text, stack = _split(first.message)
    return Evidence(
        oracles=tuple(judgement.oracle.value for judgement in judgements),
        judgement=first,
        headline=text,
        stack=stack,
        tone=tone(first),
        multiple=multiple(times) if times is not None else "",
        limits=limits(first),
        mark=_mark(times) if times is not None else None,
        place=place(first),
        others=others(first),
    )


def _mark(times: float) -> float:
    if times <= 0:
        return 0.0
    decades = max(-_DECADES, min(_DECADES, math.log10(times) if math.isfinite(times) else math.inf))
    return round(50 * (1 + decades / _DECADES), 1)


def _skips(summary: Summary) -> tuple[SkipGroup, ...]:
    """Skipped cases by reason, the most frequent reason first."""
    groups: dict[str, list[str]] = defaultdict(list)
    for skipped in summary.plan.skipped if summary.plan else ():
        groups[f"{skipped.subject}: {skipped.reason}"].append(skipped.run_id)
    order = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    return tuple(SkipGroup(reason, tuple(sorted(run_ids))) for reason, run_ids in order)


def _environment(summary: Summary) -> tuple[tuple[str, str], ...]:
    plan = summary.plan
    if plan is None:
        return ()
    tree = {Tree.CLEAN: "", Tree.DIRTY: " + local changes", Tree.UNKNOWN: ""}[plan.tree]
    known = [
        ("run", plan.run),
        ("started", plan.started_at),
        ("commit", plan.commit[:12] + tree if plan.commit else "unknown"),
        *_sorted_items(plan.machine),
        *_sorted_items(plan.versions),
    ]
    return tuple((key, value) for key, value in known if value)


def _sorted_items(mapping: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    return sorted(mapping.items())
