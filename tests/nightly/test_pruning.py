"""A history from which old trials were removed: smaller, and no page says anything worse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

import pytest

from loragate.history import Outcome, ScanRun, TrialRecord, open_history
from loragate.nightly.morning import Morning, morning
from loragate.nightly.states import GroupKey, Status
from loragate.nightly.wave import Measure

NewRun = Callable[..., ScanRun]
NewTrial = Callable[..., TrialRecord]

_DAY_S = 86400.0
_NIGHTS = 25
_CASES = ("a", "b", "c")


def _runs(scan_run: NewRun) -> list[ScanRun]:
    return [
        scan_run(f"night-{k}", started_at=k * _DAY_S, machine=f"gpu-{k % 2}")
        for k in range(_NIGHTS)
    ]


def _page(trials: Sequence[TrialRecord], runs: Sequence[ScanRun]) -> Morning:
    return morning(runs, trials, cases={trial.case for trial in trials}, today=date(1970, 2, 1))


def _bad(page: Morning) -> dict[GroupKey, tuple[Status, int, int]]:
    """What is wrong, flaky or not explained."""
    return {
        finding.state.key: (finding.state.status, finding.state.failures, finding.state.trials)
        for finding in page.findings
        if finding.state.status is not Status.WRONG
    } | {
        # right trials say nothing about a wrong path
        finding.state.key: (Status.WRONG, 0, 0)
        for finding in page.findings
        if finding.state.status is Status.WRONG
    }


def _pruned(
    path: Path, trials: Sequence[TrialRecord], runs: Sequence[ScanRun], night: float
) -> list[TrialRecord]:
    with open_history(path) as history:
        history.take(runs, (), trials)
        history.prune(before=night * _DAY_S)
        return list(history.trials())


@pytest.mark.parametrize(
    "odd", [{"outcome": Outcome.DIFFERENT}, {"digest": "bb", "draw": 0}, {"draw": 0, "digest": "c"}]
)
def test_a_rare_difference_is_not_made_a_flake_by_removing_what_was_right(
    odd: dict[str, Any], tmp_path: Path, scan_run: NewRun, trial: NewTrial
) -> None:
    trials = [
        trial(
            k, f"night-{night}", **{"at": night * _DAY_S + k, "draw": k, "digest": f"{k}"} | given
        )
        for night in range(_NIGHTS)
        for k in range(60)
        for given in (odd if k == 3 and night in (2, 5) else {},)
    ]
    runs = _runs(scan_run)
    before = _page(trials, runs)
    after = _page(_pruned(tmp_path / "h.db", trials, runs, _NIGHTS - 0.5), runs)
    ((status, failures, count),) = _bad(before).values()
    assert (status, failures, count) == (Status.UNDECIDED, 2, 1500)
    assert (_bad(after), after.exit_code) == (_bad(before), before.exit_code)


def test_what_a_fix_has_ended_stays_ended_without_the_trials_that_were_right(
    tmp_path: Path, scan_run: NewRun, trial: NewTrial
) -> None:
    wrong = [trial(k, "night-0", at=k, process=k, outcome=Outcome.WRONG) for k in (1, 2)]
    clean = [
        trial(k, f"night-{night}", at=night * _DAY_S + k, path="fixed", path_key="key2", **given)
        for night in (2, 4)
        for k, given in enumerate([{}, {}, {}, {"measure": Measure.JUDGED, "digest": ""}] * 5)
    ]
    runs = _runs(scan_run)[:5:2]
    kept = _pruned(tmp_path / "h.db", [*wrong, *clean], runs, 10.0)
    assert _page(kept, runs).exit_code is _page([*wrong, *clean], runs).exit_code == 0
    # the first one, and the last ones of bits and of oracles
    assert len(kept) == 2 + 1 + 2


def _random_trials(random: Random, trial: NewTrial) -> list[TrialRecord]:
    found = []
    for night in range(_NIGHTS):
        keys = {case: random.choice(("key1", "key2", "key2", "")) for case in _CASES}
        for k in range(random.randrange(1, 12)):
            case, draw = random.choice(_CASES), random.randrange(3)
            outcome = random.choice([Outcome.RIGHT] * 60 + list(Outcome))
            given = {"case": case, "path": f"{case} {keys[case]}", "path_key": keys[case]}
            digest = random.choice([f"{draw} {keys[case]}"] * 50 + ["odd"])
            given |= {"digest": digest} if outcome is Outcome.RIGHT else {"digest": ""}
            measure = random.choice(tuple(Measure))
            at = night * _DAY_S + k
            given |= {"draw": draw, "measure": measure, "outcome": outcome, "at": at}
            found.append(trial(k, f"night-{night}", process=k, **given))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_neither_findings_nor_the_exit_code_depend_on_what_was_removed(
    seed: int, tmp_path: Path, scan_run: NewRun, trial: NewTrial
) -> None:
    random, runs = Random(seed), _runs(scan_run)
    trials = _random_trials(random, trial)
    kept = _pruned(tmp_path / "h.db", trials, runs, random.uniform(1, _NIGHTS + 1))
    before, after = _page(trials, runs), _page(kept, runs)
    assert (_bad(after), after.exit_code) == (_bad(before), before.exit_code)


def test_old_trials_of_paths_that_were_always_right_are_removed(
    tmp_path: Path, scan_run: NewRun, trial: NewTrial
) -> None:
    trials = [
        trial(k, f"night-{night}", at=night * _DAY_S + k, case=case, draw=k, path=case)
        for night in range(_NIGHTS)
        for k, case in enumerate(_CASES * 20)
    ]
    kept = _pruned(tmp_path / "h.db", trials, _runs(scan_run), _NIGHTS + 1.0)
    # the first and the last one of each machine
    assert len(kept) == 2 * 2 * len(_CASES)
