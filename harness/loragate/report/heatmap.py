"""Geometry of the heat map: one column a case, one row an oracle. Pure.

Every planned case has a column, so that what is missing shows as well as what is wrong.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from loragate.core.verdict import Judgement, OracleName, Verdict
from loragate.report.outcomes import CaseOutcome
from loragate.report.summary import Summary
from loragate.report.wording import multiple, ratio

# all lengths are CSS pixels
GUTTER = 84
ROW = 14
GAP = 2
_WIDTH = 984
_NARROWEST, _WIDEST = 10, 26

# upper ends of the shades, in units of the threshold: calm below 1, alarming above
_CALM = (0.1, 0.25, 0.5, 0.75)
_ALARM = (3.0, 30.0)
_TONES: Mapping[Verdict, str] = {
    Verdict.PASS: "calm0",
    Verdict.FAIL: "alarm2",
    Verdict.INCONCLUSIVE: "inconclusive",
    Verdict.SKIP: "skip",
    Verdict.INFRA: "infra",
}


@dataclass(frozen=True, slots=True)
class Cell:
    row: int
    tone: str
    title: str


@dataclass(frozen=True, slots=True)
class Column:
    """`cells` from top to bottom; `linked` if the report shows the case on its own."""

    run_id: str
    x: int
    cells: tuple[Cell, ...]
    linked: bool


@dataclass(frozen=True, slots=True)
class Strip:
    """As many columns as fit side by side."""

    columns: tuple[Column, ...]
    width: int


@dataclass(frozen=True, slots=True)
class Band:
    """All cases of one site of one subject. `cell` is the width of a cell."""

    subject: str
    site: str
    oracles: tuple[str, ...]
    cell: int
    strips: tuple[Strip, ...]

    @property
    def height(self) -> int:
        return len(self.oracles) * ROW


def bands(summary: Summary) -> tuple[Band, ...]:
    """One band for every (subject, site) with cases, sorted; cases in order of their ids."""
    groups: dict[tuple[str, str], dict[str, CaseOutcome | None]] = defaultdict(dict)
    for row in summary.plan.expected if summary.plan else ():
        groups[row.subject, row.site].update(dict.fromkeys(row.run_ids))
    for case in summary.cases:
        groups[case.subject, case.site][case.run_id] = case
    return tuple(
        _band(subject, site, sorted(cases.items()))
        for (subject, site), cases in sorted(groups.items())
        if cases
    )


def tone(judgement: Judgement) -> str:
    """Shade of one judgement: its verdict, refined by the error over the threshold if there is
    one."""
    times = ratio(judgement)
    if times is None:
        return _TONES[judgement.verdict]
    if judgement.verdict is Verdict.PASS:
        return f"calm{bisect_left(_CALM, times)}"
    if judgement.verdict is Verdict.FAIL:
        return f"alarm{bisect_left(_ALARM, times)}"
    return _TONES[judgement.verdict]


def _band(subject: str, site: str, cases: Sequence[tuple[str, CaseOutcome | None]]) -> Band:
    judged = {j.oracle for _, case in cases if case for j in case.judgements}
    oracles = tuple(oracle for oracle in OracleName if oracle in judged)
    pitch = max(_NARROWEST, min(_WIDEST, _WIDTH // len(cases)))
    fitting = _WIDTH // pitch
    strips = []
    for first in range(0, len(cases), fitting):
        part = cases[first : first + fitting]
        columns = tuple(
            _column(run_id, case, GUTTER + place * pitch, oracles)
            for place, (run_id, case) in enumerate(part)
        )
        strips.append(Strip(columns, GUTTER + len(part) * pitch))
    labels = tuple(oracle.value for oracle in oracles) or ("no oracle",)
    return Band(subject, site, labels, pitch - GAP, tuple(strips))


def _column(run_id: str, case: CaseOutcome | None, x: int, oracles: Sequence[OracleName]) -> Column:
    rows = len(oracles) or 1
    if case is None:
        cells = _filled(rows, "missing", "planned, but never started")
    elif not case.judgements:
        title = f"{case.verdict} {case.failure or ''}".strip()
        cells = _filled(rows, _TONES[case.verdict], title)
    else:
        cells = tuple(_cells(case, oracles))
    linked = case is not None and (case.verdict is not Verdict.PASS or case.is_known)
    return Column(run_id, x, cells, linked)


def _filled(rows: int, tone_name: str, title: str) -> tuple[Cell, ...]:
    return tuple(Cell(row, tone_name, title) for row in range(rows))


def _cells(case: CaseOutcome, oracles: Sequence[OracleName]) -> Iterator[Cell]:
    by_oracle: Mapping[OracleName, Judgement] = _last_of_each(case.judgements)
    for row, oracle in enumerate(oracles):
        judgement = by_oracle.get(oracle)
        if judgement is None:
            continue
        times = ratio(judgement)
        extent = "" if times is None else f", {multiple(times)} of the threshold"
        title = f"{oracle}: {judgement.verdict}{extent}"
        listed = [f.id for f in case.known if f.case and f.case.shows(case.run_id, judgement)]
        title += f", known: {', '.join(listed)}" if listed else ""
        yield Cell(row, tone(judgement), title)


def _last_of_each(judgements: Iterable[Judgement]) -> dict[OracleName, Judgement]:
    return {judgement.oracle: judgement for judgement in judgements}
