"""A result that is the same in every fresh process: what has changed it? Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from loragate.nightly.conditions import Cache, Cause, Clock, Conditions, Memory, Schedule
from loragate.nightly.suspects import (
    LOOKS,
    Cell,
    Diagnosis,
    Sighting,
    Suspect,
    Try,
    is_more_often,
    unknown,
)

# trials of each factor that may change a constant result; so many times of one that was seen to
_EACH = 4
_TIMES = 4
# times that a result has to change after the trial that is to be blamed for it
_SURE = 3


class ChangesAloneError(Exception):
    """The result is not constant with nothing varied, as more trials have shown."""

    def __init__(self, trials: Sequence[str]) -> None:
        super().__init__()
        self.trials = trials


@dataclass(frozen=True, slots=True)
class Constant:
    """A suspect whose result is `good` with nothing varied, and was another one in `odd`. plain:
    trials with nothing varied that were made to compare others with. rare: under what it has
    changed, too rarely to be no chance."""

    suspect: Suspect
    odd: Sighting
    good: str
    plain: list[str] = field(default_factory=list)
    rare: list[str] = field(default_factory=list)

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
    return unknown(tried, case.rare)


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
        if case.changed(found) and (more := _changing(case, cell, what, try_cell)):
            found, changed = more, case.changed(more)
            tried += len(found)
            text = f"it changes in {changed} of {len(found)} trials while {what}"
            if cause is not Cause.MEMORY and _ends_with_zeros(case, conditions, found, try_cell):
                cause, text = Cause.MEMORY, f"{text}, and never if fresh memory holds zeros"
            return Diagnosis(
                cause=cause, explanation=text, cell=cell, changed=changed, tried=len(found)
            )
    return unknown(tried)


def _changing(case: Constant, cell: Cell, what: str, try_cell: Try) -> list[str]:
    """Fresh trials of a cell, which has shown a change, if they change more often than as many with
    nothing varied; none if that may be chance. Raises ChangesAloneError."""
    found: list[str] = []
    home = Cell(conditions=case.suspect.home)
    for count in LOOKS:
        for trials, of in ((found, cell), (case.plain, home)):
            if len(trials) < count:
                trials += try_cell(of, count - len(trials))
        if case.changed(case.plain):
            raise ChangesAloneError(case.plain)
        if min(len(found), len(case.plain)) < count:
            return []
        # of each factor, of memory before all others, and of all factors at once
        comparisons = len(_factors(case)) + 2
        plain = len(case.plain)
        if is_more_often(case.changed(found), len(found), plain=plain, comparisons=comparisons):
            return found
    case.rare.append(what)
    return []


def _ends_with_zeros(
    case: Constant, conditions: Conditions, found: Sequence[str], try_cell: Try
) -> bool:
    """Whether the result is constant under these conditions once fresh memory holds zeros. What
    fresh memory holds by chance depends on everything that a process does, and on others."""
    held = Cell(conditions=replace(conditions, memory=Memory.ZEROS))
    shown: list[str] = []
    while len(shown) < len(found):
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
    what = "all was as in the trial that has shown it"
    if not case.changed(found) or not (more := _changing(case, cell, what, try_cell)):
        return unknown(len(found))
    found, changed = more, case.changed(more)
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
