"""One suspect, one factor at a time: what does its result depend on? Pure: the trials themselves
are made by whoever asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from loragate.nightly.conditions import Cause, Clock, Conditions, Memory, Schedule
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
        # the later trials alone may all show the same, another one than the first
        return _of_changing(suspect, [*alone, *found.trials], try_cell)


class _Hold(NamedTuple):
    """A factor at the value that might make a result constant, and at the opposite one."""

    cause: Cause
    held: Conditions
    what: str
    opposite: Conditions
    otherwise: str


def _holds(home: Conditions) -> list[_Hold]:
    zeros, poison = (replace(home, memory=value) for value in (Memory.ZEROS, Memory.POISON))
    slow, fast = (replace(home, clock=value) for value in (Clock.SLOW, Clock.FAST))
    found = [
        _Hold(Cause.MEMORY, zeros, "fresh memory holds zeros", poison, "fresh memory holds NaN"),
        _Hold(Cause.CLOCK, slow, "the clocks run slowly", fast, "the clocks run fast"),
    ]
    if home.gpu:
        late = replace(home, schedule=Schedule.DELAYED)
        held = replace(home, schedule=Schedule.BLOCKING)
        found.append(
            _Hold(Cause.SCHEDULE, held, "each launch is waited for", late, "a stream is late")
        )
    return found


def _of_changing(suspect: Suspect, alone: Sequence[str], try_cell: Try) -> Diagnosis:
    """The result changes with nothing varied: which factor, held fast, makes it constant?"""
    plain: list[str] = []
    questions = []
    holds = _holds(suspect.home)
    for hold in holds:
        found = _of_hold(suspect, hold, plain, try_cell, comparisons=2 * len(holds))
        if found is None:
            questions.append(hold.what)
        elif found.cause is not Cause.UNKNOWN:
            return found
    return _run_to_run(suspect, [*alone, *plain], questions)


def _of_hold(
    suspect: Suspect, hold: _Hold, plain: list[str], try_cell: Try, *, comparisons: int
) -> Diagnosis | None:
    """An unknown cause as soon as the result changes although the factor is held; None if it never
    does, and as many other trials leave open whether that is chance. plain: trials with nothing
    varied, which are added to; those in which a change was seen first are not among them."""
    constant: list[str] = []
    opposite: list[str] = []
    others = ((suspect.home, plain, ""), (hold.opposite, opposite, f" while {hold.otherwise}"))
    for count in LOOKS:
        constant += try_cell(Cell(conditions=hold.held), count - len(constant))
        if len(constant) < count or len(set(constant)) > 1:
            return unknown(len(constant))
        for conditions, trials, where in others:
            cell = Cell(conditions=conditions)
            if len(trials) < count:
                trials += try_cell(cell, count - len(trials))
            changed, tried = len(trials) - trials.count(constant[0]), len(trials)
            if tried and is_more_often(changed, tried, plain=count, comparisons=comparisons):
                return Diagnosis(
                    cause=hold.cause,
                    explanation=f"it changes in {changed} of {tried} trials{where}, and in none "
                    f"of {len(constant)} while {hold.what}",
                    cell=cell if where else Cell(conditions=hold.held),
                    changed=changed,
                    tried=tried,
                    is_held=not where,
                )
    return None


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
