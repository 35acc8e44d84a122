"""Which cases a run is about: subjects x cases x attempts, in one order everywhere. Pure; no torch.

Invariant: two processes with the same arguments select the same runs in the same order, because
workers that collect different tests cannot share them (pytest-xdist #432).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from loragate.matrix.case import Case, Tier
from loragate.matrix.ids import run_id, seed_of

_ATTEMPT_MARK = "#"


@dataclass(frozen=True, slots=True)
class CaseRun:
    """One attempt at one case of one subject."""

    subject: str
    case: Case
    attempt: int

    @property
    def run_id(self) -> str:
        return run_id(self.subject, self.case)

    @property
    def id(self) -> str:
        """The run id; attempts after the first add their number."""
        return f"{self.run_id}{_ATTEMPT_MARK}{self.attempt}" if self.attempt else self.run_id

    @property
    def seed(self) -> int:
        return seed_of(self.case, self.attempt)

    @property
    def replay(self) -> str:
        return f"loragate replay {self.run_id} --attempt {self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What was asked for. `patterns` are shell patterns on run ids, none means every case."""

    matrix: tuple[Path, ...]
    subjects: tuple[str, ...]
    tier: Tier
    attempts: tuple[int, ...] = (0,)
    patterns: tuple[str, ...] = ()

    def cases(self, subject: str, cases: Iterable[Case]) -> tuple[Case, ...]:
        """Those of `cases` that are selected for a subject."""
        return tuple(case for case in cases if self._selects(subject, case))

    def _selects(self, subject: str, case: Case) -> bool:
        if case.tier is not self.tier:
            return False
        name = run_id(subject, case)
        return not self.patterns or any(fnmatchcase(name, p) for p in self.patterns)


def select_runs(selection: Selection, cases: Iterable[Case]) -> tuple[CaseRun, ...]:
    """Sorted by id, so that neighbours in the list are alike."""
    cases = tuple(cases)
    runs = [
        CaseRun(subject, case, attempt)
        for subject in selection.subjects
        for case in selection.cases(subject, cases)
        for attempt in selection.attempts
    ]
    return tuple(sorted(runs, key=lambda run: (run.run_id, run.attempt)))
