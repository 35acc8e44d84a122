"""Rates of failures: exact intervals, a test that may be looked at after each trial, and a bound
that holds at all times. Pure.

scipy takes a second to import, and few of the processes that import this module need it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class Decision(Enum):
    PASS = "pass"
    FAIL = "fail"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class SequentialTest:
    """Wald's test of a rate of failures: `healthy` against `defective`, wrong in at most `error` of
    all decisions, however often one looks. Trials must be independent. ValueError."""

    healthy: float
    defective: float
    error: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.healthy < self.defective < 1:
            raise ValueError(
                "healthy and defective must be rates with 0 < healthy < defective < 1 "
                f"(got {self.healthy:g} and {self.defective:g})"
            )
        if not 0 < self.error < 0.5:
            raise ValueError(f"error must be between 0 and 0.5 (got {self.error:g})")

    def decide(self, failures: int, trials: int) -> Decision:
        """After so many failures of so many trials."""
        evidence = failures * math.log(self.defective / self.healthy)
        evidence += (trials - failures) * math.log((1 - self.defective) / (1 - self.healthy))
        bound = math.log((1 - self.error) / self.error)
        if evidence >= bound:
            return Decision.FAIL
        return Decision.PASS if evidence <= -bound else Decision.UNDECIDED

    def clean_trials(self) -> int:
        """How many trials without a failure it takes to PASS."""
        bound = math.log((1 - self.error) / self.error)
        return math.ceil(bound / -math.log((1 - self.defective) / (1 - self.healthy)))


@dataclass(frozen=True, slots=True)
class Interval:
    low: float
    high: float


def exact_interval(failures: int, trials: int) -> Interval:
    """The interval of Clopper and Pearson of 95 % for a rate. One look, at a number of trials that
    was fixed before; at least one trial."""
    from scipy.stats import binomtest

    found = binomtest(failures, trials).proportion_ci(method="exact")
    return Interval(float(found.low), float(found.high))


def anytime_interval(failures: int, trials: int, error: float = 0.05) -> Interval:
    """The rates that a mixture of all rates does not refute, after any number of looks.

    Under a rate p the ratio of the mixture's likelihood to that of p is a martingale that begins at
    1, so that it ever reaches 1 / error with a probability of at most `error` (Ville). The mixture
    is Jeffreys' prior, Beta(1/2, 1/2), which is narrow where few trials fail.
    """
    from scipy.optimize import brentq
    from scipy.special import betaln

    if trials == 0:
        return Interval(0.0, 1.0)
    passed = trials - failures
    mixture = float(betaln(failures + 0.5, passed + 0.5) - betaln(0.5, 0.5))
    limit = mixture + math.log(error)

    def left(rate: float) -> float:
        """Above 0 for rates that are not refuted."""
        return _log(failures, rate) + _log(passed, 1 - rate) - limit

    # its rate is the one that the trials refute least
    best = failures / trials
    low = 0.0 if failures == 0 else float(brentq(left, 0.0, best))
    high = 1.0 if passed == 0 else float(brentq(left, best, 1.0))
    return Interval(low, high)


def _log(count: int, rate: float) -> float:
    if count == 0:
        return 0.0
    # finite, because a solver asks for both ends
    return count * math.log(max(rate, 1e-300))
