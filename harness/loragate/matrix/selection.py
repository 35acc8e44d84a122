"""Which runs were asked for: subjects x cases x draws x repeats, in one order everywhere.

Invariant: two processes with the same arguments select the same runs in the same order, because
workers that collect different tests cannot share them (pytest-xdist #432). Pure; imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from loragate.matrix.case import Case, Tier
from loragate.matrix.case_run import CaseRun
from loragate.matrix.ids import run_id
from loragate.matrix.plan import is_selected, tiers_within


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What was asked for. Each of `draws` is run `repeats` times; `patterns` select run ids as in
    `loragate.matrix.plan`."""

    matrix: tuple[Path, ...]
    subjects: tuple[str, ...]
    tier: Tier
    draws: tuple[int, ...] = (0,)
    repeats: int = 1
    patterns: tuple[str, ...] = ()


def select_runs(selection: Selection, cases: Iterable[Case]) -> tuple[CaseRun, ...]:
    """Sorted by run id, draw and repeat. Runs that this machine cannot do are included: each of
    them is skipped with a reason."""
    wanted = [case for case in cases if case.tier in tiers_within(selection.tier)]
    runs = [
        CaseRun(subject, case, draw, repeat)
        for subject in selection.subjects
        for case in wanted
        if is_selected(run_id(subject, case), selection.patterns)
        for draw in selection.draws
        for repeat in range(selection.repeats)
    ]
    return tuple(sorted(runs, key=lambda run: (run.run_id, run.draw, run.repeat)))
