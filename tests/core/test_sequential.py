"""A sequential test and a bound that may be looked at after every trial."""

from __future__ import annotations

import math
from random import Random

import pytest

from loragate.core.sequential import (
    Decision,
    Interval,
    SequentialTest,
    anytime_interval,
    exact_interval,
)


def test_a_sequential_test_needs_as_many_requests_as_its_error_allows() -> None:
    test = SequentialTest(healthy=0.005, defective=0.05)
    clean = next(n for n in range(1, 1000) if test.decide(0, n) is Decision.PASS)
    assert clean == 100
    assert test.decide(0, clean - 1) is Decision.UNDECIDED
    assert test.decide(1, 1) is Decision.UNDECIDED
    assert test.decide(2, 2) is Decision.FAIL


@pytest.mark.parametrize(
    ("rate", "wrong"), [(0.005, Decision.FAIL), (0.05, Decision.PASS)], ids=["healthy", "defective"]
)
def test_a_sequential_test_is_rarely_wrong_however_often_one_looks(
    rate: float, wrong: Decision
) -> None:
    test, random, count = SequentialTest(healthy=0.005, defective=0.05), Random(13), 0
    for _ in range(1000):
        failures = requests = 0
        decision = Decision.UNDECIDED
        while decision is Decision.UNDECIDED:
            requests += 1
            failures += random.random() < rate
            decision = test.decide(failures, requests)
        count += decision is wrong
    # 10 are expected at most; 25 are 5 standard deviations more
    assert count < 25


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"healthy": 0.1, "defective": 0.1}, "0 < healthy < defective < 1"),
        ({"healthy": 0.0, "defective": 0.1}, "0 < healthy < defective < 1"),
        ({"healthy": 0.1, "defective": 0.2, "error": 0.5}, "error must be between 0 and 0.5"),
    ],
)
def test_rates_that_make_no_test_are_refused(fields: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SequentialTest(**fields)


def test_the_number_of_clean_trials_is_the_first_that_passes() -> None:
    for healthy, defective, error in [(0.005, 0.05, 0.01), (1e-4, 1e-2, 1e-3), (0.1, 0.9, 0.4)]:
        test = SequentialTest(healthy, defective, error)
        count = test.clean_trials()
        assert test.decide(0, count) is Decision.PASS
        assert test.decide(0, count - 1) is Decision.UNDECIDED


def test_the_bound_without_a_failure_is_the_one_worked_out_by_hand() -> None:
    # B(1/2, n + 1/2) / B(1/2, 1/2) is (2n choose n) / 4^n; with 4 trials 70 / 256
    expected = 1 - (0.05 * 70 / 256) ** (1 / 4)
    assert anytime_interval(0, 4).high == pytest.approx(expected, abs=1e-9)
    assert anytime_interval(0, 4).low == 0
    # what fails always is the same from the other side
    assert anytime_interval(4, 4).low == pytest.approx(1 - expected, abs=1e-9)
    assert anytime_interval(4, 4).high == 1
    # 1 of 2: B(3/2, 3/2) / B(1/2, 1/2) = 1/8, and p (1 - p) = 0.05 / 8 at both ends
    both = anytime_interval(1, 2)
    root = math.sqrt(1 - 4 * 0.05 / 8) / 2
    assert (both.low, both.high) == (pytest.approx(0.5 - root), pytest.approx(0.5 + root))


def test_no_trials_refute_no_rate() -> None:
    assert (anytime_interval(0, 0).low, anytime_interval(0, 0).high) == (0, 1)


@pytest.mark.parametrize("rate", [0.002, 0.05, 0.5])
def test_a_bound_for_all_times_is_rarely_left_while_one_for_a_fixed_time_often_is(
    rate: float,
) -> None:
    random, left, left_fixed = Random(16), 0, 0
    looks = [n for n in range(1, 400) if n < 20 or n % 20 == 0]
    for _ in range(100):
        outcomes = [random.random() < rate for _ in range(400)]
        counts = {n: sum(outcomes[:n]) for n in looks}
        left += any(not _holds(anytime_interval(k, n), rate) for n, k in counts.items())
        if rate == 0.5:
            # each takes a millisecond
            fixed = (exact_interval(k, n) for n, k in counts.items() if left_fixed <= 16)
            left_fixed += any(not _holds(interval, rate) for interval in fixed)
    # 5 are allowed; 16 are 5 standard deviations more
    assert left < 16
    # the check can tell: an interval for one look does not hold at all of them
    assert left_fixed > 16 or rate != 0.5


def _holds(interval: Interval, rate: float) -> bool:
    return interval.low <= rate <= interval.high
