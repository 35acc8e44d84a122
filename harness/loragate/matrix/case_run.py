"""One run of one case of one subject, its id and the command that repeats it. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from loragate.matrix.case import Case
from loragate.matrix.ids import run_id, seed_of
from loragate.matrix.replay_command import replay_command

_WITH_DRAW = re.compile(r"(?P<run_id>[^#]+)#(?P<draw>[0-9]+)(\.(?P<repeat>[0-9]+))?")


@dataclass(frozen=True, slots=True)
class CaseRun:
    """`draw` says which random data the run sees, `repeat` how often this data was run before.

    `matrix` are the files that the case was selected from; none means the default ones.
    """

    subject: str
    case: Case
    draw: int = 0
    repeat: int = 0
    matrix: tuple[Path, ...] = ()

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
        return replay_command(self.run_id, self.draw, self.repeat, self.matrix)


def trial_name(draw: int, repeat: int) -> str:
    """How reports name one run of a case; the first run of a draw is named after its draw."""
    return f"draw {draw} repeat {repeat}" if repeat else f"draw {draw}"


def split_draw(text: str) -> tuple[str, int | None, int | None]:
    """RUN_ID#DRAW.REPEAT in its parts; None for what the text does not name."""
    parts = _WITH_DRAW.fullmatch(text)
    if parts is None:
        return text, None, None
    repeat = parts["repeat"]
    return parts["run_id"], int(parts["draw"]), None if repeat is None else int(repeat)


def find_run(text: str, cases: Iterable[Case]) -> CaseRun | None:
    """The run that `text` is the id of, whatever its subject; None if no case has this id."""
    name, draw, repeat = split_draw(text)
    for case in cases:
        subject = name.removesuffix(run_id("", case))
        if subject not in ("", name):
            return CaseRun(subject, case, draw or 0, repeat or 0)
    return None
