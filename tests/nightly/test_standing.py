"""What trials say, kept up one by one: the same as from all of them at once, at a constant cost."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loragate.history import Outcome, Purpose, ScanRun, TrialRecord, open_history
from loragate.history.model import JUDGED, glance_at
from loragate.nightly.conditions import Cause
from loragate.nightly.standing import Standing
from loragate.nightly.states import Status, differing_trials, group_key, states
from loragate.nightly.wave import Known, Measure, Place, Wave
from loragate.scan.messages import Measured
from loragate.scan.scan import Scan, Setup
from loragate.scan.surroundings import Shown

NewRun = Callable[..., ScanRun]
NewTrial = Callable[..., TrialRecord]

_CASES = ("a", "b", "never")
_RUNS = ("night-1", "night-2", "night-3")
# night-2 may have other bits
_TORCH = {"night-1": "2.12", "night-2": "2.13", "night-3": "2.12"}

_changes = st.fixed_dictionaries(
    {
        "run": st.sampled_from(_RUNS),
        "case": st.sampled_from(("a", "b", "unplanned")),
        "path": st.sampled_from(("p", "q")),
        "path_key": st.sampled_from(("k1", "k1", "k1", "k2", "")),
        "device": st.sampled_from(("cpu", "cpu", "gpu", "")),
        "draw": st.integers(0, 1),
        "measure": st.sampled_from(tuple(Measure)),
        "purpose": st.sampled_from((Purpose.PLANNED, Purpose.PLANNED, Purpose.DIAGNOSE)),
        "outcome": st.sampled_from((*[Outcome.RIGHT] * 12, *Outcome)),
        "promised": st.sampled_from((True, True, True, False)),
        "digest": st.sampled_from(("aa", "aa", "aa", "bb", "cc", "")),
        "process": st.integers(0, 1),
        "duration_s": st.sampled_from((0.5, 2.0)),
        "cause": st.sampled_from((*[""] * 15, Cause.UNKNOWN, Cause.ORDER)),
        "conditions": st.sampled_from(({}, {"neighbours": "1"}, {"gpu": "1"})),
    }
)
# two machines; many equal trials, so that paths are decided
_MACHINES = {"night-1": "gpu-1", "night-2": "gpu-2", "night-3": "gpu-1"}
_histories = st.lists(st.tuples(_changes, st.sampled_from((1, 1, 2, 60))), max_size=25)


def _runs(scan_run: NewRun) -> list[ScanRun]:
    return [
        scan_run(uid, machine=_MACHINES[uid], environment={"torch": _TORCH[uid]}) for uid in _RUNS
    ]


def _counting(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The trials of a source that some machine has run ever since; those of unknown source until
    their machine shows another one, after trials of another run."""
    # of each case and device what each machine had, after each trial
    had: list[dict[tuple[str, str], dict[str, str]]] = [{}]
    for trial in trials:
        place = trial.case, trial.device
        now = had[-1].get(place, {})
        keyed = {_MACHINES[trial.run]: trial.path_key} if trial.path_key else {}
        had.append(had[-1] | {place: now | keyed})

    def counts(k: int, trial: TrialRecord) -> bool:
        place, machine = (trial.case, trial.device), _MACHINES[trial.run]
        if trial.path_key:
            return all(trial.path_key in now[place].values() for now in had[k + 1 :])
        places = [p for p in had[-1] if p == place or (p[0] == trial.case and not trial.device)]
        others = [
            j
            for j, other in enumerate(trials)
            if j > k and other.run != trial.run and _MACHINES[other.run] == machine
        ]
        is_followed = [
            j
            for j in others
            if (trials[j].case, trials[j].device, trials[j].path_key) == (*place, "")
        ]
        return not any(
            had[j].get(p, {}).get(machine) != had[j + 1].get(p, {}).get(machine)
            and (j in others or any(other < j for other in is_followed))
            for j in range(k, len(trials))
            for p in places
        )

    return [trial for k, trial in enumerate(trials) if counts(k, trial)]


