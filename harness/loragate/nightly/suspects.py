"""What a diagnosis starts from and ends with. Pure.

What a trial has shown is its *signature*: the digest of a result, or a verdict with its kind. Two
trials of the same inputs must have the same one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from loragate.nightly.conditions import PLAIN, Cause, Conditions

# fresh processes that show whether a result is constant with nothing varied
ALONE = 6
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


def unknown(tried: int) -> Diagnosis:
    text = f"it did not show again in {tried} trials, with at most one factor varied in each"
    return Diagnosis(cause=Cause.UNKNOWN, explanation=text, tried=tried)


def trials_to_be_sure(rate: float) -> int:
    """Equal trials after which the rate has ended, not just paused."""
    return min(_MOST, max(ALONE, math.ceil(math.log(_ERROR) / math.log(1 - min(rate, 0.9)))))
