"""A run as Markdown, for the summary of a step of GitHub Actions. Pure.

Whatever comes from a run stands in a code span, where Markdown, HTML, links and mentions mean
nothing; a span cannot be left, because its fence is longer than any row of backticks in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from loragate.core.verdict import Judgement, Verdict
from loragate.events.model import CompileResult, HostTestFinished
from loragate.report.host_tests import rerun_command
from loragate.report.outcomes import CaseOutcome
from loragate.report.summary import EXIT_MEANINGS, Summary
from loragate.report.text import headline, one_line, shortened
from loragate.report.wording import alike, duration, figures, place

# beyond this the reader wants the HTML report
_SHOWN = 20
_LIMIT = 500
_BACKTICKS = re.compile(r"`+")
_CUT = "\n\n... the rest is cut off: the page would be too long.\n"

_COLUMNS = (
    "expected",
    "executed",
    "passed",
    "known",
    "failed",
    "inconclusive",
    "infra",
    "skipped",
)


def render_step_summary(summary: Summary, report: Path) -> str:
    """The page, which ends with a newline. report: the folder that the whole report is in."""
    kernels = [result for result in summary.compiles if result.verdict is not Verdict.PASS]
    lines = (
        *_verdict(summary),
        *_counts(summary),
        *_section("Cases that did not pass", [*map(_case, summary.troubles)]),
        *_section("Host tests that did not pass", [*map(_host_test, summary.bad_host_tests)]),
        *_section("Kernels that did not pass", [*map(_kernel, kernels)]),
        *_section("Planned, but never started", [*map(code, summary.missing)]),
        *_section("Notes", [*map(code, summary.notes)]),
        f"Report: {code(str(report))}",
        "",
    )
    return "\n".join(lines)


def code(text: str, limit: int = _LIMIT) -> str:
    """`text` as one line of code, whatever it holds."""
    content = shortened(one_line(text), limit)
    if not content:
        return ""
    longest = max((len(row) for row in _BACKTICKS.findall(content)), default=0)
    fence = "`" * (longest + 1)
    # one blank on each side is not shown
    return f"{fence} {content} {fence}"


def cell(text: str) -> str:
    """`text` as code in a table, where a bar ends a cell even within code."""
    return code(one_line(text).replace("|", "\\x7c"))


def cut_to(page: str, size: int) -> str:
    """The lines of `page` that fit into `size` bytes together with a note; "" if none does."""
    if len(page.encode()) <= size:
        return page
    room = size - len(_CUT.encode())
    kept = page.encode()[: max(0, room)].rpartition(b"\n")[0].decode()
    return kept + _CUT if kept.strip() else ""


def _verdict(summary: Summary) -> Iterator[str]:
    time = f" in {duration(summary.finished.duration_s)}" if summary.finished else ""
    code_of_exit = summary.exit_code
    yield f"## loragate: {summary.verdict.upper()}{time}"
    yield ""
    yield f"{EXIT_MEANINGS[code_of_exit].capitalize()} (exit {code_of_exit.value})."
    yield ""
    yield from _listed([*map(code, summary.reasons)])


def _counts(summary: Summary) -> Iterator[str]:
    if not summary.counts:
        return
    yield f"| results | {' | '.join(_COLUMNS)} |"
    yield f"|---|{'--:|' * len(_COLUMNS)}"
    for row in (*summary.counts, *([summary.total] if len(summary.counts) > 1 else [])):
        name = "/".join(filter(None, (row.subject, row.site)))
        figures_of_row = " | ".join(str(getattr(row, column)) for column in _COLUMNS)
        yield f"| {cell(name)} | {figures_of_row} |"
    yield ""


def _section(title: str, blocks: Sequence[str]) -> Iterator[str]:
    if blocks:
        yield f"### {title} ({len(blocks)})"
        yield ""
        yield from _listed(blocks)


def _listed(blocks: Sequence[str]) -> Iterator[str]:
    if not blocks:
        return
    yield from (f"- {block}" for block in blocks[:_SHOWN])
    if len(blocks) > _SHOWN:
        yield f"- ... and {len(blocks) - _SHOWN} more"
    yield ""


def _case(case: CaseOutcome) -> str:
    kind = case.failure or case.verdict
    head = f"**{case.verdict.upper()}** {code(case.run_id)} {kind.replace('_', ' ')}"
    shown = {judgement.message for judgement in case.evidence}
    message = "" if case.message in shown else code(headline(case.message))
    evidence = (_evidence(judgements) for judgements in alike(case.evidence))
    return _block(head, message, *evidence, f"replay {code(case.replay)}")


def _evidence(judgements: Sequence[Judgement]) -> str:
    first = judgements[0]
    oracles = ", ".join(judgement.oracle.replace("_", " ") for judgement in judgements)
    facts = (place(first), figures(first), headline(first.message))
    return f"{oracles}: {', '.join(code(fact) for fact in facts if fact)}"


def _host_test(test: HostTestFinished) -> str:
    where = f"at {code(test.place)}" if test.place else ""
    head = f"**{test.verdict.upper()}** {code(test.test)}"
    return _block(head, code(headline(test.message)), where, f"rerun {code(rerun_command(test))}")


def _kernel(result: CompileResult) -> str:
    what = f"{result.kernel} ({result.specialisation}) for {result.arch}"
    return _block(f"**{result.verdict.upper()}** {code(what)}", code(headline(result.message)))


def _block(head: str, *lines: str) -> str:
    return "\n".join([head, *(f"  - {line}" for line in lines if line)])