def _known_at_once(trials: Sequence[TrialRecord], undecided: Collection[str]) -> dict[str, Known]:
    """What is known of each case, from all trials."""
    planned = [trial for trial in trials if trial.case in _CASES]
    alone = Counter(f"{t.path} {t.grouped}" for t in planned if "neighbours" not in t.conditions)
    found = {}
    for case in _CASES:
        own = [trial for trial in planned if trial.case == case]
        now = next((t.path_key for t in reversed(own) if t.path_key), "")
        current = [t for t in _counting(own) if t.path_key in ("", now) and t.outcome in JUDGED]
        counts = Counter(trial.measure for trial in current)
        seconds = {trial.measure: trial.duration_s for trial in own}
        path = f"{own[-1].path} {own[-1].grouped}" if own else ""
        found[case] = Known(
            bits=counts[Measure.BITS],
            judged=counts[Measure.JUDGED],
            bits_s=seconds.get(Measure.BITS, 1.0),
            judged_s=seconds.get(Measure.JUDGED, 1.0),
            decided=bool(own) and case not in undecided,
            changed=case == "b",
            traced=case == "a",
            has_bits=case != "never",
            path=path,
            alone=alone[path],
        )
    return found


@settings(max_examples=300)
@given(changes=_histories)
def test_trials_one_by_one_say_what_all_of_them_say_at_once(
    changes: list[tuple[dict[str, Any], int]], trial: NewTrial, scan_run: NewRun
) -> None:
    trials: list[TrialRecord] = []
    for fields, count in changes:
        trials += [trial(len(trials) + k, **fields) for k in range(count)]
    runs = _runs(scan_run)
    standing = Standing(_CASES, runs)
    for first, end in ((0, len(trials) // 2), (len(trials) // 2, len(trials))):
        for each in trials[first:end]:
            standing.add(glance_at(each))
        found = states(trials[:end], runs)
        assert standing.statuses() == {key: state.status for key, state in found.items()}
    # a case was never tried
    assert standing.is_searching
    of_tried = Standing({each.case for each in trials}, runs)
    for each in trials:
        of_tried.add(glance_at(each))
    assert of_tried.is_searching == any(
        state.status is Status.UNDECIDED and not state.suspects for state in found.values()
    )
    counting = _counting(trials)
    assert found.keys() == {group_key(trial) for trial in counting}
    undecided = {t.case for t in counting if found[group_key(t)].status is Status.UNDECIDED}
    known = standing.known(changed=["b"], traced=["a"], only_judged=["never"])
    assert known == _known_at_once(trials, undecided)


@settings(max_examples=300)
@given(
    digests=st.lists(st.sampled_from("abc"), max_size=12),
    planned=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_the_digest_of_most_trials_is_the_usual_one_and_of_equally_many_the_older(
    digests: list[str], planned: list[bool], trial: NewTrial
) -> None:
    standing = Standing(["a"], ())
    trials = [trial(digest="")]
    for number, digest in enumerate(digests):
        purpose = Purpose.PLANNED if planned[number] else Purpose.DIAGNOSE
        trials.append(trial(1 + number, digest=digest, purpose=purpose))
    for each in trials:
        standing.add(glance_at(each))
    (state,) = states(trials, ()).values()
    assert standing.statuses() == {state.key: state.status}
    (group,) = standing._groups.values()
    assert sum(tally.failures for tally in group.tallies.values()) == state.failures


@settings(max_examples=200)
@given(changes=st.lists(_changes, min_size=1, max_size=25))
def test_inputs_with_several_results_are_told_by_each_of_their_trials(
    changes: list[dict[str, Any]], trial: NewTrial, scan_run: NewRun
) -> None:
    # one source of one path
    same = {"path": "p", "path_key": "k1", "device": "cpu"}
    trials = [trial(k, **fields | same) for k, fields in enumerate(changes)]
    runs = _runs(scan_run)
    standing = Standing(_CASES, runs)
    for each in trials:
        standing.add(glance_at(each))
    environments = {"night-1": "x", "night-2": "y", "night-3": "x"}
    differing = differing_trials(trials, environments)
    inputs = {(t.case, t.draw) for t in trials if (t.run, t.number) in differing}
    for each in trials:
        assert standing.has_other_bits(glance_at(each)) == ((each.case, each.draw) in inputs)


def test_a_cause_explains_the_same_source_and_measure_alone(trial: NewTrial) -> None:
    standing = Standing(["a"], ())
    standing.add(glance_at(trial(0, cause=Cause.UNKNOWN)))
    assert not standing.is_explained(glance_at(trial(1)))
    standing.add(glance_at(trial(2, cause=Cause.ORDER)))
    assert standing.is_explained(glance_at(trial(3)))
    assert not standing.is_explained(glance_at(trial(3, path_key="key2")))
    assert not standing.is_explained(glance_at(trial(3, measure="judged")))


def test_a_case_whose_source_has_changed_counts_as_one_with_few_trials(trial: NewTrial) -> None:
    standing = Standing(["a"], ())
    for number in range(50):
        standing.add(glance_at(trial(number, case="a", duration_s=2.0)))
    # the key is not known in a process that died
    standing.add(glance_at(trial(50, case="a", path_key="")))
    assert standing.known(changed=None, traced=[])["a"].bits == 51
    standing.add(glance_at(trial(51, "night-2", case="a", path_key="key2", duration_s=3.0)))
    known = standing.known(changed=None, traced=[])["a"]
    assert (known.bits, known.bits_s) == (1, 3.0)


class _Lab:
    """Each wave shows the trials of its first process, all of them right."""

    def __init__(self, trial: NewTrial) -> None:
        self._trial, self._count = trial, 0
        # of no case the path is known
        self.trials = SimpleNamespace(paths={})

    def keep_busy(self, wave: Wave, *, until: float, meanwhile: object) -> list[Shown]:
        return [self._shown(wanted) for wanted in wave.processes[0][1]]

    def _shown(self, wanted: Any) -> Shown:
        self._count += 1
        names = {"case": wanted.case, "draw": wanted.draw, "measure": wanted.measure}
        record = self._trial(self._count, "night-2", digest=f"{wanted.draw}", **names)
        measured: Measured = SimpleNamespace()  # type: ignore[assignment]
        return Shown(wanted, (wanted,), measured, record)


def _lines_of(work: Callable[[], None]) -> int:
    """How many lines of Python `work` goes through."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.fixture
def steps(tmp_path: Path, scan_run: NewRun, trial: NewTrial) -> Callable[[int], int]:
    """The lines of four steps after a night with so many trials."""
    runs = [scan_run(), scan_run("night-2", started_at=1e6)]
    cases = [f"case-{k}" for k in range(8)]

    def lines(count: int) -> int:
        with open_history(tmp_path / f"{count}.db") as history:
            old = (
                trial(
                    k,
                    at=1e6 - count + k,
                    case=cases[k % 8],
                    draw=k // 8 % 50,
                    digest=f"{k // 8 % 50}",
                )
                for k in range(count)
            )
            history.take(runs, (), old)
            setup = Setup(run=runs[1], cases=tuple(cases), place=Place(), budget_s=1e6, seed=1)
            lab: Any = _Lab(trial)
            scan = Scan(setup, lab, history, lambda text: None)
            assert (
                sum(known.bits for known in scan.standing.known(changed=None, traced=()).values())
                == count
            )
            return _lines_of(lambda: [scan.step() for _ in range(4)] and None)

    return lines


def test_a_step_after_many_nights_does_no_more_work_than_after_one(
    steps: Callable[[int], int],
) -> None:
    few, many = steps(400), steps(40_000)
    assert many < 1.2 * few
