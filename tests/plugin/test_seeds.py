"""A gate over several seeds: one session, in which one seed is wrong and another kills a worker."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from loragate.core.verdict import ExitCode, Failure, Verdict
from loragate.events.model import LegStarted

CASES, SEEDS = 4, 8
WRONG_CASE, WRONG_SEED = "tokens-23", 7
CRASHING_CASE, CRASHING_SEED = "tokens-24", 2
HARMED = {(WRONG_CASE, WRONG_SEED), (CRASHING_CASE, CRASHING_SEED)}


@pytest.fixture(scope="module")
def scan(run_once, run_gate):
    def make(report):
        return run_gate(
            report,
            *("--subject=bad_day_subject:BadSeed", f"--seeds={SEEDS}"),
            f"--record={report / 'results.json'}",
            matrix="four_good.yaml",
            PYTEST_XDIST_AUTO_NUM_WORKERS="2",
        )

    return run_once("seeds", make)


@pytest.fixture(scope="module")
def record(scan) -> dict[str, Any]:
    section = json.loads((scan.report / "results.json").read_text())["sections"]["gate_seeds"]
    assert isinstance(section, dict)
    return section


def test_one_session_runs_every_case_with_every_seed(scan):
    legs = [event.name for event in scan.log.events if isinstance(event, LegStarted)]
    assert legs == ["interpreter"]
    ends = [(event.run_id, event.attempt) for event in scan.finished]
    assert len(ends) == len(set(ends)) == CASES * SEEDS


def test_one_wrong_seed_makes_the_run_wrong(scan):
    assert scan.exit_code == ExitCode.WRONG
    assert "2 cases wrong, in attempts 2, 7" in scan.output


def test_a_wrong_seed_is_named_when_it_fails_and_at_the_end_with_its_replay(scan):
    wrong = next(e for e in scan.finished if (e.run_id[-9:], e.attempt) == (WRONG_CASE, WRONG_SEED))
    assert f"FAIL  {wrong.run_id}  attempt 7\n" in scan.output
    told = re.search(r"^attempt 7 +FAIL +4 of 4 executed, 3 passed\n(.*)$", scan.output, re.M)
    assert told is not None, scan.output
    assert told[1].endswith(f"  loragate replay {wrong.run_id} --attempt 7")
    assert "6 of 8 attempts passed" in scan.output


def test_a_worker_that_dies_with_one_seed_costs_only_that_case(scan):
    bad = {(e.run_id[-9:], e.attempt): e for e in scan.finished if e.verdict is not Verdict.PASS}
    assert bad.keys() == HARMED
    assert bad[CRASHING_CASE, CRASHING_SEED].failure is Failure.CRASH


def test_workers_live_through_the_seeds(scan):
    # two from the start, one in place of the one that died
    assert {event.worker for event in scan.finished} <= {"gw0", "gw1", "gw2"}


def test_each_seed_is_recorded_with_its_verdict_and_what_it_owed_and_gave(record):
    assert record["verdict"] == "fail"
    assert [seed["attempt"] for seed in record["seeds"]] == list(range(SEEDS))
    for seed in record["seeds"]:
        (figures,) = seed["counts"].values()
        assert figures["expected"] == figures["executed"] == CASES
        harmed = seed["attempt"] in (WRONG_SEED, CRASHING_SEED)
        assert seed["verdict"] == ("fail" if harmed else "pass")
        assert figures["passed"] == CASES - harmed


def test_a_recorded_failure_tells_how_to_run_it_again(record):
    replays = {seed["attempt"]: seed["replays"] for seed in record["seeds"] if seed["replays"]}
    assert replays.keys() == {WRONG_SEED, CRASHING_SEED}
    (replay,) = replays[WRONG_SEED]
    assert replay.endswith(f"{WRONG_CASE} --attempt 7")
