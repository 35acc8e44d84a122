"""What the trials of a path say together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from loragate.history import Outcome, Purpose, ScanRun, TrialRecord
from loragate.nightly.states import TEST, GroupState, Scope, Status, states

NewRun = Callable[..., ScanRun]
NewTrial = Callable[..., TrialRecord]

_CLEAN = TEST.clean_trials()


def _state(trials: list[TrialRecord], *runs: ScanRun) -> GroupState:
    (state,) = states(trials, runs).values()
    return state


def test_a_path_is_undecided_until_enough_trials_were_right(trial: NewTrial) -> None:
    trials = [trial(k, process=k) for k in range(_CLEAN)]
    before, after = _state(trials[:-1]), _state(trials)
    assert (before.status, before.missing) == (Status.UNDECIDED, 1)
    assert (after.status, after.missing) == (Status.STABLE, 0)
    assert after.trials == _CLEAN
    assert 0 < after.bound.high < 0.07


def test_three_early_differences_are_a_flake_and_one_is_never_stable(trial: NewTrial) -> None:
    trials = [trial(k, process=k) for k in range(5 * _CLEAN)]
    trials[3] = trial(3, digest="bb")
    assert _state(trials[:10]).status is Status.UNDECIDED
    assert _state(trials).status is Status.UNDECIDED
    assert _state(trials).failures == 1
    trials[4:6] = [trial(k, outcome=Outcome.DIFFERENT) for k in (4, 5)]
    assert _state(trials[:10]).status is Status.FLAKY


@pytest.mark.parametrize(
    ("odd", "scope"),
    [
        ({"outcome": Outcome.DIFFERENT}, Scope.PROCESS),
        ({"digest": "bb"}, Scope.PROCESSES),
        ({"digest": "bb", "conditions": {"gpu": "1"}}, Scope.GPUS),
    ],
)
def test_where_bits_differ_is_told(trial: NewTrial, odd: dict[str, Any], scope: Scope) -> None:
    trials = [trial(0), trial(1), trial(2, **odd)]
    state = _state(trials)
    assert state.scopes == {scope}
    assert [t.number for t in state.suspects] == [2]


@pytest.mark.parametrize(
    "other",
    [{"draw": 1}, {"case": "another"}, {"measure": "judged", "digest": ""}, {"run": "night-2"}],
)
def test_only_equal_inputs_in_equal_surroundings_are_compared(
    trial: NewTrial, scan_run: NewRun, other: dict[str, Any]
) -> None:
    runs = (
        scan_run(environment={"torch": "2.12"}),
        scan_run("night-2", environment={"torch": "2.13", "cores": "4"}),
    )
    state = _state([trial(0), trial(1), trial(2, **{"digest": "bb"} | other)], *runs)
    assert state.failures == 0


def test_an_environment_that_cannot_change_bits_does_not_excuse_them(
    trial: NewTrial, scan_run: NewRun
) -> None:
    runs = (
        scan_run(environment={"torch": "2.13", "cores": "2"}),
        scan_run("night-2", environment={"torch": "2.13", "cores": "4"}),
    )
    trials = [trial(0), trial(1), trial(0, "night-2", digest="bb")]
    assert _state(trials, *runs).failures == 1


def test_a_wrong_answer_is_wrong_once_it_came_back_and_never_flaky(trial: NewTrial) -> None:
    wrong = {"outcome": Outcome.WRONG, "measure": "judged", "digest": ""}
    clean = [trial(k, process=9) for k in range(2 * _CLEAN)]
    once = trial(1000, process=1, **wrong)
    again = trial(1001, process=2, purpose=Purpose.CONFIRM, **wrong)
    # two wrong answers in one process may have one reason
    same_process = trial(1001, process=1, **wrong)
    differs = [trial(2000 + k, outcome=Outcome.DIFFERENT) for k in range(3)]
    assert _state([*clean, once]).status is Status.UNDECIDED
    assert _state([*clean, once, same_process]).status is Status.UNDECIDED
    assert _state([*clean, once, *differs]).status is Status.UNDECIDED
    assert _state([*clean, once, again]).status is Status.WRONG
    # processes are counted anew in each night
    other_night = trial(1, "night-2", process=1, **wrong)
    assert _state([*clean, once, other_night]).status is Status.WRONG


def test_what_the_machine_did_is_no_failure_and_no_success(trial: NewTrial) -> None:
    trials = [trial(k, outcome=Outcome.INFRA, digest="") for k in range(3)]
    state = _state([*trials, trial(9, outcome=Outcome.UNKNOWN, digest="")])
    assert (state.trials, state.failures, state.infra) == (0, 0, 3)
    assert state.status is Status.UNDECIDED


def test_trials_of_a_diagnosis_are_not_counted_but_explain(trial: NewTrial) -> None:
    trials = [trial(k) for k in range(5)]
    trials += [trial(10 + k, digest="bb", purpose=Purpose.DIAGNOSE) for k in range(3)]
    trials.append(trial(5, digest="bb"))
    assert (_state(trials).trials, _state(trials).failures) == (6, 1)
    assert _state(trials).status is Status.UNDECIDED
    found = trial(20, purpose=Purpose.DIAGNOSE, cause="unknown", outcome=Outcome.DIFFERENT)
    assert _state([*trials, found]).status is Status.UNDECIDED
    found = trial(20, purpose=Purpose.DIAGNOSE, cause="order", outcome=Outcome.DIFFERENT)
    assert _state([*trials, found]).status is Status.FLAKY
    # a diagnosis is no trial whose bits differ
    assert _state([*trials, found]).scopes == {Scope.PROCESSES}


def test_a_change_of_the_source_begins_anew_for_each_case(trial: NewTrial) -> None:
    old = [trial(k, path_key="old", outcome=Outcome.DIFFERENT) for k in range(3)]
    other = [trial(10 + k, case="other", path_key="other") for k in range(4)]
    new = [trial(20 + k, path_key="new") for k in range(5)]
    state = _state([*old, *other, *new])
    assert (state.trials, state.failures) == (9, 0)
    # back to the old source: what was seen of it then is too long ago
    assert _state([*old, *new, trial(30, path_key="old")]).trials == 1


def test_bits_that_are_not_promised_are_no_flake_and_a_wrong_answer_stays_in_question(
    trial: NewTrial,
) -> None:
    trials = [trial(k, promised=False, outcome=Outcome.DIFFERENT) for k in range(9)]
    assert _state(trials).status is Status.NOT_PROMISED
    wrong = trial(9, promised=False, outcome=Outcome.WRONG, measure="judged", digest="")
    assert _state([*trials, wrong]).status is Status.UNDECIDED


def test_paths_groups_and_devices_are_apart(trial: NewTrial) -> None:
    trials = [trial(0), trial(1, grouped="fp16"), trial(2, device="cuda"), trial(3, path="p")]
    assert len(states(trials, ())) == 4
