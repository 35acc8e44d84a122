"""Which trials count: those of what a machine runs now, whatever other machines run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date
from typing import Any

import pytest

from loragate.core.verdict import ExitCode
from loragate.history import Outcome, ScanRun, TrialRecord
from loragate.history.model import glance_at
from loragate.nightly.morning import morning
from loragate.nightly.standing import Standing
from loragate.nightly.states import Status, states
from loragate.nightly.wave import Measure

NewRun = Callable[..., ScanRun]
NewTrial = Callable[..., TrialRecord]

_DAY_S = 86400.0
_CASE = "some.dense_delta.dtype-bf16"
_WRONG = {"outcome": Outcome.WRONG, "digest": "", "measure": "judged"}


def _statuses(trials: Sequence[TrialRecord], runs: Sequence[ScanRun]) -> dict[str, Status]:
    """Of each path, by all trials at once and one by one."""
    standing = Standing([_CASE], runs)
    for each in trials:
        standing.add(glance_at(each))
    found = {key: state.status for key, state in states(trials, runs).items()}
    assert standing.statuses() == found
    return {key.path: status for key, status in found.items()}


def _exit_code(trials: Sequence[TrialRecord], runs: Sequence[ScanRun]) -> ExitCode:
    return morning(runs, trials, cases=[_CASE], today=date(1970, 3, 1)).exit_code


def _night(trial: NewTrial, number: int, **changes: Any) -> list[TrialRecord]:
    """Clean trials of one scan."""
    given: dict[str, Any] = {"path": "new", "path_key": "new"} | changes
    return [
        trial(
            k,
            f"night-{number}",
            **{"at": number * _DAY_S + k, "process": k, "measure": measure} | given,
        )
        for k, measure in enumerate(("bits",) * 10 + ("judged",))
    ]


def _runs(scan_run: NewRun, count: int, *, machines: int = 1) -> list[ScanRun]:
    return [
        scan_run(f"night-{k}", started_at=k * _DAY_S, machine=f"gpu-{k % machines}")
        for k in range(count)
    ]


def _at_the_same_time(
    trial: NewTrial, scan_run: NewRun, keys: Sequence[str], **of_last: Any
) -> tuple[list[TrialRecord], list[ScanRun]]:
    """Trials of one case by machines that take turns; each tenth of the last one is `of_last`."""
    runs = [scan_run(f"night-{k}", machine=f"gpu-{k}") for k in range(len(keys))]
    trials = []
    for turn in range(300):
        for k, key in enumerate(keys):
            odd = of_last if k == len(keys) - 1 and turn % 10 == 0 else {}
            given = {"draw": turn % 7, "digest": f"{turn % 7}", "process": turn} | odd
            trials.append(trial(turn, f"night-{k}", at=1000.0 + turn, path_key=key, **given))
            if turn % 10 == 1:
                given = {"measure": "judged", "digest": "", "process": 1000 + turn}
                at = 1000.5 + turn
                trials.append(trial(1000 + turn, f"night-{k}", at=at, path_key=key, **given))
    return trials, runs


@pytest.mark.parametrize("is_last", [False, True])
def test_a_wrong_answer_of_one_machine_counts_beside_another_one_with_other_source(
    is_last: bool, trial: NewTrial, scan_run: NewRun
) -> None:
    keys = ("key1", "key2")
    trials, runs = _at_the_same_time(trial, scan_run, keys, outcome=Outcome.WRONG, digest="")
    if not is_last:
        trials = [*trials, trial(9000, "night-0", at=9000.0, path_key="key1", digest="0")]
    (state,) = states(trials, runs).values()
    assert state.trials == 600 - 30 + 60 + (not is_last)
    assert _statuses(trials, runs) == {"dense_delta eager": Status.WRONG}
    assert _exit_code(trials, runs) is ExitCode.WRONG


def test_bits_of_different_sources_are_not_compared(trial: NewTrial, scan_run: NewRun) -> None:
    trials, runs = _at_the_same_time(trial, scan_run, ("key1", "key2"))
    other = [
        trial(5000 + k, "night-1", at=5000.0 + k, path_key="key2", draw=8, digest="b")
        for k in range(9)
    ]
    same = [
        trial(6000 + k, "night-0", at=6000.0 + k, path_key="key1", draw=8, digest="a")
        for k in range(9)
    ]
    assert _statuses([*trials, *other, *same], runs) == {"dense_delta eager": Status.STABLE}


def test_bits_of_the_same_source_are_compared_whichever_machine_ran_it(
    trial: NewTrial, scan_run: NewRun
) -> None:
    trials, runs = _at_the_same_time(trial, scan_run, ("key1", "key1"), digest="b", draw=1)
    (state,) = states(trials, runs).values()
    assert state.failures == 30
    assert _statuses(trials, runs) == {"dense_delta eager": Status.FLAKY}


def test_a_source_counts_until_the_last_machine_has_another_one(
    trial: NewTrial, scan_run: NewRun
) -> None:
    runs = _runs(scan_run, 3, machines=2)
    wrong = [trial(50 + k, "night-0", process=k, path_key="old", at=k, **_WRONG) for k in (1, 2)]
    both = [*wrong, *_night(trial, 1, path="dense_delta eager", path_key="old")]
    moved = [*both, *_night(trial, 2)]
    assert _statuses(moved, runs)["dense_delta eager"] is Status.WRONG
    later = [trial(99, "night-1", at=9 * _DAY_S, path_key="new", path="new")]
    assert _statuses([*moved, *later], runs) == {"new": Status.UNDECIDED}


@pytest.mark.parametrize(
    "seen",
    [
        {"path": "old", "path_key": "old"},
        # the process died before it was known which source it runs, and on which device
        {"path": "untraced", "path_key": ""},
        {"path": "untraced", "path_key": "", "device": ""},
    ],
)
def test_a_fix_ends_what_was_wrong_although_the_path_has_another_name_now(
    seen: dict[str, Any], trial: NewTrial, scan_run: NewRun
) -> None:
    runs = _runs(scan_run, 25)
    wrong = [trial(k, "night-0", at=k, process=k, **_WRONG | seen) for k in (1, 2)]
    clean = [each for k in range(1, 25) for each in _night(trial, k)]
    assert _statuses(wrong, runs) == {seen["path"]: Status.WRONG}
    assert _exit_code(wrong, runs) is ExitCode.WRONG
    assert _statuses([*wrong, *clean], runs) == {"new": Status.STABLE}
    assert _exit_code([*wrong, *clean], runs) is ExitCode.OK


def test_a_crash_before_the_source_was_known_counts_with_that_of_its_run_and_of_later_ones(
    trial: NewTrial, scan_run: NewRun
) -> None:
    runs = _runs(scan_run, 3)
    crash = {"path": "untraced", "path_key": "", **_WRONG}
    first = [trial(k, "night-0", at=k, process=k, **crash) for k in (50, 51)]
    traced = _night(trial, 0, at=60.0)
    assert _statuses([*first, *traced], runs)["untraced"] is Status.WRONG
    assert _statuses([*first, *traced, *_night(trial, 1)], runs)["untraced"] is Status.WRONG
    fixed = [*first, *traced, *_night(trial, 1, path_key="fixed")]
    assert _statuses(fixed, runs) == {"new": Status.UNDECIDED}


@pytest.mark.parametrize(("nights", "status"), [(7, Status.WRONG), (9, None)])
def test_what_a_machine_ran_that_is_gone_counts_no_more_than_other_old_source(
    nights: int, status: Status | None, trial: NewTrial, scan_run: NewRun
) -> None:
    # as containers whose host names are new each time
    runs = _runs(scan_run, 1 + nights, machines=1 + nights)
    wrong = [trial(k, "night-0", at=k, process=k, path_key="old", **_WRONG) for k in (1, 2)]
    clean = [each for k in range(1, 1 + nights) for each in _night(trial, k)]
    assert _statuses([*wrong, *clean], runs).get("dense_delta eager") is status
    # with the same source it is as wrong as before
    same = [each for k in range(1, 1 + nights) for each in _night(trial, k, path_key="old")]
    assert _statuses([*wrong, *same], runs)["dense_delta eager"] is Status.WRONG


def test_a_plan_counts_the_trials_of_the_source_that_ran_last(
    trial: NewTrial, scan_run: NewRun
) -> None:
    trials, runs = _at_the_same_time(trial, scan_run, ("key1", "key2", "key1"))
    standing = Standing([_CASE], runs)
    for each in trials:
        standing.add(glance_at(each))
    known = standing.known(changed=None, traced=())[_CASE]
    assert (known.bits, known.judged) == (600, 60)
    standing.add(glance_at(trial(0, "night-1", path_key="key2", measure=Measure.BITS)))
    assert standing.known(changed=None, traced=())[_CASE].bits == 301
