"""One suspect, one factor at a time: what does its result depend on? Pure: the trials themselves
are made by whoever asks.

What a trial has shown is its *signature*: the digest of a result, or a verdict with its kind. Two
trials of the same inputs must have the same one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from loragate.nightly.conditions import (
    PLAIN,
    Cache,
    Cause,
    Clock,
    Conditions,
    Memory,
    Schedule,
)

# fresh processes that show whether a result is constant with nothing varied
_ALONE = 6
# of each factor that may change a constant result; so many times of one that was seen to do so
_EACH = 4
_TIMES = 4
# times that a result has to change after the trial that is to be blamed for it
_SURE = 3
_MOST = 40
# a result that changed at the observed rate would look constant this rarely
_ERROR = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Fresh processes under the same conditions; `before` are the trials that each runs first."""

    conditions: Conditions
    before: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """What a trial of the suspect has shown, its conditions, and the trials of its process before
    it, the oldest first."""

    signature: str
    conditions: Conditions = PLAIN
    before: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A case and draw whose trials have not all shown the same.

    sightings: all of its trials. wrong: signatures that are wrong by themselves, not only beside
    another. gpus: those that may be tried.
    """

    sightings: tuple[Sighting, ...]
    wrong: frozenset[str] = frozenset()
    gpus: tuple[str, ...] = ()

    @property
    def home(self) -> Conditions:
        """Nothing varied, on the GPU of the first trial."""
        return replace(PLAIN, gpu=self.sightings[0].conditions.gpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """cell: where the result changed, or where a changing one became constant. polluter: the trial
    that has to run before. changed of tried: trials of that cell, or with nothing varied. is_cut:
    there was no time to find the cause. is_held: in the cell a changing result became constant."""

    cause: Cause
    explanation: str
    cell: Cell | None = None
    polluter: str = ""
    changed: int = 0
    tried: int = 0
    is_cut: bool = False
    is_held: bool = False


class TimeSpentError(Exception):
    """There is no time for as many trials as a cell needs."""


Try = Callable[[Cell, int], Sequence[str]]
"""The signatures of so many fresh processes of a cell; several of a process are all given, and none
of a process in which the machine failed. Raises TimeSpentError."""


def diagnose(suspect: Suspect, try_cell: Try) -> Diagnosis:
    """What the suspect's result depends on."""
    try:
        return _diagnose(suspect, try_cell)
    except TimeSpentError:
        text = "the time for diagnoses was spent before it was known"
        return Diagnosis(cause=Cause.UNKNOWN, explanation=text, is_cut=True)


def _diagnose(suspect: Suspect, try_cell: Try) -> Diagnosis:
    alone = try_cell(Cell(conditions=suspect.home), _ALONE)
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
        return _unknown(len(alone))
    return _of_constant(_Constant(suspect, odd, alone[0]), try_cell, len(alone))


def _unknown(tried: int) -> Diagnosis:
    text = f"it did not show again in {tried} trials, with at most one factor varied in each"
    return Diagnosis(cause=Cause.UNKNOWN, explanation=text, tried=tried)


def _of_changing(suspect: Suspect, alone: Sequence[str], try_cell: Try) -> Diagnosis:
    """The result changes with nothing varied: which factor, held fast, makes it constant?"""
    home = suspect.home
    usual = max(set(alone), key=alone.count)
    changed = sum(signature != usual for signature in alone)
    enough = _trials_to_be_sure(changed / len(alone))
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


def _trials_to_be_sure(rate: float) -> int:
    """Equal trials after which the rate has ended, not just paused."""
    return min(_MOST, max(_ALONE, math.ceil(math.log(_ERROR) / math.log(1 - min(rate, 0.9)))))


@dataclass(frozen=True, slots=True)
class _Constant:
    """A suspect whose result is `good` with nothing varied, and was another one in `odd`."""

    suspect: Suspect
    odd: Sighting
    good: str

    def changed(self, found: Sequence[str]) -> int:
        return sum(signature != self.good for signature in found)


def _of_constant(case: _Constant, try_cell: Try, tried: int) -> Diagnosis:
    """Which factor changes the result, or what has to run before it?"""
    ways: tuple[Callable[[_Constant, Try], Diagnosis], ...] = (_of_factors, _of_order, _of_all)
    if case.odd.conditions == case.suspect.home:
        # no factor was varied when it showed; what ran before also leaves memory that is not zero
        ways = (_of_memory, _of_order, _of_factors)
    for way in ways:
        found = way(case, try_cell)
        if found.cause is not Cause.UNKNOWN:
            return found
        tried += found.tried
    return _unknown(tried)


def _of_memory(case: _Constant, try_cell: Try) -> Diagnosis:
    poisoned = replace(case.suspect.home, memory=Memory.POISON)
    return _of_factors(replace(case, odd=replace(case.odd, conditions=poisoned)), try_cell, most=1)


