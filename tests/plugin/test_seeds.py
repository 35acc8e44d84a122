"""A gate over several draws: one session, in which one draw fails and another kills a worker."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from loragate.core.verdict import ExitCode, Failure, Verdict
from loragate.events.model import LegStarted

CASES, SEEDS = 4, 8
SECTION = "gate_seeds_misbehaving_subject:BadDraw"
WRONG_CASE, WRONG_SEED = "tokens-23", 7
CRASHING_CASE, CRASHING_SEED = "tokens-24", 2
HARMED = {(WRONG_CASE, WRONG_SEED), (CRASHING_CASE, CRASHING_SEED)}


@pytest.fixture(scope="module")
def scan(run_once, run_gate):
    def make(report):
        return run_gate(
            report,
            *("--subject=misbehaving_subject:BadDraw", f"--seeds={SEEDS}"),
            f"--record={report / 'results.json'}",
            matrix="four_good.yaml",
            PYTEST_XDIST_AUTO_NUM_WORKERS="2",
        )

    return run_once("seeds", make)


@pytest.fixture(scope="module")
def record(scan) -> dict[str, Any]:
    section = json.loads((scan.report / "results.json").read_text())["sections"][SECTION]
    assert isinstance(section, dict)
    return section


def test_one_session_runs_every_case_with_every_seed(scan):
    legs = [event.name for event in scan.log.events if isinstance(event, LegStarted)]
    assert legs == ["interpreter"]
    ends = [(event.run_id, event.draw) for event in scan.finished]
    assert len(ends) == len(set(ends)) == CASES * SEEDS


def test_one_wrong_seed_makes_the_run_wrong(scan):
    assert scan.exit_code == ExitCode.WRONG
    assert "2 cases wrong, in draws 2, 7" in scan.output


def test_a_wrong_draw_is_named_when_it_fails_and_at_the_end_with_its_replay(scan):
    wrong = next(e for e in scan.finished if (e.run_id[-9:], e.draw) == (WRONG_CASE, WRONG_SEED))
    assert f"FAIL  {wrong.run_id}  draw 7\n" in scan.output
    line = re.search(r"^draw 7 +FAIL +4 of 4 executed, 3 passed\n(.*)$", scan.output, re.M)
    assert line is not None, scan.output
    assert line[1].endswith(f"  {wrong.replay}")
    assert f" loragate replay {wrong.run_id} --draw 7 --matrix " in wrong.replay
    assert "6 of 8 draws passed" in scan.output


def test_a_worker_that_dies_with_one_seed_costs_only_that_case(scan):
    bad = {(e.run_id[-9:], e.draw): e for e in scan.finished if e.verdict is not Verdict.PASS}
    assert bad.keys() == HARMED
    assert bad[CRASHING_CASE, CRASHING_SEED].failure is Failure.CRASH


def test_workers_outlive_a_draw(scan):
    # two from the start, one in place of the one that died
    assert {event.worker for event in scan.finished} <= {"gw0", "gw1", "gw2"}


def test_each_draw_is_recorded_with_its_verdict_and_counts(record):
    assert record["verdict"] == "fail"
    assert [seed["draw"] for seed in record["seeds"]] == list(range(SEEDS))
    for seed in record["seeds"]:
        (figures,) = seed["counts"].values()
        assert figures["expected"] == figures["executed"] == CASES
        harmed = seed["draw"] in (WRONG_SEED, CRASHING_SEED)
        assert seed["verdict"] == ("fail" if harmed else "pass")
        assert figures["passed"] == CASES - harmed


def test_a_recorded_failure_comes_with_its_replay(record):
    replays = {seed["draw"]: seed["replays"] for seed in record["seeds"] if seed["replays"]}
    assert replays.keys() == {WRONG_SEED, CRASHING_SEED}
    (replay,) = replays[WRONG_SEED]
    assert f"{WRONG_CASE} --draw 7 " in replay
