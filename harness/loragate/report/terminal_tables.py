"""The tables of the terminal: counts, what each oracle judged, draws, legs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loragate.core.verdict import Verdict
from loragate.report.by_oracle import OracleCount, never_judged, oracle_table
from loragate.report.colour import CYAN, DIM, MAGENTA, RED, YELLOW, Colour, paint, verdict_name
from loragate.report.counts import Count, total_of
from loragate.report.draws import DrawOutcome
from loragate.report.outcomes import LegOutcome
from loragate.report.summary import Summary
from loragate.report.text import headline, one_line
from loragate.report.wording import KNOWN, bad_trials, duration

_REPLAYS_OF_A_DRAW = 2

_COLUMNS = ("expected", "executed", "passed", KNOWN, "failed", "inconclusive", "infra", "skipped")


def counts_table(summary: Summary, colour: Colour) -> str:
    if not summary.counts:
        return ""
    rows = [*summary.counts, *([summary.total] if len(summary.counts) > 1 else [])]
    names = [one_line("/".join(filter(None, (row.subject, row.site)))) for row in rows]
    width = max(map(len, names))
    head = " " * width + "".join(f"{column:>13}" for column in _COLUMNS)
    body = (
        f"{name:<{width}}{_figures(row, colour)}" for name, row in zip(names, rows, strict=True)
    )
    return "\n".join([paint(head, DIM, colour), *body])


def _figures(row: Count, colour: Colour) -> str:
    alarms = (
        (row.expected, ""),
        (row.executed, YELLOW if row.missing else ""),
        (row.passed, ""),
        (row.known, CYAN),
        (row.failed, RED),
        (row.inconclusive, YELLOW),
        (row.infra, MAGENTA),
        (row.skipped, ""),
    )
    cells = (
        paint(f"{number:>13}", code, colour) if code and number else f"{number:>13}"
        for number, code in alarms
    )
    return "".join(cells)


def oracles_table(counts: Sequence[OracleCount], colour: Colour) -> str:
    if not counts:
        return ""
    table = oracle_table(counts)
    sites = [one_line(f"{row.subject}/{row.site}") for row in table.rows]
    width = max(map(len, sites))
    head = f"{'judged':<{width}}" + "".join(f"{name:>11}" for name in table.oracles)
    body = (
        f"{site:<{width}}" + "".join(f"{cell or ''!s:>11}" for cell in row.cells)
        for site, row in zip(sites, table.rows, strict=True)
    )
    none = (
        f"{one_line(f'{count.subject}/{count.site}')}: {count.oracle} judged no case: "
        f"{headline(count.reason)}"
        for count in never_judged(counts)
    )
    return "\n".join([paint(head, DIM, colour), *body, *none])


def draws_table(draws: Sequence[DrawOutcome], colour: Colour) -> str:
    if not draws:
        return ""
    bad = [outcome for outcome in draws if outcome.verdict is not Verdict.PASS]
    lines = [line for outcome in bad for line in _draw(outcome, colour)]
    repeats = draws[0].repeats
    each = f", each case run {repeats} times" if repeats > 1 else ""
    return "\n".join([*lines, f"{len(draws) - len(bad)} of {len(draws)} draws passed{each}"])


def _draw(outcome: DrawOutcome, colour: Colour) -> Iterable[str]:
    total = total_of(outcome.counts)
    name, word = f"draw {outcome.draw}", verdict_name(outcome.verdict, colour, width=14)
    good = total.passed + total.known
    yield f"{name:<14}{word}{total.executed} of {total.expected} executed, {good} passed"
    for case in outcome.troubles[:_REPLAYS_OF_A_DRAW]:
        yield f"  {paint('replay', DIM, colour)}  {one_line(case.replay)}"
        if outcome.repeats > 1 and case.bad_trials:
            yield f"    {bad_trials(case)}"
    if len(outcome.troubles) > _REPLAYS_OF_A_DRAW:
        yield f"  ... and {len(outcome.troubles) - _REPLAYS_OF_A_DRAW} more"


def legs_table(legs: Sequence[LegOutcome], colour: Colour) -> str:
    return "\n".join(render_leg(leg, colour) for leg in legs)


def render_leg(leg: LegOutcome, colour: Colour) -> str:
    """One line for one leg of the gate."""
    end = leg.finished
    time = duration(end.duration_s) if end else ""
    log = one_line(end.log_path) if end and leg.verdict is not Verdict.PASS else ""
    parts = (headline(leg.message), log)
    tail = "  ".join(part for part in parts if part)
    name = one_line(leg.name)
    return f"{name:<14}{verdict_name(leg.verdict, colour, width=14)}{time:>12}  {tail}".rstrip()