def _of_factors(case: _Constant, try_cell: Try, most: int | None = None) -> Diagnosis:
    """most: how many factors are tried; None for all."""
    tried = 0
    seen = case.odd.conditions.varied().items() - case.suspect.home.varied().items()
    for cause, conditions, what in _factors(case)[:most]:
        cell = Cell(conditions=conditions)
        found: list[str] = []
        # it may show rarely where it was seen
        for _ in range(_TIMES if conditions.varied().items() & seen else 1):
            found += try_cell(cell, _EACH)
            if case.changed(found):
                break
        tried += len(found)
        changed = case.changed(found)
        if changed:
            text = f"it changes in {changed} of {len(found)} trials while {what}"
            if cause is not Cause.MEMORY and _ends_with_zeros(case, conditions, found, try_cell):
                cause, text = Cause.MEMORY, f"{text}, and never if fresh memory holds zeros"
            return Diagnosis(
                cause=cause, explanation=text, cell=cell, changed=changed, tried=len(found)
            )
    return _unknown(tried)


def _ends_with_zeros(
    case: _Constant, conditions: Conditions, found: Sequence[str], try_cell: Try
) -> bool:
    """Whether the result is constant under these conditions once fresh memory holds zeros. What
    fresh memory holds by chance depends on everything that a process does, and on others."""
    enough = _trials_to_be_sure(case.changed(found) / len(found))
    held = Cell(conditions=replace(conditions, memory=Memory.ZEROS))
    shown: list[str] = []
    while len(shown) < enough:
        more = try_cell(held, _EACH)
        if not more or case.changed(more):
            return False
        shown += more
    return True


def _factors(case: _Constant) -> Sequence[tuple[Cause, Conditions, str]]:
    """The factors of the trial in which the suspect was seen come first."""
    home, odd = case.suspect.home, case.odd.conditions
    neighbours = max(1, odd.neighbours)
    others = "another process runs" if neighbours == 1 else f"{neighbours} other processes run"
    every = [
        (Cause.MEMORY, replace(home, memory=Memory.POISON), "fresh memory holds NaN"),
        (Cause.NEIGHBOUR, replace(home, neighbours=neighbours), f"{others} cases"),
        (Cause.CLOCK, replace(home, clock=Clock.FAST), "the clocks run fast"),
        (Cause.CLOCK, replace(home, clock=Clock.SLOW), "the clocks run slowly"),
    ]
    if home.gpu:
        # the interpreter compiles nothing and has no streams
        every += [
            (Cause.CACHE, replace(home, cache=Cache.COLD), "the compile cache is empty"),
            (Cause.SCHEDULE, replace(home, schedule=Schedule.DELAYED), "a stream is late"),
        ]
    every += [
        (Cause.MACHINE, replace(home, gpu=gpu), f"it runs on GPU {gpu}")
        for gpu in case.suspect.gpus
        if gpu != home.gpu
    ]
    seen = odd.varied().items()
    varied = home.varied().items()
    return sorted(every, key=lambda factor: not (factor[1].varied().items() - varied) & seen)


def _of_order(case: _Constant, try_cell: Try) -> Diagnosis:
    before = case.odd.before
    if not before or not _follows(case, before, try_cell):
        return _unknown(int(bool(before)))
    needed = _fewest(case, before, try_cell)
    cell = Cell(conditions=case.suspect.home, before=needed)
    found = try_cell(cell, _SURE)
    if case.changed(found) < _SURE:
        # by chance: what depends on the order does so every time
        return _unknown(len(found))
    if len(needed) == 1:
        text = f"it changes after {needed[0]}, and not alone"
    else:
        text = f"it changes after {len(needed)} other trials, and after neither half of them"
    return Diagnosis(
        cause=Cause.ORDER,
        explanation=text,
        cell=cell,
        polluter=needed[-1],
        changed=case.changed(found),
        tried=len(found),
    )


def _of_all(case: _Constant, try_cell: Try) -> Diagnosis:
    """As it was when the suspect was seen, after all that had been tried apart."""
    cell = Cell(conditions=case.odd.conditions, before=case.odd.before)
    found = try_cell(cell, _EACH)
    changed = case.changed(found)
    if not changed:
        return _unknown(len(found))
    text = (
        f"it changes in {changed} of {len(found)} trials under all conditions of the trial that "
        "has shown it, and under none of them alone"
    )
    return Diagnosis(
        cause=Cause.COMBINATION, explanation=text, cell=cell, changed=changed, tried=len(found)
    )


def _follows(case: _Constant, before: tuple[str, ...], try_cell: Try) -> bool:
    found = try_cell(Cell(conditions=case.suspect.home, before=before), 1)
    return bool(case.changed(found))


def _fewest(case: _Constant, before: tuple[str, ...], try_cell: Try) -> tuple[str, ...]:
    """The trial after which the suspect shows, found by halves; nearly always it is a single one.
    More where neither half does it alone."""
    while len(before) > 1:
        middle = len(before) // 2
        halves = (before[middle:], before[:middle])
        half = next((h for h in halves if _follows(case, h, try_cell)), None)
        if half is None:
            return before
        before = half
    return before
