"""A run over several seeds is complete and right only if each of its attempts is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loragate.core.verdict import ExitCode, Failure, Judgement, OracleName, Verdict
from loragate.events.log import EventLog
from loragate.events.model import CaseFinished, CaseStarted, Event, RunStarted
from loragate.report.attempts import in_attempts
from loragate.report.progress import Liveness, Progress
from loragate.report.summary import Summary, summarize
from loragate.report.terminal import Colour, render_summary

Plan = Callable[..., RunStarted]
Finished = Callable[..., CaseFinished]
Closing = tuple[Event, ...]

_WRONG = Judgement(OracleName.EXACT, Verdict.FAIL, Failure.WRONG_ANSWER, "wrong")


def _judge(*events: Event) -> Summary:
    return summarize(EventLog(events))


def _all(finished: Finished, *names: str, attempts: int) -> list[CaseFinished]:
    return [finished(name, attempt=number) for name in names for number in range(attempts)]


def test_each_attempt_is_counted_and_judged_by_itself(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    ends = _all(finished, "mine.a", "mine.b", attempts=3)
    ends[1] = finished("mine.a", Verdict.FAIL, attempt=1, judgements=(_WRONG,))
    summary = _judge(plan("mine.a", "mine.b", attempts=(0, 1, 2)), *ends, *closing)
    assert summary.exit_code is ExitCode.WRONG
    assert [a.verdict for a in summary.attempts] == [Verdict.PASS, Verdict.FAIL, Verdict.PASS]
    (count,) = summary.attempts[1].counts
    assert (count.expected, count.executed, count.passed, count.failed) == (2, 2, 1, 1)
    assert summary.reasons[0] == "1 case wrong, in attempt 1"


def test_an_attempt_that_executed_less_than_expected_makes_the_run_incomplete(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    ends = _all(finished, "mine.a", "mine.b", attempts=3)
    # skipped when its turn came
    judgement = Judgement(OracleName.EXACT, Verdict.SKIP, message="no")
    ends[1] = finished("mine.a", Verdict.SKIP, attempt=1, judgements=(judgement,))
    del ends[-1]
    summary = _judge(plan("mine.a", "mine.b", attempts=(0, 1, 2)), *ends, *closing)
    assert summary.exit_code is ExitCode.INCOMPLETE
    assert [a.counts[0].missing for a in summary.attempts] == [0, 1, 1]
    assert [a.verdict for a in summary.attempts] == [
        Verdict.PASS,
        Verdict.INCONCLUSIVE,
        Verdict.INCONCLUSIVE,
    ]
    assert "mine/dense_delta: fewer executed than expected, in attempts 1, 2" in summary.reasons


def test_an_attempt_of_which_nothing_was_heard_did_not_pass(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    summary = _judge(plan("mine.a", attempts=(0, 1)), finished("mine.a"), *closing)
    assert [a.verdict for a in summary.attempts] == [Verdict.PASS, Verdict.INCONCLUSIVE]


def test_a_case_that_fails_with_two_seeds_is_told_with_the_replay_of_each(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    lost = CaseStarted(run_id="mine.a", worker="gw0", attempt=2, seed=1)
    wrong = finished(
        "mine.a",
        Verdict.FAIL,
        attempt=1,
        judgements=(_WRONG,),
        replay="loragate replay mine.a --attempt 1",
    )
    summary = _judge(plan("mine.a", attempts=(0, 1, 2)), finished("mine.a"), wrong, lost, *closing)
    lines = render_summary(summary, Colour.OFF).splitlines()
    for number in (1, 2):
        (place,) = [i for i, line in enumerate(lines) if line.startswith(f"attempt {number} ")]
        assert lines[place + 1] == f"  replay  loragate replay mine.a --attempt {number}"
    assert "1 of 3 attempts passed" in lines


def test_a_plain_run_says_nothing_of_attempts(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    wrong = finished("mine.a", Verdict.FAIL, judgements=(_WRONG,))
    summary = _judge(plan("mine.a", attempts=(0,)), wrong, *closing)
    assert summary.attempts == ()
    assert summary.reasons[0] == "1 case wrong"
    assert "attempts passed" not in render_summary(summary, Colour.OFF)


def test_a_case_that_failed_once_stays_among_those_that_did_not_pass(
    plan: Plan, finished: Finished
) -> None:
    progress = Progress(Colour.OFF, Liveness.TERMINAL)
    progress.feed(plan("mine.a", attempts=(0, 1)))
    wrong = finished("mine.a", Verdict.FAIL, judgements=(_WRONG,))
    assert "FAIL  mine.a  attempt 0\n" in progress.feed(wrong)
    assert progress.feed(finished("mine.a", attempt=1)).endswith("1/1 cases, 1 did not pass")


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([7], ", in attempt 7"),
        ([3, 1], ", in attempts 1, 3"),
        (range(20), ", in attempts 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"),
    ],
)
def test_attempts_are_named_while_they_are_few(numbers: list[int], text: str) -> None:
    assert in_attempts(numbers) == text
