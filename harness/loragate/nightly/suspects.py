"""What a diagnosis starts from and ends with. Pure.

What a trial has shown is its *signature*: the digest of a result, or a verdict with its kind. Two
trials of the same inputs must have the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from loragate.nightly.conditions import PLAIN, Cause, Conditions

# fresh processes that show whether a result is constant with nothing varied
ALONE = 6
# fresh trials of a cell, and as many of the one it is compared with: few tell where a result
# changes nearly always, the most of them where it changes in a fifth of all trials
LOOKS = (8, 20, 60)
# a diagnosis blames what has nothing to do with it this rarely
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


def unknown(tried: int, rare: Sequence[str] = ()) -> Diagnosis:
    """rare: under what it has changed, too rarely to be no chance."""
    text = f"it did not show again in {tried} trials, with at most one factor varied in each"
    if rare:
        text = f"it changed while {' and while '.join(rare)}, too rarely to tell that from chance"
    return Diagnosis(cause=Cause.UNKNOWN, explanation=text, tried=tried)


def is_more_often(changed: int, tried: int, *, plain: int, comparisons: int) -> bool:
    """Whether `changed` of `tried` is more than none of `plain` trials by chance would let one see.

    The trials must be fresh: those after which somebody began to look have shown a change already.
    comparisons: those of one diagnosis, which share the error.
    """
    from scipy.stats import fisher_exact

    table = [[changed, tried - changed], [0, plain]]
    found = fisher_exact(table, alternative="greater").pvalue
    return bool(found <= _ERROR / (comparisons * len(LOOKS)))
