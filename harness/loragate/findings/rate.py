"""How often a finding shows, and when its absence means that it is gone. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import comb, exp, log, log1p

# of the lower bound of a recorded rate
_CONFIDENCE = 0.99
# an absence that is less likely than this is no accident
_ACCIDENT = 1e-3
# halvings of [0, 1]: beyond the precision of a float
_HALVINGS = 60


@dataclass(frozen=True, slots=True)
class Rate:
    """A finding showed in `draws` of `of` draws; each case and each draw of its data is one."""

    draws: int
    of: int

    def __post_init__(self) -> None:
        assert 0 < self.draws <= self.of, f"{self.draws} of {self.of}"

    def __str__(self) -> str:
        return f"{self.draws} of {self.of} draws"

    @property
    def always(self) -> bool:
        """Whether it showed in every draw; it must then show whenever it is tried."""
        return self.draws == self.of


def gone(rate: Rate, unseen: int) -> bool:
    """Whether `unseen` draws, none of which shows the finding, exclude the recorded rate.

    The true rate p is at least `least_rate(rate)` with a confidence of 99 %, and `unseen` draws
    without the finding have probability (1 - p) ** unseen. Below 0.001 the finding is gone. So a
    finding that is still there is called gone with a probability of at most 1.1 %. One that showed
    in 4 of 20 draws has a rate of at least 0.044, which 155 draws without it exclude.

    A finding that showed in every draw is called gone by the first draw without it.
    """
    return unseen > 0 and (rate.always or (1 - least_rate(rate)) ** unseen < _ACCIDENT)


@cache
def least_rate(rate: Rate) -> float:
    """The lower bound of Clopper and Pearson: the rate at which as many draws as were seen, or
    more, have a probability of 1 %. That probability grows with the rate, so bisection finds it."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _at_least(rate, middle) < 1 - _CONFIDENCE:
            low = middle
        else:
            high = middle
    return low


def _at_least(rate: Rate, chance: float) -> float:
    """The probability of `rate.draws` or more of `rate.of` draws that show with that chance."""
    # in logarithms: a binomial coefficient of 1100 draws is no float any more
    return sum(
        exp(log(comb(rate.of, k)) + k * log(chance) + (rate.of - k) * log1p(-chance))
        for k in range(rate.draws, rate.of + 1)
    )
