"""Clocks that go back, run ahead or stand far away: scans, histories, pages and quarantine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from pathlib import Path

import pytest

from loragate.commands.morning import _today
from loragate.core.verdict import ExitCode
from loragate.history import Outcome, ScanRun, TrialRecord, open_history
from loragate.nightly.morning import day_of, morning
from loragate.nightly.pages.html import render_html
from loragate.nightly.pages.summary import render_markdown
from loragate.nightly.pages.terminal import render_terminal
from loragate.nightly.quarantine import Quarantined, QuarantineError, check_dates, held
from loragate.report.colour import Colour
from loragate.scan.clock import RunClock

NewRun = Callable[..., ScanRun]
NewTrial = Callable[..., TrialRecord]

_DAY_S = 86400.0
_TODAY = date(2026, 11, 23)
_NOON = datetime(2026, 11, 23, 12, tzinfo=UTC).timestamp()
_CASE = "some.dense_delta.dtype-bf16"
_ENTRY = Quarantined(case=_CASE, reason="atomics", owner="ada", since=_TODAY, clean_runs=1)


class _Hands:
    """A clock that somebody sets, and one that nobody can."""

    def __init__(self, now: float) -> None:
        self.now, self.passed = now, 50.0

    def clock(self, last: float | None = None) -> RunClock:
        return RunClock(last, now=lambda: self.now, monotonic=lambda: self.passed)


def test_a_clock_that_is_set_within_a_run_moves_no_trial() -> None:
    hands = _Hands(_NOON)
    clock = hands.clock()
    times = []
    for set_to in (0.0, -7200.0, 1e9):
        hands.passed += 1
        hands.now += set_to
        times.append(clock() - _NOON)
    assert times == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("last", "after"),
    [
        (None, 0.0),
        # days and years ago
        (_NOON - 1, 0.0),
        (0.0, 0.0),
        # the clock was set back since, by a second or an hour
        (_NOON, 0.001),
        (_NOON + 1, 1.001),
        (_NOON + 3600, 3600.001),
        # it was wrong then: that goes away with the next run
        (_NOON + 2 * _DAY_S, 0.0),
        (4e9, 0.0),
    ],
)
def test_a_run_begins_after_what_its_machine_has_recorded(last: float | None, after: float) -> None:
    assert _Hands(_NOON).clock(last).started - _NOON == pytest.approx(after, abs=1e-5)


def test_a_machine_whose_clock_stands_before_1970_begins_in_1970() -> None:
    assert _Hands(-1e9).clock().started == 0


def test_what_a_machine_has_recorded_last_is_of_its_own_runs(
    tmp_path: Path, scan_run: NewRun, trial: NewTrial
) -> None:
    with open_history(tmp_path / "h.db") as history:
        assert history.last_of("host") is None
        history.add_run(scan_run("a", started_at=10.0))
        assert history.last_of("host") == 10
        history.add(trial(0, "a", at=30.0))
        history.add_run(scan_run("b", started_at=99.0, machine="other"))
        assert (history.last_of("host"), history.last_of("other")) == (30, 99)


def _pages(runs: list[ScanRun], trials: list[TrialRecord]) -> list[str]:
    page = morning(runs, trials, today=_TODAY)
    return [render_terminal(page, Colour.OFF), render_html(page), render_markdown(page)]


def test_a_run_of_a_day_to_come_is_told_on_every_page(scan_run: NewRun, trial: NewTrial) -> None:
    for days, is_told in ((0, False), (1, False), (2, True), (30_000, True)):
        run = scan_run(started_at=_NOON + days * _DAY_S)
        for text in _pages([run], [trial(0, at=run.started_at)]):
            assert ("the clock was wrong on host" in text) == is_told


@pytest.mark.parametrize("at", [0.0, 1.5, 253_402_300_799.0, 1e30, -1e30])
def test_a_night_at_any_time_is_on_the_page(
    at: float, scan_run: NewRun, trial: NewTrial, tmp_path: Path
) -> None:
    runs = [scan_run(started_at=at), scan_run("night-2", started_at=_NOON)]
    # of three at once the first and the last one stay
    trials = [trial(k, at=at) for k in range(3)]
    other = {"case": "other", "path": "other", "outcome": Outcome.DIFFERENT}
    trials.append(trial(0, "night-2", at=_NOON, **other))
    assert all(day_of(at) in text for text in _pages(runs, trials)[1:2])
    with open_history(tmp_path / "h.db") as history:
        assert history.take(runs, (), trials) == 4
        # what is far ahead of a limit is not older than it
        assert history.prune(before=_NOON) == (at < _NOON)


@pytest.fixture(params=["Pacific/Kiritimati", "Pacific/Pago_Pago", "Europe/Berlin", "UTC"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("zone")
def test_days_are_those_of_utc_in_every_time_zone() -> None:
    assert day_of(_NOON) == "2026-11-23 12:00"
    # within the hour that Berlin has twice in that night
    assert day_of(datetime(2026, 10, 25, 0, 30, tzinfo=UTC).timestamp()) == "2026-10-25 00:30"
    assert _today() == datetime.now(UTC).date()
    assert os.environ["TZ"]


@pytest.mark.usefixtures("zone")
def test_runs_since_the_day_of_an_entry_release_it_and_none_before(trial: NewTrial) -> None:
    begin = datetime(2026, 11, 23, tzinfo=UTC).timestamp()
    for at, clean in ((begin - 1, 0), (begin, 1), (_NOON, 1)):
        (found,) = held([_ENTRY], [trial(0, at=at)], (), _TODAY)
        assert (found.clean, found.released, found.trials) == (clean, bool(clean), 1)


def test_ten_clean_nights_before_a_new_entry_do_not_release_it(trial: NewTrial) -> None:
    nights = [trial(0, f"night-{k}", at=_NOON + (k - 20) * _DAY_S) for k in range(20)]
    nights[0] = trial(0, "night-0", at=_NOON - 20 * _DAY_S, outcome=Outcome.DIFFERENT)
    runs = [
        ScanRun(uid=f"night-{k}", machine="host", started_at=nights[k].at)
        for k in range(len(nights))
    ]
    # the path is still known to be flaky
    explained = trial(99, "night-0", at=nights[0].at, cause="order", outcome=Outcome.DIFFERENT)
    trials = sorted([*nights, explained], key=lambda t: t.at)
    page = morning(runs, trials, [_ENTRY], today=_TODAY)
    assert page.exit_code is ExitCode.OK
    assert not page.quarantine[0].released


@pytest.mark.parametrize(
    ("since", "age"),
    [
        (date(2026, 11, 24), 0),
        (_TODAY, 0),
        (date(2026, 11, 22), 1),
        (date(1, 1, 1), 739_942),
    ],
)
def test_an_entry_of_any_day_that_has_come_somewhere_has_an_age(since: date, age: int) -> None:
    entry = Quarantined(case=_CASE, reason="atomics", owner="ada", since=since)
    check_dates(Path("q.yaml"), [entry], _TODAY)
    (found,) = held([entry], [], (), _TODAY)
    assert found.age_days == age


@pytest.mark.parametrize("since", [date(2026, 11, 25), date(2062, 11, 1), date.max])
def test_an_entry_of_a_day_to_come_is_refused(since: date) -> None:
    entry = Quarantined(case=_CASE, reason="atomics", owner="ada", since=since)
    with pytest.raises(QuarantineError, match=f"q.yaml: '{_CASE}': since must not be a day to co"):
        check_dates(Path("q.yaml"), [entry], _TODAY)
