"""The evidence of one trial as text: what a failing test and `loragate replay` print. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from loragate.core.verdict import Judgement
from loragate.events.model import CaseFinished
from loragate.report.text import one_line, printable, without_commands
from loragate.report.wording import figures, place


def render_evidence(finished: CaseFinished) -> str:
    """The verdict, the judgement of every oracle, and one command that runs the case again."""
    kind = f" {finished.failure}" if finished.failure else ""
    lines = [f"{finished.verdict.upper()}{kind}: {one_line(finished.run_id)}"]
    if finished.message:
        lines += _indented(finished.message, by=2)
    for judgement in finished.judgements:
        lines += _judgement(judgement)
    lines.append(f"replay: {one_line(finished.replay)}")
    return without_commands("\n".join(lines))


def _judgement(judgement: Judgement) -> Iterable[str]:
    kind = f" {judgement.failure}" if judgement.failure else ""
    yield f"  {judgement.oracle:<10} {judgement.verdict.upper()}{kind}"
    if judgement.message:
        yield from _indented(judgement.message, by=4)
    facts = [part for part in (place(judgement), figures(judgement)) if part]
    yield from (f"    {fact}" for fact in facts)


def _indented(text: str, *, by: int) -> list[str]:
    return [" " * by + line for line in printable(text).split("\n")]
