"""Progress of a run as text, fed with its events. Pure.

On a terminal one line counts up in place; elsewhere, as in the log of a CI job, a line appears
for each tenth of the cases. Whatever did not pass is shown at once.
"""

from __future__ import annotations

from enum import StrEnum

from loragate.core.verdict import Verdict, worst
from loragate.events.model import (
    CaseFinished,
    Event,
    HostTestFinished,
    KnownFinding,
    LegFinished,
    LegStarted,
    RunStarted,
)
from loragate.matrix.case_run import trial_name
from loragate.report.colour import Colour, verdict_name
from loragate.report.known import HARMLESS, excused, known_in, standing
from loragate.report.outcomes import LegOutcome
from loragate.report.terminal_tables import render_leg
from loragate.report.text import one_line, without_commands

_WIPE = "\r\x1b[2K"
_STEPS = 10


class Liveness(StrEnum):
    """Whether a line that was written can be overwritten."""

    TERMINAL = "terminal"
    LOG = "log"


class Progress:
    """Takes every event once and returns the text to write, "" if there is none."""

    def __init__(self, colour: Colour, liveness: Liveness) -> None:
        self._colour = colour
        self._liveness = liveness
        self._expected = 0
        self._trials = 1
        self._finished: dict[str, Verdict] = {}
        self._listed: list[KnownFinding] = []

    def feed(self, event: Event) -> str:
        if isinstance(event, RunStarted):
            self._expected = sum(len(row.run_ids) for row in event.expected)
            self._trials = (len(event.draws) or 1) * event.repeats
            return ""
        if isinstance(event, KnownFinding):
            self._listed.append(event)
            return ""
        if isinstance(event, LegStarted):
            return self._line(f"{one_line(event.name)} ...")
        if isinstance(event, LegFinished):
            leg = LegOutcome(
                name=event.name, verdict=event.verdict, message=event.message, finished=event
            )
            return self._line(render_leg(leg, self._colour))
        if isinstance(event, HostTestFinished):
            # they are many and short: only what did not pass is shown
            return "" if event.verdict in HARMLESS else self._trouble(event.verdict, event.test)
        return self._case(event) if isinstance(event, CaseFinished) else ""

    def _case(self, event: CaseFinished) -> str:
        before = self._step()
        verdict = standing(excused(event, self._listed))
        fresh = event.run_id not in self._finished
        # a later trial does not make up for an earlier one
        self._finished[event.run_id] = worst([verdict, self._finished.get(event.run_id, verdict)])
        name = event.run_id if self._trials == 1 else f"{event.run_id}  {trial_name(*event.trial)}"
        text = ""
        if verdict is not Verdict.PASS:
            text = self._trouble(verdict, name)
        elif known := known_in(event, self._listed):
            text = self._line(one_line(f"KNOWN  {name}  {', '.join(f.id for f in known)}"))
        if self._liveness is Liveness.TERMINAL:
            return text + _WIPE + self._tally()
        return text + (self._line(self._tally()) if fresh and self._step() > before else "")

    def _trouble(self, verdict: Verdict, name: str) -> str:
        return self._line(f"{verdict_name(verdict, self._colour)}  {one_line(name)}")

    def _step(self) -> int:
        return len(self._finished) * _STEPS // self._expected if self._expected else 0

    def _tally(self) -> str:
        bad = sum(verdict is not Verdict.PASS for verdict in self._finished.values())
        trouble = f", {bad} did not pass" if bad else ""
        return f"{len(self._finished)}/{self._expected or '?'} cases{trouble}"

    def _line(self, text: str) -> str:
        return (
            (_WIPE if self._liveness is Liveness.TERMINAL else "") + without_commands(text) + "\n"
        )
