"""One suspect, one factor at a time: what does its result depend on? Pure: the trials themselves
are made by whoever asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from loragate.nightly.conditions import Cause, Clock, Memory, Schedule
from loragate.nightly.constant_results import Constant, what_changes
from loragate.nightly.suspects import (
    ALONE,
    Cell,
    Diagnosis,
    Suspect,
    TimeSpentError,
    Try,
    trials_to_be_sure,
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
    return what_changes(Constant(suspect, odd, alone[0]), try_cell, len(alone))


def _of_changing(suspect: Suspect, alone: Sequence[str], try_cell: Try) -> Diagnosis:
    """The result changes with nothing varied: which factor, held fast, makes it constant?"""
    home = suspect.home
    usual = max(set(alone), key=alone.count)
    changed = sum(signature != usual for signature in alone)
    enough = trials_to_be_sure(changed / len(alone))
    seen = f"it changes in {changed} of {len(alone)} trials"
    holds = [
        (Cause.MEMORY, replace(home, memory=Memory.ZEROS), "fresh memory holds zeros"),
        (Cause.CLOCK, replace(home, clock=Clock.SLOW), "the clocks run slowly"),
    ]
    if home.gpu:
        held = replace(home, schedule=Schedule.BLOCKING)
        holds.append((Cause.SCHEDULE, held, "each launch is waited for"))
    for cause, conditions, what in holds:
        cell = Cell(conditions=conditions)
        found = try_cell(cell, enough)
        if len(found) >= enough and len(set(found)) == 1:
            text = f"{seen}, and in none of {len(found)} while {what}"
            return Diagnosis(
                cause=cause,
                explanation=text,
                cell=cell,
                changed=changed,
                tried=len(alone),
                is_held=True,
            )
    return Diagnosis(
        cause=Cause.RUN_TO_RUN,
        explanation=f"{seen} with nothing varied: atomic additions, or a race within a kernel",
        cell=Cell(conditions=home),
        changed=changed,
        tried=len(alone),
    )
