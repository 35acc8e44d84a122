"""Which cases a run is about: subjects x cases x attempts, in one order everywhere. Pure; no torch.

Invariant: two processes with the same arguments select the same runs in the same order, because
workers that collect different tests cannot share them (pytest-xdist #432).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from loragate.matrix.case import Case, Tier
from loragate.matrix.ids import run_id, seed_of
from loragate.matrix.plan import is_selected, tiers_within

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
    """What was asked for. `patterns` select run ids as in `loragate.matrix.plan`."""

    matrix: tuple[Path, ...]
    subjects: tuple[str, ...]
    tier: Tier
    attempts: tuple[int, ...] = (0,)
    patterns: tuple[str, ...] = ()


def select_runs(selection: Selection, cases: Iterable[Case]) -> tuple[CaseRun, ...]:
    """Sorted by run id and attempt. What a machine cannot run is among them: each of those is
    a skip with a reason."""
    wanted = [case for case in cases if case.tier in tiers_within(selection.tier)]
    runs = [
        CaseRun(subject, case, attempt)
        for subject in selection.subjects
        for case in wanted
        if is_selected(run_id(subject, case), selection.patterns)
        for attempt in selection.attempts
    ]
    return tuple(sorted(runs, key=lambda run: (run.run_id, run.attempt)))


def split_id(text: str, cases: Iterable[Case]) -> CaseRun | None:
    """The run that an id of `select_runs` stands for, whatever its subject; None if no case
    has it."""
    name, _, attempt = text.partition(_ATTEMPT_MARK)
    for case in cases:
        subject = name.removesuffix(run_id("", case))
        if subject not in ("", name):
            return CaseRun(subject, case, int(attempt) if attempt.isdecimal() else 0)
    return None
