"""The outcome of a run as text: what failed, why, how to run it again, and what it means.

Colour adds nothing that the text does not say. Pure, except that `colour_for` asks whether its
stream is a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TextIO

from loragate.core.verdict import ExitCode, Judgement, Verdict
from loragate.events.model import CompileResult
from loragate.findings.ledger import Line, State
from loragate.report.by_oracle import OracleCount, never_judged, oracle_table
from loragate.report.counts import Count, total_of
from loragate.report.draws import DrawOutcome
from loragate.report.kinds import Kind, kinds_of_trouble
from loragate.report.outcomes import CaseOutcome, LegOutcome
from loragate.report.summary import EXIT_MEANINGS, Summary
from loragate.report.wording import (
    KNOWN,
    alike,
    bad_trials,
    duration,
    figures,
    headline,
    place,
    printable,
)

# beyond this the reader wants the HTML report
_CASES_SHOWN = 20
_CASES_OF_A_KIND = 2


class Colour(StrEnum):
    ON = "on"
    OFF = "off"


_RED, _GREEN, _YELLOW, _MAGENTA, _CYAN, _DIM, _BOLD = "31", "32", "33", "35", "36", "2", "1"
_VERDICT_COLOURS: Mapping[Verdict, str] = {
    Verdict.PASS: _GREEN,
    Verdict.FAIL: _RED,
    Verdict.INCONCLUSIVE: _YELLOW,
    Verdict.SKIP: _DIM,
    Verdict.INFRA: _MAGENTA,
}


def colour_for(stream: TextIO, environ: Mapping[str, str]) -> Colour:
    """Colour for a terminal, unless NO_COLOR holds anything (no-color.org) or TERM is dumb."""
    if environ.get("NO_COLOR") or environ.get("TERM") == "dumb" or not stream.isatty():
        return Colour.OFF
    return Colour.ON


def paint(text: str, code: str, colour: Colour) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colour is Colour.ON and text else text


def verdict_name(verdict: Verdict, colour: Colour, *, width: int = 0) -> str:
    """The verdict in capitals, padded to `width` columns."""
    name = verdict.upper()
    return paint(name, f"{_BOLD};{_VERDICT_COLOURS[verdict]}", colour) + " " * (width - len(name))


def render_summary(summary: Summary, colour: Colour) -> str:
    """Everything that the gate prints when it ends; the verdict comes last, without a newline."""
    blocks = [
        *_troubles(summary.troubles, colour),
        *_bad_compiles(summary.compiles, colour),
        *_missing(summary.missing),
        *_ledger(summary, colour),
        *(f"note: {headline(note)}" for note in summary.notes),
        _counts_table(summary, colour),
        _oracles_table(summary.oracles, colour),
        _draws_table(summary.draws, colour),
        _legs_table(summary.legs, colour),
        _verdict_block(summary, colour),
    ]
    return "\n\n".join(block for block in blocks if block)


def render_case(case: CaseOutcome, colour: Colour) -> str:
    """One case that did not pass, with its evidence and the command that runs it again."""
    kind = f"  {case.failure}" if case.failure else ""
    name = printable(case.run_id)
    lines = [f"{verdict_name(case.verdict, colour)}  {name}{paint(kind, _BOLD, colour)}"]
    shown = {judgement.message for judgement in case.evidence}
    if case.message and case.message not in shown:
        lines.append(f"  {headline(case.message)}")
    if case.trials > 1 and case.bad_trials:
        lines.append(f"  {bad_trials(case)}")
    for judgements in alike(case.evidence):
        lines += _evidence(judgements, colour)
    lines += [f"  {KNOWN}: {finding.id}: {finding.title}" for finding in case.known]
    lines.append(f"  {paint('replay', _DIM, colour)}  {printable(case.replay)}")
    return "\n".join(lines)


def render_leg(leg: LegOutcome, colour: Colour) -> str:
    """One line for one leg of the gate."""
    end = leg.finished
    time = duration(end.duration_s) if end else ""
    log = printable(end.log_path) if end and leg.verdict is not Verdict.PASS else ""
    parts = (headline(leg.message), log)
    tail = "  ".join(part for part in parts if part)
    name = printable(leg.name)
    return f"{name:<14}{verdict_name(leg.verdict, colour, width=14)}{time:>12}  {tail}".rstrip()


def _evidence(judgements: Sequence[Judgement], colour: Colour) -> Iterable[str]:
    judgement = judgements[0]
    oracles = ", ".join(judgement.oracle for judgement in judgements)
    facts = "; ".join(part for part in (figures(judgement), place(judgement)) if part)
    kind = f" {judgement.failure}" if judgement.failure else ""
    word = paint(judgement.verdict + kind, _VERDICT_COLOURS[judgement.verdict], colour)
    yield f"  {oracles}: {word}{f': {facts}' if facts else ''}"
    if judgement.message:
        yield from (f"    {line}" for line in printable(judgement.message).splitlines())


def _troubles(cases: Sequence[CaseOutcome], colour: Colour) -> Iterable[str]:
    for kind in kinds_of_trouble(cases):
        for case in kind.cases[:_CASES_OF_A_KIND]:
            yield render_case(case, colour)
        if len(kind.cases) > _CASES_OF_A_KIND:
            yield _others_of(kind)


def _others_of(kind: Kind) -> str:
    rest = kind.cases[_CASES_OF_A_KIND:]
    by = f"reported by {', '.join(kind.oracles) or 'no oracle'}"
    what = f"{kind.failure or kind.verdict}, {by}"
    head = f"... and {len(rest)} more of {kind.subject}/{kind.site}: {what}"
    return "\n".join([printable(head), *_listed(case.run_id for case in rest)])


def _listed(run_ids: Iterable[str]) -> Iterable[str]:
    names = list(run_ids)
    yield from (f"  {printable(name)}" for name in names[:_CASES_SHOWN])
    if len(names) > _CASES_SHOWN:
        yield f"  ... and {len(names) - _CASES_SHOWN} more"


def _bad_compiles(results: Sequence[CompileResult], colour: Colour) -> Iterable[str]:
    for result in results:
        if result.verdict is not Verdict.PASS:
            word = verdict_name(result.verdict, colour)
            what = printable(f"{result.kernel} ({result.specialisation}) for {result.arch}")
            yield f"{word}  {what}\n  {headline(result.message)}"


def _missing(run_ids: Sequence[str]) -> Iterable[str]:
    if run_ids:
        yield "\n".join(["planned, but never started:", *_listed(run_ids)])


def _ledger(summary: Summary, colour: Colour) -> Iterable[str]:
    for line in summary.ledger:
        cases = [case for case in summary.known if line.finding in case.known]
        yield "\n".join([_finding_head(line, colour), *_known_cases(cases, colour)])


def _finding_head(line: Line, colour: Colour) -> str:
    code = {State.KNOWN: _CYAN, State.STALE: _RED}.get(line.state, _DIM)
    word = paint(line.state.value.upper(), f"{_BOLD};{code}", colour)
    head = f"{word}  finding {line.finding.id}: {line.finding.title}"
    case = line.finding.case
    if case is not None and case.extent:
        head += f"\n  listed: {case.extent}"
    # the cases below show it
    return head if line.state is State.KNOWN else f"{head}\n  {printable(line.observation.text)}"


def _known_cases(cases: Sequence[CaseOutcome], colour: Colour) -> Iterable[str]:
    for case in cases[:_CASES_OF_A_KIND]:
        yield f"  {printable(case.run_id)}"
        for judgements in alike(case.evidence):
            yield from (f"  {text}" for text in _evidence(judgements, colour))
        yield f"    {paint('replay', _DIM, colour)}  {printable(case.replay)}"
    if len(cases) > _CASES_OF_A_KIND:
        yield f"  ... and {len(cases) - _CASES_OF_A_KIND} more cases like this"


_COLUMNS = ("expected", "executed", "passed", KNOWN, "failed", "inconclusive", "infra", "skipped")


def _counts_table(summary: Summary, colour: Colour) -> str:
    if not summary.counts:
        return ""
    rows = [*summary.counts, *([summary.total] if len(summary.counts) > 1 else [])]
    names = [printable("/".join(filter(None, (row.subject, row.site)))) for row in rows]
    width = max(map(len, names))
    head = " " * width + "".join(f"{column:>13}" for column in _COLUMNS)
    body = (
        f"{name:<{width}}{_figures(row, colour)}" for name, row in zip(names, rows, strict=True)
    )
    return "\n".join([paint(head, _DIM, colour), *body])


def _figures(row: Count, colour: Colour) -> str:
    alarms = (
        (row.expected, ""),
        (row.executed, _YELLOW if row.missing else ""),
        (row.passed, ""),
        (row.known, _CYAN),
        (row.failed, _RED),
        (row.inconclusive, _YELLOW),
        (row.infra, _MAGENTA),
        (row.skipped, ""),
    )
    cells = (
        paint(f"{number:>13}", code, colour) if code and number else f"{number:>13}"
        for number, code in alarms
    )
    return "".join(cells)


def _oracles_table(counts: Sequence[OracleCount], colour: Colour) -> str:
    if not counts:
        return ""
    table = oracle_table(counts)
    sites = [printable(f"{row.subject}/{row.site}") for row in table.rows]
    width = max(map(len, sites))
    head = f"{'judged':<{width}}" + "".join(f"{name:>11}" for name in table.oracles)
    body = (
        f"{site:<{width}}" + "".join(f"{cell or ''!s:>11}" for cell in row.cells)
        for site, row in zip(sites, table.rows, strict=True)
    )
    none = (
        f"{printable(f'{count.subject}/{count.site}')}: {count.oracle} judged no case: "
        f"{headline(count.reason)}"
        for count in never_judged(counts)
    )
    return "\n".join([paint(head, _DIM, colour), *body, *none])


def _draws_table(draws: Sequence[DrawOutcome], colour: Colour) -> str:
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
    for case in outcome.troubles[:_CASES_OF_A_KIND]:
        yield f"  {paint('replay', _DIM, colour)}  {printable(case.replay)}"
        if outcome.repeats > 1 and case.bad_trials:
            yield f"    {bad_trials(case)}"
    if len(outcome.troubles) > _CASES_OF_A_KIND:
        yield f"  ... and {len(outcome.troubles) - _CASES_OF_A_KIND} more"


def _legs_table(legs: Sequence[LegOutcome], colour: Colour) -> str:
    return "\n".join(render_leg(leg, colour) for leg in legs)


def _verdict_block(summary: Summary, colour: Colour) -> str:
    code: ExitCode = summary.exit_code
    time = f" in {duration(summary.finished.duration_s)}" if summary.finished else ""
    first = f"{verdict_name(summary.verdict, colour)}{time}: {EXIT_MEANINGS[code]}"
    reasons = [*map(headline, summary.reasons), *_excuse(summary)]
    return "\n".join([f"{first} (exit {code.value})", *(f"  {reason}" for reason in reasons)])


def _excuse(summary: Summary) -> Iterable[str]:
    known = len(summary.known)
    if known:
        yield f"{known} {'case' if known == 1 else 'cases'} failed as listed among the findings"
