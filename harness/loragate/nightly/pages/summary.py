"""The morning page as Markdown, for the summary of a step of GitHub Actions or an issue. Pure.

Whatever comes from a run stands in a code span, as in the summary of a gate.
"""

from __future__ import annotations

from collections.abc import Iterator

from loragate.nightly.morning import Finding, Morning
from loragate.nightly.pages import wording
from loragate.report.step_summary import cell, code
from loragate.report.text import headline

_SHOWN = 20
# a command that is cut is none; the ids of all that runs before are in it
_LONGEST_COMMAND = 20_000


def render_markdown(page: Morning) -> str:
    """The page, which ends with a newline."""
    lines = (
        f"## loragate scan: {wording.TITLES[page.exit_code]}",
        "",
        f"{wording.meaning(page).capitalize()}; {page.trials} trials.",
        "",
        *([code(wording.clocks(page)), ""] if page.ahead else []),
        *_findings(page),
        *_table(
            "What changed since the last run",
            ("machine", "what", "before", "after"),
            [(c.machine, c.name, c.before, c.after) for c in page.changes],
        ),
        *_table(
            "Undecided",
            ("path", "group", "failures", "to decide it"),
            [(s.key.path, s.key.grouped, wording.rate(s), wording.cost(s)) for s in page.undecided],
        ),
        *_table(
            "Quarantine",
            ("case", "owner", "reason", "state"),
            [
                (h.entry.case, h.entry.owner, h.entry.reason, wording.hold(h))
                for h in page.quarantine
            ],
        ),
    )
    return "\n".join([*lines, ""])


def _findings(page: Morning) -> Iterator[str]:
    for finding in page.findings[:_SHOWN]:
        yield from _finding(finding)
    if len(page.findings) > _SHOWN:
        yield f"... and {len(page.findings) - _SHOWN} more findings"
    if page.findings:
        yield ""


def _finding(finding: Finding) -> Iterator[str]:
    state = finding.state
    marks = "".join(f", {mark}" for mark in wording.marks(finding))
    cause = f", {finding.cause}" if finding.cause else ""
    yield f"- **{state.status.upper()}**{cause}{marks}: {code(state.key.path)}"
    yield f"  - {code(wording.rate(state))} on {code(state.key.device)}"
    for text in (headline(finding.explanation), wording.since(finding), wording.health(finding)):
        if text:
            yield f"  - {code(text)}"
    yield f"  - replay {code(finding.replay, _LONGEST_COMMAND)}"


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    if not rows:
        return
    yield f"### {title} ({len(rows)})"
    yield ""
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows[:_SHOWN]:
        yield f"| {' | '.join(map(cell, row))} |"
    if len(rows) > _SHOWN:
        yield ""
        yield f"... and {len(rows) - _SHOWN} more"
    yield ""
