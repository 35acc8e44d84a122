"""Known flakes in a file: refused where they are wrong, held until they are clean."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path

import pytest

from loragate.core.files import write_atomically
from loragate.history import Outcome, Purpose, ScanRun, TrialRecord, open_history
from loragate.nightly.quarantine import (
    Quarantined,
    QuarantineError,
    check_cases,
    held,
    read_quarantine,
)

NewTrial = Callable[..., TrialRecord]

_KNOWN = ("some.dense_delta.tokens-2", "some.dense_delta.tokens-3")
_ENTRY = """
- case: some.dense_delta.tokens-2
  reason: atomics of the old expand
  owner: ada
  since: 2026-11-01
"""
# of the day of the entry, in UTC
_BEGIN = datetime(2026, 11, 1, tzinfo=UTC).timestamp()
_HELD = Quarantined(case="a", reason="atomics", owner="ada", since=date(2026, 11, 1), clean_runs=3)


def _read(tmp_path: Path, text: str) -> tuple[Quarantined, ...]:
    path = tmp_path / "quarantine.yaml"
    path.write_text(text, encoding="utf-8")
    entries = read_quarantine(path)
    check_cases(path, entries, _KNOWN)
    return entries


def test_an_entry_has_a_case_a_reason_an_owner_and_a_date(tmp_path: Path) -> None:
    (entry,) = _read(tmp_path, _ENTRY)
    assert entry == Quarantined(
        case=_KNOWN[0], reason="atomics of the old expand", owner="ada", since=date(2026, 11, 1)
    )
    assert _read(tmp_path, "# nothing\n") == ()
    assert read_quarantine(tmp_path / "none.yaml") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_ENTRY.replace("tokens-2", "tokens-22"), "no case .*did you mean .*tokens-2?"),
        (_ENTRY.replace("owner: ada", "ower: ada"), "no field 'ower'.*did you mean owner?"),
        (_ENTRY.replace("  owner: ada\n", ""), "entry 1: lacks owner"),
        (_ENTRY.replace("ada", "''"), "owner must be a text"),
        (_ENTRY.replace("2026-11-01", "last week"), "since must be a date"),
        (_ENTRY + "  clean_runs: 0\n", "clean_runs must be a number from 1 up"),
        (_ENTRY * 2, "two entries"),
        (_ENTRY + "  owner: bob\n", "yaml:6: 'owner' is given twice, first in line 4"),
        (_ENTRY.replace("2026-11-01", "2026-13-01"), "yaml:5: there is no date '2026-13-01'"),
        ("[" * 5000, "yaml: is nested too deeply"),
        ("- case: [", "yaml:1: is not YAML"),
        ("case: x", "must be a list"),
        ("- x", "must have the fields"),
        ("- {case: !!python/object/apply:os.system [ls]}", "could not determine a constructor"),
        ("- [", "quarantine.yaml"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(QuarantineError, match=message):
        _read(tmp_path, text)


def test_a_case_is_released_after_so_many_clean_runs_in_a_row(trial: NewTrial) -> None:
    def night(run: int, *outcomes: Outcome) -> list[TrialRecord]:
        return [
            trial(k, f"night-{run}", case="a", outcome=outcome, at=_BEGIN + run * 86400 + k)
            for k, outcome in enumerate(outcomes)
        ]

    right, bad = Outcome.RIGHT, Outcome.DIFFERENT
    trials = [
        *night(1, right),
        *night(2, right, bad, right),
        *night(3, right, right),
        # says nothing
        *night(4, Outcome.INFRA),
        *night(5, right),
    ]
    today = date(2026, 11, 23)
    (found,) = held([_HELD], trials, (), today)
    assert (found.age_days, found.clean, found.failures, found.trials) == (22, 2, 1, 8)
    assert not found.released
    (found,) = held([_HELD], [*trials, *night(6, right)], (), today)
    assert found.released
    (found,) = held([_HELD], [*trials, *night(6, right, Outcome.WRONG)], (), today)
    assert (found.clean, found.released) == (0, False)


def test_runs_from_before_the_day_of_an_entry_release_nothing(trial: NewTrial) -> None:
    trials = [
        trial(0, f"night-{k}", case="a", outcome=Outcome.RIGHT, at=_BEGIN + k * 86400)
        for k in range(-5, 2)
    ]
    (found,) = held([_HELD], trials, (), date(2026, 11, 3))
    assert (found.clean, found.trials, found.released) == (2, 7, False)


@pytest.mark.parametrize("changing", [False, True])
def test_a_case_with_other_bits_in_one_process_of_each_night_is_not_released(
    changing: bool, trial: NewTrial
) -> None:
    nights = [
        trial(
            20 * night + k,
            f"night-{night}",
            case="a",
            at=_BEGIN + night * 86400 + k,
            digest="bb" if k == 3 else "aa",
            path_key=f"key{night}" if changing else "key",
        )
        for night in range(25)
        for k in range(20)
    ]
    (found,) = held([_HELD], nights, (), date(2026, 11, 26))
    assert (found.clean, found.failures, found.released) == (0, 25, False)


def test_a_case_with_other_bits_in_all_trials_of_some_nights_is_not_released(
    trial: NewTrial,
) -> None:
    nights = [
        trial(k, f"night-{night}", case="a", at=_BEGIN + night, digest="bb" if night == 3 else "aa")
        for night in range(5)
        for k in range(4)
    ]
    (found,) = held([_HELD], nights, (), date(2026, 11, 26))
    # those since the fourth night
    assert (found.clean, found.failures, found.released) == (1, 4, False)


def test_bits_that_another_environment_or_source_explains_do_not_keep_a_case(
    trial: NewTrial, scan_run: Callable[..., ScanRun]
) -> None:
    runs = [scan_run(f"night-{k}", environment={"torch": f"2.{k // 2}"}) for k in range(6)]
    trials = [
        trial(k, f"night-{k}", case="a", at=_BEGIN + k, digest=f"{k}", path_key=f"key{k % 2}")
        for k in range(6)
    ]
    (found,) = held([_HELD], trials, runs, date(2026, 11, 26))
    assert (found.clean, found.failures) == (6, 0)
    # nor do bits that nobody promises
    trials = [replace(t, path_key="key", run="night", number=k) for k, t in enumerate(trials)]
    assert held([_HELD], trials, (), date(2026, 11, 26))[0].failures > 0
    trials = [replace(t, promised=False) for t in trials]
    assert held([_HELD], trials, (), date(2026, 11, 26))[0].failures == 0


def test_trials_of_others_and_of_diagnoses_release_nothing(trial: NewTrial) -> None:
    others = [trial(k, f"night-{k}", case="b") for k in range(9)]
    diagnoses = [trial(k, f"n-{k}", case="a", purpose=Purpose.DIAGNOSE) for k in range(9)]
    (found,) = held([_HELD], [*others, *diagnoses], (), date(2026, 11, 1))
    assert (found.clean, found.trials) == (0, 0)


def _in_processes(count: int, work: Callable[[int], None]) -> None:
    """Run `work` in so many processes at the same time, each with its number."""
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work(number)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * count


def _file_of(count: int) -> str:
    return "".join(_ENTRY.replace("tokens-2", f"tokens-{k}") for k in range(count))


def test_no_reader_sees_half_a_file_that_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.yaml"
    write_atomically(path, _file_of(3))

    def work(number: int) -> None:
        for turn in range(30):
            if number == 0:
                write_atomically(path, _file_of((3, 7)[turn % 2]))
            else:
                cases = [entry.case for entry in read_quarantine(path)]
                assert cases in [[f"some.dense_delta.tokens-{k}" for k in range(n)] for n in (3, 7)]

    _in_processes(4, work)


def test_what_several_processes_have_seen_of_a_case_counts_once(
    tmp_path: Path, scan_run: Callable[..., ScanRun], trial: NewTrial
) -> None:
    path = tmp_path / "history.db"

    def work(number: int) -> None:
        run = f"night-{number}"
        with open_history(path) as history:
            history.add_run(scan_run(run, started_at=_BEGIN + number))
            for k in range(10):
                record = trial(k, run, case="a", at=_BEGIN + number + k / 100)
                # two writers of one trial, as a shard whose report is merged twice
                history.add(record)
                history.add(record)

    _in_processes(4, work)
    with open_history(path) as history:
        for copy in range(2):
            with open_history(tmp_path / f"{copy}.db") as other:
                other.merge(history)
                history.merge(other)
        trials = list(history.trials())
    (found,) = held([_HELD], trials, (), date(2026, 11, 2))
    assert (found.trials, found.clean, found.failures, found.released) == (40, 4, 0, True)
