"""A run of several draws and repeats is complete and passes only if each of them does."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from loragate.core.verdict import ExitCode, Failure, Judgement, OracleName, Verdict
from loragate.events.log import EventLog
from loragate.events.model import CaseFinished, CaseStarted, Event, RunStarted
from loragate.report.draws import in_draws
from loragate.report.html import render_html
from loragate.report.junit import render_junit
from loragate.report.progress import Liveness, Progress
from loragate.report.summary import Summary, summarize
from loragate.report.terminal import Colour, render_summary

Plan = Callable[..., RunStarted]
Finished = Callable[..., CaseFinished]
Closing = tuple[Event, ...]

_WRONG = Judgement(OracleName.EXACT, Verdict.FAIL, Failure.WRONG_ANSWER, "wrong")


def _judge(*events: Event) -> Summary:
    return summarize(EventLog(events))


def _all(finished: Finished, *names: str, count: int) -> list[CaseFinished]:
    return [finished(name, draw=number) for name in names for number in range(count)]


def test_each_draw_is_counted_and_judged_by_itself(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    ends = _all(finished, "mine.a", "mine.b", count=3)
    ends[1] = finished("mine.a", Verdict.FAIL, draw=1, judgements=(_WRONG,))
    summary = _judge(plan("mine.a", "mine.b", draws=(0, 1, 2)), *ends, *closing)
    assert summary.exit_code is ExitCode.WRONG
    assert [a.verdict for a in summary.draws] == [Verdict.PASS, Verdict.FAIL, Verdict.PASS]
    (count,) = summary.draws[1].counts
    assert (count.expected, count.executed, count.passed, count.failed) == (2, 2, 1, 1)
    assert summary.reasons[0] == "1 case wrong, in draw 1"


def test_a_draw_that_executed_less_than_expected_makes_the_run_incomplete(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    ends = _all(finished, "mine.a", "mine.b", count=3)
    # skipped when its turn came
    judgement = Judgement(OracleName.EXACT, Verdict.SKIP, message="no")
    ends[1] = finished("mine.a", Verdict.SKIP, draw=1, judgements=(judgement,))
    del ends[-1]
    summary = _judge(plan("mine.a", "mine.b", draws=(0, 1, 2)), *ends, *closing)
    assert summary.exit_code is ExitCode.INCOMPLETE
    assert [a.counts[0].missing for a in summary.draws] == [0, 1, 1]
    assert [a.verdict for a in summary.draws] == [
        Verdict.PASS,
        Verdict.INCONCLUSIVE,
        Verdict.INCONCLUSIVE,
    ]
    assert "mine/dense_delta: fewer executed than expected, in draws 1, 2" in summary.reasons


def test_a_draw_that_never_started_did_not_pass(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    summary = _judge(plan("mine.a", draws=(0, 1)), finished("mine.a"), *closing)
    assert [a.verdict for a in summary.draws] == [Verdict.PASS, Verdict.INCONCLUSIVE]
    assert "\n1 of 2 draws passed\n" in render_summary(summary, Colour.OFF)


@pytest.mark.usefixtures("plain_command")
def test_a_case_that_fails_with_two_draws_is_shown_with_the_replay_of_each(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    lost = CaseStarted(run_id="mine.a", worker="gw0", draw=2, seed=1)
    wrong = finished(
        "mine.a",
        Verdict.FAIL,
        draw=1,
        judgements=(_WRONG,),
        replay="loragate replay mine.a --draw 1",
    )
    summary = _judge(plan("mine.a", draws=(0, 1, 2)), finished("mine.a"), wrong, lost, *closing)
    lines = render_summary(summary, Colour.OFF).splitlines()
    for number in (1, 2):
        (place,) = [i for i, line in enumerate(lines) if line.startswith(f"draw {number} ")]
        assert lines[place + 1] == f"  replay  loragate replay mine.a --draw {number}"
    assert "1 of 3 draws passed" in lines


def test_a_case_that_a_draw_did_not_judge_is_shown_with_its_replay(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    unsure = finished("mine.a", Verdict.INCONCLUSIVE, draw=1, judgements=(), replay="again")
    summary = _judge(plan("mine.a", draws=(0, 1)), finished("mine.a"), unsure, *closing)
    assert [case.replay for draw in summary.draws for case in draw.troubles] == ["again"]


def test_a_case_that_is_run_once_is_expected_in_the_first_draw_alone(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    ends = [finished("mine.a", draw=3), finished("mine.a", draw=4)]
    started = plan("mine.a", "mine.b", draws=(3, 4), once=("mine.b",))
    summary = _judge(started, *ends, finished("mine.b", draw=3), *closing)
    assert summary.reasons == ()
    assert [[count.expected for count in draw.counts] for draw in summary.draws] == [[2], [1]]
    summary = _judge(started, *ends, *closing)
    assert summary.exit_code is ExitCode.INCOMPLETE
    assert "mine/dense_delta: fewer executed than expected, in draw 3" in summary.reasons


def test_each_repeat_of_a_draw_is_expected(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    ends = [finished("mine.a", draw=n, repeat=m) for n, m in ((0, 0), (0, 1), (5, 0))]
    started = plan("mine.a", draws=(0, 5), repeats=2)
    summary = _judge(started, *ends, *closing)
    assert summary.exit_code is ExitCode.INCOMPLETE
    assert summary.troubles[0].message == "passed, but never started: draw 5 repeat 1"
    assert [outcome.verdict for outcome in summary.draws] == [Verdict.PASS, Verdict.INCONCLUSIVE]
    assert _judge(started, *ends, finished("mine.a", draw=5, repeat=1), *closing).reasons == ()


def test_a_repeat_that_fails_is_named_in_every_report(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    ends: list[Event] = [finished("mine.a", repeat=n) for n in (0, 2)]
    replay = "loragate replay mine.a --draw 0 --repeats 2"
    ends.append(finished("mine.a", Verdict.FAIL, repeat=1, judgements=(_WRONG,), replay=replay))
    ends.append(CaseStarted(run_id="mine.a", worker="gw0", draw=0, repeat=3, seed=1))
    summary = _judge(plan("mine.a", draws=(0,), repeats=4), *ends, *closing)
    assert (summary.exit_code, summary.total.executed) == (ExitCode.WRONG, 1)
    text, page = render_summary(summary, Colour.OFF), render_html(summary)
    for report in (text, page):
        assert "2 of 4 trials did not pass: draw 0 repeat 1, draw 0 repeat 3" in report
        assert replay in report
    assert "0 of 1 draws passed, each case run 4 times" in text
    properties = dict(re.findall('name="(.*?)" value="(.*?)"', render_junit(summary)))
    assert (properties["draw"], properties["repeat"]) == ("0", "1")


def test_a_draw_that_kills_its_worker_is_replayed_and_not_one_that_passed(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    passed = finished("mine.a", replay="loragate replay mine.a --draw 0")
    lost = CaseStarted(run_id="mine.a", worker="gw0", draw=1, seed=1)
    summary = _judge(plan("mine.a", draws=(0, 1)), passed, lost, *closing)
    (case,) = summary.cases
    assert (case.verdict, case.failure) == (Verdict.FAIL, Failure.CRASH)
    assert case.judgements == ()
    assert case.replay.endswith("replay mine.a --draw 1")


def test_progress_names_draw_and_repeat_of_a_failure(plan: Plan, finished: Finished) -> None:
    progress = Progress(Colour.OFF, Liveness.LOG)
    progress.feed(plan("mine.a", draws=(0,), repeats=2))
    wrong = finished("mine.a", Verdict.FAIL, repeat=1, judgements=(_WRONG,))
    assert "FAIL  mine.a  draw 0 repeat 1\n" in progress.feed(wrong)


def test_a_plain_run_says_nothing_of_draws(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    wrong = finished("mine.a", Verdict.FAIL, judgements=(_WRONG,))
    summary = _judge(plan("mine.a", draws=(0,)), wrong, *closing)
    assert summary.draws == ()
    assert summary.reasons[0] == "1 case wrong"
    assert "draws passed" not in render_summary(summary, Colour.OFF)


def test_a_case_that_failed_once_stays_among_those_that_did_not_pass(
    plan: Plan, finished: Finished
) -> None:
    progress = Progress(Colour.OFF, Liveness.TERMINAL)
    progress.feed(plan("mine.a", draws=(0, 1)))
    wrong = finished("mine.a", Verdict.FAIL, judgements=(_WRONG,))
    assert "FAIL  mine.a  draw 0\n" in progress.feed(wrong)
    assert progress.feed(finished("mine.a", draw=1)).endswith("1/1 cases, 1 did not pass")


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([7], ", in draw 7"),
        ([3, 1], ", in draws 1, 3"),
        (range(20), ", in draws 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"),
    ],
)
def test_draws_are_named_while_they_are_few(numbers: list[int], text: str) -> None:
    assert in_draws(numbers) == text
