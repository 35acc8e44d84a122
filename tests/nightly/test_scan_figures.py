"""What is recorded of a scan: its trials, what they say of their paths, and its overhead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from loragate.history import Outcome, Purpose, ScanRun, TrialRecord
from loragate.history.model import glance_at
from loragate.nightly.standing import Standing
from loragate.scan.figures import figures_of, table

RUN = ScanRun(uid="this", machine="here", started_at=100.0, budget_s=1200.0)
BEFORE = ScanRun(uid="before", machine="here", started_at=10.0)


def trial(number: int, **changed: object) -> TrialRecord:
    plain = TrialRecord(
        run="this",
        number=number,
        at=100.0 + number,
        case="torch.a",
        subject="torch",
        site="dense_delta",
        path="one",
        path_key="k",
        grouped="bf16",
        device="cpu",
        draw=0,
        measure="bits",
        purpose=Purpose.PLANNED,
        outcome=Outcome.RIGHT,
        digest="same",
        duration_s=2.0,
    )
    return replace(plain, **changed)  # type: ignore[arg-type]


def of(
    trials: list[TrialRecord],
    *,
    workers: int = 2,
    seconds: float = 220.0,
    diagnosing: Sequence[float] = (),
):
    standing = Standing([], [BEFORE, RUN])
    for each in trials:
        standing.add(glance_at(each))
    return figures_of(
        RUN,
        [each for each in trials if each.run == RUN.uid],
        standing.statuses(),
        cases=5,
        workers=workers,
        seconds=seconds,
        spent={"opening": 8.0, "starting": 4.0, "alone": 20.0},
        diagnosing=diagnosing,
    )


def test_trials_of_the_run_count_by_purpose_and_those_of_other_runs_do_not():
    trials = [trial(0, run="before"), trial(1), trial(2, case="torch.b")]
    # what a diagnosis concludes is a record, and no trial
    trials.append(trial(3, purpose=Purpose.DIAGNOSE))
    trials += [trial(4, measure="judged"), trial(5, measure="judged")]
    found = of(trials, diagnosing=[0.5, 0.5, 0.5])
    assert found["trials"] == {"planned": 4, "diagnose": 3}
    assert found["busy_s"] == pytest.approx(9.5)
    assert found["cases"] == {"selected": 5, "tried": 2, "judged": 1}


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_case_is_judged_by_a_trial_that_has_shown_something(outcome: Outcome):
    said = outcome in (Outcome.RIGHT, Outcome.DIFFERENT, Outcome.WRONG)
    trials = [trial(k, measure="judged", outcome=outcome, digest="") for k in range(3)]
    assert of(trials)["cases"] == {"selected": 5, "tried": 1, "judged": int(said)}
    standing = Standing(["torch.a"], [RUN])
    for each in [*trials, trial(3, outcome=outcome)]:
        standing.add(glance_at(each))
    known = standing.known(changed=None, traced=["torch.a"])["torch.a"]
    assert (known.judged, known.bits, known.judged_s) == (3 * said, int(said), 2.0)


def test_paths_are_counted_by_what_all_trials_say_of_them():
    stable = [trial(number, run="before", at=10.0 + number) for number in range(99)]
    other = trial(200, path="two", case="torch.b")
    untried = trial(99, run="before", at=50.0, path="three", case="torch.c")
    found = of([*stable, untried, trial(100), other])
    assert found["paths"]["stable"] == 1
    assert found["paths"]["undecided"] == 1
    assert sum(found["paths"].values()) == 2


def test_overhead_is_the_time_of_all_workers_beyond_that_of_the_trials():
    found = of([trial(number) for number in range(200)])
    assert found["busy_s"] == pytest.approx(400.0)
    assert found["overhead"] == pytest.approx(0.1)
    assert of([])["overhead"] is None


def test_the_overhead_is_the_sum_of_its_parts_and_of_what_none_of_them_accounts_for():
    found = of([trial(number) for number in range(200)])
    assert found["spent_s"] == {"opening": 8.0, "starting": 4.0, "alone": 20.0, "other": 8.0}
    assert sum(found["spent_s"].values()) == pytest.approx(found["overhead"] * found["busy_s"])


def test_the_table_says_which_overhead_is_too_large_and_which_scan_was_never_recorded():
    met = {**of([trial(number) for number in range(200)]), "commit": "a" * 40}
    missed = {**met, "overhead": 0.24}
    text = table({"2 cores": met, "H200": None, "laptop": missed})
    assert "| 2 cores | 20 min | 1 of 5 | 0 | 200 |" in text
    assert "| 10% | 2.0% | 1.0% | 5.0% | 2.0% | aaaaaaa |" in text
    assert "| 24% (missed) |" in text
    assert "H200" not in text
    assert table({"H200": None}) == "Not recorded yet."


def test_a_record_that_does_not_take_its_overhead_apart_has_a_row_as_well():
    section = {**of([trial(number) for number in range(200)]), "commit": "a" * 40}
    del section["spent_s"]
    assert "| 10% | - | - | - | - | aaaaaaa |" in table({"2 cores": section})
