"""One run of one case of one subject, its id and the command that repeats it. Pure; no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from loragate.matrix.case import Case
from loragate.matrix.ids import run_id, seed_of

_SUFFIX = re.compile(r"(?P<run_id>[^#]+)(#(?P<draw>\d+)(\.(?P<repeat>\d+))?)?")


@dataclass(frozen=True, slots=True)
class CaseRun:
    """`draw` says which random data the run sees, `repeat` how often this data was run before."""

    subject: str
    case: Case
    draw: int = 0
    repeat: int = 0

    @property
    def run_id(self) -> str:
        """The id that all draws and repeats of the case have in common."""
        return run_id(self.subject, self.case)

    @property
    def id(self) -> str:
        """RUN_ID, RUN_ID#DRAW or RUN_ID#DRAW.REPEAT: zeros at the end are left out."""
        if self.repeat:
            return f"{self.run_id}#{self.draw}.{self.repeat}"
        return f"{self.run_id}#{self.draw}" if self.draw else self.run_id

    @property
    def seed(self) -> int:
        """Every repeat of a draw has the same seed."""
        return seed_of(self.case, self.draw)

    @property
    def replay(self) -> str:
        return replay_command(self.run_id, self.draw, self.repeat)


def replay_command(run_id: str, draw: int, repeat: int) -> str:
    """The command that runs a draw again, together with the repeats that preceded this one."""
    repeats = f" --repeats {repeat + 1}" if repeat else ""
    return f"loragate replay {run_id} --draw {draw}{repeats}"


def trial_name(draw: int, repeat: int) -> str:
    """How reports name one run of a case; the first run of a draw is named after its draw."""
    return f"draw {draw} repeat {repeat}" if repeat else f"draw {draw}"


def find_run(text: str, cases: Iterable[Case]) -> CaseRun | None:
    """The run that `text` is the id of, whatever its subject; None if no case has this id."""
    parts = _SUFFIX.fullmatch(text)
    if parts is None:
        return None
    for case in cases:
        subject = parts["run_id"].removesuffix(run_id("", case))
        if subject not in ("", parts["run_id"]):
            return CaseRun(subject, case, int(parts["draw"] or 0), int(parts["repeat"] or 0))
    return None
