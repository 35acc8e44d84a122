"""The end of a session or a run, judged from its events."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loragate.core.clipped import RECORD_LIMIT
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.events.case_end import end_of
from loragate.events.log import EventLog
from loragate.events.model import (
    CaseFinished,
    CaseStarted,
    Expected,
    LegStarted,
    RunStarted,
    Sharding,
    Skipped,
)
from loragate.matrix.case import Case, Dtype, Site, Tier
from loragate.matrix.case_run import CaseRun
from loragate.plugin.ordinary_tests import failures_in_run
from loragate.report.outcomes import case_outcomes
from loragate.run.closing import abandoned_cases, verdict_on

CASE = Case(
    site=Site.DENSE_DELTA,
    tokens=5,
    in_features=16,
    slices=(16,),
    rank=8,
    slots=2,
    dtype=Dtype.FP32,
)
RUN = CaseRun("a", CASE)
AGAIN = CaseRun("a", CASE, draw=1)
REPEATED = CaseRun("a", CASE, repeat=1)
OTHER = CaseRun("b", CASE)


def plan(*skipped: CaseRun) -> RunStarted:
    return RunStarted(
        run="r",
        started_at="",
        tier=Tier.SMOKE,
        subjects=("a", "b"),
        legs=(),
        expected=(
            Expected(leg="x", subject="a", site="dense_delta", count=1, run_ids=(RUN.run_id,)),
        ),
        skipped=tuple(
            Skipped(run_id=run.run_id, subject=run.subject, site="dense_delta", reason="no")
            for run in skipped
        ),
    )


def end(run: CaseRun, verdict: Verdict = Verdict.PASS) -> CaseFinished:
    failed = verdict in (Verdict.FAIL, Verdict.INFRA)
    failure = Failure.OUT_OF_MEMORY if failed else None
    return CaseFinished(
        run_id=run.run_id,
        subject=run.subject,
        site="dense_delta",
        draw=run.draw,
        repeat=run.repeat,
        seed=run.seed,
        worker="gw0",
        verdict=verdict,
        judgements=(Judgement(OracleName.EXACT, verdict, failure),),
        duration_s=1.0,
        replay=run.replay,
    )


@pytest.mark.parametrize("verdict", [v for v in Verdict if v is not Verdict.SKIP])
def test_a_session_is_as_good_as_its_worst_case(verdict):
    log = EventLog((plan(), end(RUN), end(OTHER, verdict)))
    assert verdict_on([RUN, OTHER], log) is verdict


def test_a_case_that_never_ended_leaves_a_session_inconclusive():
    assert verdict_on([RUN, OTHER], EventLog((plan(), end(RUN)))) is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("missing", [AGAIN, REPEATED], ids=["draw", "repeat"])
def test_a_single_missing_draw_or_repeat_leaves_a_session_inconclusive(missing):
    assert verdict_on([RUN, missing], EventLog((plan(), end(RUN)))) is Verdict.INCONCLUSIVE
    log = EventLog((plan(), end(RUN), end(missing)))
    assert verdict_on([RUN, missing], log) is Verdict.PASS


def test_a_case_that_was_skipped_at_run_time_leaves_a_session_inconclusive():
    log = EventLog((plan(), end(RUN), end(OTHER, Verdict.SKIP)))
    assert verdict_on([RUN, OTHER], log) is Verdict.INCONCLUSIVE


def test_a_case_that_the_plan_left_out_does_not_count():
    assert verdict_on([RUN, OTHER], EventLog((plan(OTHER), end(RUN)))) is Verdict.PASS


def test_a_session_whose_every_case_the_plan_left_out_has_judged_nothing():
    left_out = plan(RUN, OTHER)
    assert verdict_on([RUN, OTHER], EventLog((left_out,))) is Verdict.INCONCLUSIVE
    # the cases of a run may be in other shards, and a merge judges all of them
    part = replace(left_out, shard=Sharding(index=1, count=2, others=()))
    assert verdict_on([RUN, OTHER], EventLog((part,))) is Verdict.PASS


@pytest.mark.usefixtures("plain_command")
def test_a_case_that_was_stopped_with_its_leg_is_inconclusive_not_crashed():
    first = CaseStarted(run_id=RUN.run_id, worker="gw0", draw=0, seed=1)
    second = CaseStarted(run_id=RUN.run_id, worker="gw1", draw=1, repeat=2, seed=2)
    log = EventLog((plan(), first, end(RUN), second))
    (last,) = abandoned_cases(log, leg="x", why="interrupted")
    assert (last.run_id, last.trial, last.subject) == (RUN.run_id, (1, 2), "a")
    assert last.replay == f"loragate replay {RUN.run_id} --draw 1 --repeats 3"
    assert (last.verdict, last.message) == (Verdict.INCONCLUSIVE, "interrupted")
    # a leg beside that of the cases may be stopped while they go on
    assert not list(abandoned_cases(log, leg="y", why="interrupted"))


def test_each_draw_of_a_case_that_was_stopped_has_an_end_whichever_began_last() -> None:
    starts = [
        CaseStarted(run_id=RUN.run_id, worker=f"gw{draw}", draw=draw, seed=draw)
        for draw in range(3)
    ]
    log = EventLog((plan(), *starts, end(AGAIN)))
    ends = list(abandoned_cases(log, leg="x", why="interrupted"))
    assert [(ended.trial, ended.worker) for ended in ends] == [((0, 0), "gw0"), ((2, 0), "gw2")]


def test_a_case_that_was_stopped_keeps_the_replay_command_of_its_worker():
    replay = f"../ci/loragate replay {RUN.run_id} --draw 0 --matrix /mine.yaml"
    start = CaseStarted(run_id=RUN.run_id, worker="gw0", draw=0, seed=1, replay=replay)
    log = EventLog((plan(), start))
    (open_case,) = case_outcomes(log.events)
    assert open_case.replay == replay
    (last,) = abandoned_cases(log, leg="x", why="interrupted")
    assert last.replay == replay


def test_what_fails_in_the_session_of_the_cases_belongs_to_their_leg_whichever_began_last() -> None:
    plan = RunStarted(
        run="r", started_at="", tier=Tier.SMOKE, subjects=(), legs=("gpu", "host"), expected=()
    )
    report = pytest.CollectReport("cases/test_cases.py", "failed", "SyntaxError", [])
    events = (plan, LegStarted(name="gpu"), LegStarted(name="host"))
    (failure,) = failures_in_run([report], events, Path())
    assert failure.leg == "gpu"


def test_an_event_says_which_trial_has_ended_and_how_it_is_run_again() -> None:
    run = CaseRun("a", CASE, draw=3, repeat=2)
    ended = end_of(run, Verdict.PASS, worker="gw1", gpu="0", duration_s=1.0)
    assert (ended.run_id, ended.subject, ended.site) == (run.run_id, "a", "dense_delta")
    assert (ended.trial, ended.seed, ended.replay) == ((3, 2), run.seed, run.replay)
    assert (ended.worker, ended.gpu) == ("gw1", "0")


def test_of_a_message_of_megabytes_an_event_has_the_beginning_and_the_end() -> None:
    text = f"begins {'x' * 10_000_000} ends"
    judged = Judgement(OracleName.EXACT, Verdict.FAIL, Failure.EXCEPTION, text)
    ended = end_of(
        RUN,
        Verdict.FAIL,
        worker="main",
        gpu="",
        duration_s=1.0,
        judgements=[judged],
        failure=Failure.CRASH,
        message=text,
    )
    for message in (ended.message, ended.judgements[0].message):
        assert message.startswith("begins ")
        assert message.endswith(" ends")
        assert len(message) < RECORD_LIMIT + 100


def test_a_long_line_of_a_host_test_takes_little_room_in_an_event() -> None:
    failed = pytest.TestReport(
        "test_x.py::test_x",
        ("test_x.py", 1, "test_x"),
        {},
        "failed",
        "E   " + "x" * 10_000_000,
        "call",
    )
    (ended,) = failures_in_run([failed], [], Path())
    assert len(ended.message) < RECORD_LIMIT + 100
