"""The morning page on a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from loragate.nightly.morning import Finding, Morning
from loragate.nightly.pages import wording
from loragate.nightly.states import Status
from loragate.report.colour import BOLD, DIM, GREEN, RED, YELLOW, Colour, paint
from loragate.report.text import headline, one_line

_SHOWN = 20
_COLOURS = {
    Status.WRONG: RED,
    Status.FLAKY: RED,
    Status.UNDECIDED: YELLOW,
    Status.STABLE: GREEN,
    Status.NOT_PROMISED: DIM,
}


def render_terminal(page: Morning, colour: Colour) -> str:
    """The page as text; names of a run are escaped."""
    counts = ", ".join(
        paint(f"{page.counts[status]} {status}", _COLOURS[status], colour)
        for status in Status
        if page.counts.get(status)
    )
    lines = [
        f"{paint(wording.TITLES[page.exit_code], BOLD, colour)}: {wording.meaning(page)}",
        f"paths: {counts or 'none'}; {page.trials} trials",
        *_section("Findings", [line for f in page.findings for line in _finding(f, colour)]),
        *_section(
            "Changed since the last run",
            [
                one_line(f"{c.machine}: {c.name} {c.before or 'none'} -> {c.after or 'none'}")
                for c in page.changes
            ],
        ),
        *_section(
            "Undecided, and what it takes",
            _first(
                f"{_path(s.key.path)} {s.key.grouped}: {wording.rate(s)}; {wording.cost(s)}"
                for s in page.undecided
            ),
        ),
        *_section(
            "Quarantine",
            [
                one_line(f"{h.entry.case} ({h.entry.owner}): {h.entry.reason}; {wording.hold(h)}")
                for h in page.quarantine
            ],
        ),
        *_section("Never judged", _first(map(one_line, page.never))),
        *_section("Not judged by the last run", _first(map(one_line, page.stopped))),
    ]
    if page.infra:
        lines.append(f"the machine or the harness failed in {page.infra} trials")
    if page.ahead:
        lines.append(one_line(wording.clocks(page)))
    return "\n".join(lines)


def _section(title: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield ""
        yield title
        yield from (f"  {line}" for line in lines)


def _first(lines: Iterable[str]) -> list[str]:
    every = list(lines)
    rest = len(every) - _SHOWN
    return [*every[:_SHOWN], *([f"... and {rest} more"] if rest > 0 else [])]


def _finding(finding: Finding, colour: Colour) -> Iterator[str]:
    state = finding.state
    status = paint(state.status.upper(), f"{BOLD};{_COLOURS[state.status]}", colour)
    marks = "".join(f" [{mark}]" for mark in wording.marks(finding))
    cause = f" ({finding.cause})" if finding.cause else ""
    yield f"{status}{cause} {_path(state.key.path)} {state.key.grouped}{marks}"
    yield f"  {wording.rate(state)}; bits: {wording.bits(state)}; on {one_line(state.key.device)}"
    for text in (headline(finding.explanation), wording.since(finding), wording.health(finding)):
        if text:
            yield f"  {one_line(text)}"
    yield f"  {one_line(finding.replay)}"


def _path(path: str) -> str:
    return one_line(path)
