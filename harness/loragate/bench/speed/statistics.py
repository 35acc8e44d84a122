"""Whether a call of one build is slower than that of another, by the noise of the same run. Pure.

Two processes of equal code differ by more than the rounds of one process show: by where their
memory lies, for instance. Each build is therefore measured by several processes. How far the
processes of one build (A/A) are apart says how far two builds may be apart by chance, and so sets
the limit that a change has to exceed; its whole bootstrap interval over the rounds has to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

# a change below this is of no interest, however little noise there is
SMALLEST_CHANGE = 0.01
# a slow-down by this much must not stay unseen: where noise could hide it, a row is undecided
LARGEST_UNSEEN = 0.05
# chance that any row of a run of equal code exceeds its limit
FALSE_ALARMS = 0.01
# chance that a call counts as noisier than the others in a run in which all are alike
_UNUSUAL = 0.01
_FEWEST_POOLED = 3
_CONFIDENCE = 0.99
_RESAMPLES = 2000


class Change(StrEnum):
    SLOWER = "slower"
    FASTER = "faster"
    UNCHANGED = "unchanged"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Samples:
    """Microseconds of one call of one row: [2, processes, rounds], of the build that is compared
    against and of the present one. Entries of one round were taken side by side."""

    row: str
    call: str
    us: NDArray[np.float64]

    @property
    def effects(self) -> NDArray[np.float64]:
        """Logarithm of the ratio of both builds, round by round."""
        of_builds = np.log(self.us).mean(axis=1)
        difference: NDArray[np.float64] = of_builds[1] - of_builds[0]
        return difference

    @property
    def processes(self) -> int:
        """Of each build."""
        return int(self.us.shape[1])

    @property
    def scatter(self) -> float:
        """Variance of what chance adds to one process, as the mean of the estimates of both
        builds."""
        logarithms = np.log(self.us)
        # against the others of its round: the clock of the device may change in between
        medians = np.median(logarithms - logarithms.mean(axis=(0, 1)), axis=2)
        return float(medians.var(axis=1, ddof=1).mean())

    @property
    def df(self) -> int:
        """Degrees of freedom of `scatter`."""
        return len(self.us) * (self.processes - 1)

    def with_more(self, other: Samples) -> Samples:
        """The same call with the processes of another measurement as well: each of these counts
        against the others of its own, because the clock of the device may change in between."""
        logarithms = [np.log(each.us) for each in (self, other)]
        level = logarithms[0].mean(axis=(0, 1))
        alike = [each - each.mean(axis=(0, 1)) + level for each in logarithms]
        return replace(self, us=np.exp(np.concatenate(alike, axis=1)))


@dataclass(frozen=True, slots=True)
class Comparison:
    """One call of one row. `ratio`, `low` and `high`: the time of the present build over that of
    the other one, with its bootstrap interval. `limit`: the ratio that chance may reach."""

    row: str
    call: str
    before_us: float
    now_us: float
    ratio: float
    low: float
    high: float
    limit: float
    change: Change


def without_control(us: NDArray[np.float64], control: NDArray[np.float64]) -> NDArray[np.float64]:
    """Times of a call [2, processes, rounds] without what chance adds in each process to a part of
    it, whose times alone are `control`: where the operands lie changes how fast a product of few
    rows reads its weight by several percent."""
    apart = np.median(control - control.mean(axis=(0, 1)), axis=2, keepdims=True)
    corrected: NDArray[np.float64] = us - apart
    return corrected


def compare(
    samples: Sequence[Samples],
    *,
    others: Sequence[Samples] = (),
    judgements: int | None = None,
    seed: int = 0,
) -> tuple[Comparison, ...]:
    """Judge each of `samples`. The noise of `others`, of the same run, counts as well. judgements:
    how many share the chance of a false alarm; None for one of each sample."""
    if not samples:
        return ()
    pool = _pool([*samples, *others])
    # in both directions
    tail = FALSE_ALARMS / (2 * (judgements or len(samples)))
    # takes a second to import, and tables are drawn without it
    from scipy.stats import t as student_t

    quantile = float(student_t.ppf(1 - tail, df=pool.df))
    generator = np.random.default_rng(seed)
    return tuple(_judge(item, quantile * _deviation(item, pool), generator) for item in samples)


@dataclass(frozen=True, slots=True)
class _Pool:
    """Variance of what chance adds to one process, and by how many degrees of freedom that is
    known."""

    scatter: float
    df: int


def _deviation(item: Samples, pool: _Pool) -> float:
    """That of the effect of a call, by chance."""
    # rows of short calls have more noise than others: none is judged by less than its own
    scatter = max(pool.scatter, item.scatter)
    # both builds are means over their processes
    return math.sqrt(2 * scatter / item.processes)


def _pool(samples: Sequence[Samples]) -> _Pool:
    """Of all calls but those that have more noise than chance makes of that of the others: the
    processes of one call may be in either of two states, which says nothing of the other calls."""
    from scipy.stats import f as fisher_f

    kept = sorted((item.scatter, item.df) for item in samples)
    while len(kept) > _FEWEST_POOLED:
        (most, own), rest = kept[-1], _together(kept[:-1])
        usual = float(fisher_f.ppf(1 - _UNUSUAL / len(kept), own, rest.df))
        if most <= usual * rest.scatter:
            break
        kept.pop()
    return _together(kept)


def _together(scatters: Sequence[tuple[float, int]]) -> _Pool:
    df = sum(own for _, own in scatters)
    return _Pool(sum(scatter * own for scatter, own in scatters) / df, df)


def confirmed(first: Comparison, again: Comparison) -> Comparison:
    """The result of a row that was measured `again` by other processes: a change that does not show
    twice is undecided."""
    if again.change is first.change:
        return again
    return replace(again, change=Change.UNDECIDED)


def _judge(samples: Samples, chance: float, generator: np.random.Generator) -> Comparison:
    effects = samples.effects
    low, high = _interval(effects, generator)
    limit = max(math.log1p(SMALLEST_CHANGE), chance)
    before_us, now_us = np.median(samples.us, axis=(1, 2))
    return Comparison(
        row=samples.row,
        call=samples.call,
        before_us=float(before_us),
        now_us=float(now_us),
        ratio=math.exp(float(np.median(effects))),
        low=math.exp(low),
        high=math.exp(high),
        limit=math.exp(limit),
        change=_change(low, high, limit),
    )


def _change(low: float, high: float, limit: float) -> Change:
    if low > limit:
        return Change.SLOWER
    if high < -limit:
        return Change.FASTER
    unseen = high + limit > math.log1p(LARGEST_UNSEEN)
    return Change.UNDECIDED if unseen else Change.UNCHANGED


def _interval(effects: NDArray[np.float64], generator: np.random.Generator) -> tuple[float, float]:
    """Bootstrap interval of the median over the rounds."""
    drawn = generator.integers(len(effects), size=(_RESAMPLES, len(effects)))
    medians = np.median(effects[drawn], axis=1)
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(medians, (tail, 1 - tail))
    return float(low), float(high)
