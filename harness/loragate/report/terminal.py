"""The outcome of a run as text: what failed, why, how to run it again, and what it means.

Pure. Invariant: no line of the text is a command to the CI system that reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loragate.core.plural import counted
from loragate.core.verdict import ExitCode, Judgement, Verdict
from loragate.events.model import CompileResult, HostTestFinished
from loragate.findings.ledger import Line, State
from loragate.report.colour import (
    BOLD,
    CYAN,
    DIM,
    RED,
    VERDICT_COLOURS,
    Colour,
    colour_for,
    paint,
    verdict_name,
)
from loragate.report.host_tests import rerun_command
from loragate.report.kinds import Kind, kinds_of_trouble
from loragate.report.outcomes import CaseOutcome
from loragate.report.summary import EXIT_MEANINGS, Summary
from loragate.report.terminal_tables import counts_table, draws_table, legs_table, oracles_table
from loragate.report.text import headline, one_line, printable, without_commands
from loragate.report.wording import KNOWN, alike, bad_trials, duration, figures, place

__all__ = ["Colour", "colour_for", "render_summary"]

# beyond this the reader wants the HTML report
_CASES_SHOWN = 20
_CASES_OF_A_KIND = 2


def render_summary(summary: Summary, colour: Colour) -> str:
    """Everything that the gate prints when it ends; the verdict comes last, without a newline."""
    blocks = [
        *_troubles(summary.troubles, colour),
        *_bad_compiles(summary.compiles, colour),
        *_bad_host_tests(summary.bad_host_tests, colour),
        *_missing(summary.missing),
        *_ledger(summary, colour),
        *(f"note: {headline(note)}" for note in summary.notes),
        counts_table(summary, colour),
        oracles_table(summary.oracles, colour),
        draws_table(summary.draws, colour),
        legs_table(summary.legs, colour),
        _verdict_block(summary, colour),
    ]
    return without_commands("\n\n".join(block for block in blocks if block))


def render_case(case: CaseOutcome, colour: Colour) -> str:
    """One case that did not pass, with its evidence and the command that runs it again."""
    kind = f"  {case.failure}" if case.failure else ""
    name = one_line(case.run_id)
    lines = [f"{verdict_name(case.verdict, colour)}  {name}{paint(kind, BOLD, colour)}"]
    shown = {judgement.message for judgement in case.evidence}
    if case.message and case.message not in shown:
        lines.append(f"  {headline(case.message)}")
    if case.trials > 1 and case.bad_trials:
        lines.append(f"  {bad_trials(case)}")
    for judgements in alike(case.evidence):
        lines += _evidence(judgements, colour)
    lines += [f"  {KNOWN}: {one_line(f'{finding.id}: {finding.title}')}" for finding in case.known]
    lines.append(f"  {paint('replay', DIM, colour)}  {one_line(case.replay)}")
    return "\n".join(lines)


def _evidence(judgements: Sequence[Judgement], colour: Colour) -> Iterable[str]:
    judgement = judgements[0]
    oracles = ", ".join(judgement.oracle for judgement in judgements)
    facts = "; ".join(part for part in (figures(judgement), place(judgement)) if part)
    kind = f" {judgement.failure}" if judgement.failure else ""
    word = paint(judgement.verdict + kind, VERDICT_COLOURS[judgement.verdict], colour)
    yield f"  {oracles}: {word}{f': {facts}' if facts else ''}"
    if judgement.message:
        yield from (f"    {line}" for line in printable(judgement.message).split("\n"))


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
    return "\n".join([one_line(head), *_listed(case.run_id for case in rest)])


def _listed(run_ids: Iterable[str]) -> Iterable[str]:
    names = list(run_ids)
    yield from (f"  {one_line(name)}" for name in names[:_CASES_SHOWN])
    if len(names) > _CASES_SHOWN:
        yield f"  ... and {len(names) - _CASES_SHOWN} more"


def _bad_compiles(results: Sequence[CompileResult], colour: Colour) -> Iterable[str]:
    for result in results:
        if result.verdict is not Verdict.PASS:
            word = verdict_name(result.verdict, colour)
            what = one_line(f"{result.kernel} ({result.specialisation}) for {result.arch}")
            yield f"{word}  {what}\n  {headline(result.message)}"


def _bad_host_tests(tests: Sequence[HostTestFinished], colour: Colour) -> Iterable[str]:
    for test in tests[:_CASES_SHOWN]:
        lines = [f"{verdict_name(test.verdict, colour)}  {one_line(test.test)}"]
        lines += [f"  {part}" for part in (headline(test.message), _raised_at(test)) if part]
        lines.append(f"  {paint('rerun', DIM, colour)}  {one_line(rerun_command(test))}")
        yield "\n".join(lines)
    rest = tests[_CASES_SHOWN:]
    if rest:
        head = f"... and {counted(len(rest), 'more host test')} that did not pass"
        yield "\n".join([head, *_listed(test.test for test in rest)])


def _raised_at(test: HostTestFinished) -> str:
    return f"at {one_line(test.place)}" if test.place else ""


def _missing(run_ids: Sequence[str]) -> Iterable[str]:
    if run_ids:
        yield "\n".join(["planned, but never started:", *_listed(run_ids)])


def _ledger(summary: Summary, colour: Colour) -> Iterable[str]:
    for line in summary.ledger:
        cases = [case for case in summary.known if line.finding in case.known]
        yield "\n".join([_finding_head(line, colour), *_known_cases(cases, colour)])


def _finding_head(line: Line, colour: Colour) -> str:
    code = {State.KNOWN: CYAN, State.STALE: RED}.get(line.state, DIM)
    word = paint(line.state.value.upper(), f"{BOLD};{code}", colour)
    head = f"{word}  finding {one_line(f'{line.finding.id}: {line.finding.title}')}"
    case = line.finding.case
    if case is not None and case.extent:
        head += f"\n  listed: {one_line(case.extent)}"
    # the cases below show it
    return head if line.state is State.KNOWN else f"{head}\n  {headline(line.observation.text)}"


def _known_cases(cases: Sequence[CaseOutcome], colour: Colour) -> Iterable[str]:
    for case in cases[:_CASES_OF_A_KIND]:
        yield f"  {one_line(case.run_id)}"
        for judgements in alike(case.evidence):
            yield from (f"  {text}" for text in _evidence(judgements, colour))
        yield f"    {paint('replay', DIM, colour)}  {one_line(case.replay)}"
    if len(cases) > _CASES_OF_A_KIND:
        yield f"  ... and {len(cases) - _CASES_OF_A_KIND} more cases like this"


def _verdict_block(summary: Summary, colour: Colour) -> str:
    code: ExitCode = summary.exit_code
    time = f" in {duration(summary.finished.duration_s)}" if summary.finished else ""
    first = f"{verdict_name(summary.verdict, colour)}{time}: {EXIT_MEANINGS[code]}"
    reasons = [*map(headline, summary.reasons), *_excuse(summary)]
    return "\n".join([f"{first} (exit {code.value})", *(f"  {reason}" for reason in reasons)])


def _excuse(summary: Summary) -> Iterable[str]:
    known = len(summary.known)
    if known:
        yield f"{counted(known, 'case')} failed as listed among the findings"
