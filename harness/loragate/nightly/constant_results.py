"""A result that is the same in every fresh process: what has changed it? Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from loragate.nightly.conditions import Cache, Cause, Clock, Conditions, Memory, Schedule
from loragate.nightly.suspects import (
    Cell,
    Diagnosis,
    Sighting,
    Suspect,
    Try,
    trials_to_be_sure,
    unknown,
)

# trials of each factor that may change a constant result; so many times of one that was seen to
_EACH = 4
_TIMES = 4
# times that a result has to change after the trial that is to be blamed for it
_SURE = 3


@dataclass(frozen=True, slots=True)
class Constant:
    """A suspect whose result is `good` with nothing varied, and was another one in `odd`."""

    suspect: Suspect
    odd: Sighting
    good: str

    def changed(self, found: Sequence[str]) -> int:
        return sum(signature != self.good for signature in found)


def what_changes(case: Constant, try_cell: Try, tried: int) -> Diagnosis:
    """Which factor changes the result, or what has to run before it?"""
    ways: tuple[Callable[[Constant, Try], Diagnosis], ...] = (_of_factors, _of_order, _of_all)
    if case.odd.conditions == case.suspect.home:
        # no factor was varied when it showed; what ran before also leaves memory that is not zero
        ways = (_of_memory, _of_order, _of_factors)
    for way in ways:
        found = way(case, try_cell)
        if found.cause is not Cause.UNKNOWN:
            return found
        tried += found.tried
    return unknown(tried)


def _of_memory(case: Constant, try_cell: Try) -> Diagnosis:
    poisoned = replace(case.suspect.home, memory=Memory.POISON)
    return _of_factors(replace(case, odd=replace(case.odd, conditions=poisoned)), try_cell, most=1)


def _of_factors(case: Constant, try_cell: Try, most: int | None = None) -> Diagnosis:
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
    return unknown(tried)


def _ends_with_zeros(
    case: Constant, conditions: Conditions, found: Sequence[str], try_cell: Try
) -> bool:
    """Whether the result is constant under these conditions once fresh memory holds zeros. What
    fresh memory holds by chance depends on everything that a process does, and on others."""
    enough = trials_to_be_sure(case.changed(found) / len(found))
    held = Cell(conditions=replace(conditions, memory=Memory.ZEROS))
    shown: list[str] = []
    while len(shown) < enough:
        more = try_cell(held, _EACH)
        if not more or case.changed(more):
            return False
        shown += more
    return True


def _factors(case: Constant) -> Sequence[tuple[Cause, Conditions, str]]:
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


def _of_order(case: Constant, try_cell: Try) -> Diagnosis:
    before = case.odd.before
    if not before or not _follows(case, before, try_cell):
        return unknown(int(bool(before)))
    needed = _fewest(case, before, try_cell)
    cell = Cell(conditions=case.suspect.home, before=needed)
    found = try_cell(cell, _SURE)
    if case.changed(found) < _SURE:
        # by chance: what depends on the order does so every time
        return unknown(len(found))
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


def _of_all(case: Constant, try_cell: Try) -> Diagnosis:
    """As it was when the suspect was seen, after all that had been tried apart."""
    cell = Cell(conditions=case.odd.conditions, before=case.odd.before)
    found = try_cell(cell, _EACH)
    changed = case.changed(found)
    if not changed:
        return unknown(len(found))
    text = (
        f"it changes in {changed} of {len(found)} trials under all conditions of the trial that "
        "has shown it, and under none of them alone"
    )
    return Diagnosis(
        cause=Cause.COMBINATION, explanation=text, cell=cell, changed=changed, tried=len(found)
    )


def _follows(case: Constant, before: tuple[str, ...], try_cell: Try) -> bool:
    found = try_cell(Cell(conditions=case.suspect.home, before=before), 1)
    return bool(case.changed(found))


def _fewest(case: Constant, before: tuple[str, ...], try_cell: Try) -> tuple[str, ...]:
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
