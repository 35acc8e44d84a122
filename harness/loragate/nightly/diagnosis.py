"""One suspect, one factor at a time: what does its result depend on? Pure: the trials themselves
are made by whoever asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from loragate.nightly.conditions import Cause, Clock, Memory, Schedule
from loragate.nightly.constant_results import ChangesAloneError, Constant, what_changes
from loragate.nightly.suspects import (
    ALONE,
    LOOKS,
    Cell,
    Diagnosis,
    Suspect,
    TimeSpentError,
    Try,
    is_more_often,
    unknown,
)


def diagnose(suspect: Suspect, try_cell: Try) -> Diagnosis:
    """What the suspect's result depends on."""
    try:
        return _diagnose(suspect, try_cell)
    except TimeSpentError:
        text = "the time for diagnoses was spent before it was known"
        return Diagnosis(cause=Cause.UNKNOWN, explanation=text, is_cut=True)


def _diagnose(suspect: Suspect, try_cell: Try) -> Diagnosis:
    alone = try_cell(Cell(conditions=suspect.home), ALONE)
    if len(set(alone)) > 1:
        return _of_changing(suspect, alone, try_cell)
    if alone and alone[0] in suspect.wrong:
        return Diagnosis(
            cause=Cause.ALWAYS,
            explanation=f"each of {len(alone)} trials in fresh processes shows it",
            cell=Cell(conditions=suspect.home),
            changed=len(alone),
            tried=len(alone),
        )
    odd = next((s for s in suspect.sightings if alone and s.signature != alone[0]), None)
    if odd is None:
        return unknown(len(alone))
    try:
        return what_changes(Constant(suspect, odd, alone[0]), try_cell, len(alone))
    except ChangesAloneError as found:
        return _of_changing(suspect, found.trials, try_cell)


def _of_changing(suspect: Suspect, alone: Sequence[str], try_cell: Try) -> Diagnosis:
    """The result changes with nothing varied: which factor, held fast, makes it constant?"""
    home = suspect.home
    holds = [
        (Cause.MEMORY, replace(home, memory=Memory.ZEROS), "fresh memory holds zeros"),
        (Cause.CLOCK, replace(home, clock=Clock.SLOW), "the clocks run slowly"),
    ]
    if home.gpu:
        waited = replace(home, schedule=Schedule.BLOCKING)
        holds.append((Cause.SCHEDULE, waited, "each launch is waited for"))
    plain: list[str] = []
    questions = []
    for cause, conditions, what in holds:
        cell = Cell(conditions=conditions)
        held = _constant(cell, try_cell, suspect, plain, comparisons=len(holds))
        if not held:
            continue
        changed, tried = _changed(plain), len(plain)
        if tried and is_more_often(changed, tried, plain=len(held), comparisons=len(holds)):
            return Diagnosis(
                cause=cause,
                explanation=f"it changes in {changed} of {tried} trials, and in none of "
                f"{len(held)} while {what}",
                cell=cell,
                changed=changed,
                tried=tried,
                is_held=True,
            )
        questions.append(what)
    return _run_to_run(suspect, [*alone, *plain], questions)


def _constant(
    cell: Cell, try_cell: Try, suspect: Suspect, plain: list[str], *, comparisons: int
) -> list[str]:
    """Trials of a cell that have all shown the same, until as many with nothing varied show that
    this is no chance; none as soon as one has shown something else. plain: trials with nothing
    varied, which are added to; those in which a change was seen first are not among them."""
    found: list[str] = []
    home = Cell(conditions=suspect.home)
    for count in LOOKS:
        found += try_cell(cell, count - len(found))
        if len(found) < count or len(set(found)) > 1:
            return []
        if len(plain) < count:
            plain += try_cell(home, count - len(plain))
        changed, tried = _changed(plain), len(plain)
        if tried and is_more_often(changed, tried, plain=len(found), comparisons=comparisons):
            break
    return found


def _run_to_run(suspect: Suspect, trials: Sequence[str], questions: Sequence[str]) -> Diagnosis:
    changed = _changed(trials)
    why = "atomic additions, or a race within a kernel"
    if questions:
        why = f"too rarely to tell whether it does while {' or '.join(questions)}"
    return Diagnosis(
        cause=Cause.RUN_TO_RUN,
        explanation=f"it changes in {changed} of {len(trials)} trials with nothing varied: {why}",
        cell=Cell(conditions=suspect.home),
        changed=changed,
        tried=len(trials),
    )


def _changed(trials: Sequence[str]) -> int:
    """The trials that are not as most others."""
    return len(trials) - max(map(trials.count, trials), default=0)
