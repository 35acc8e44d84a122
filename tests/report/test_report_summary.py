"""From events to one verdict: what makes a run fail, and what must never let it pass."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from loragate.core.verdict import ExitCode, Failure, Judgement, OracleName, Verdict
from loragate.events.log import EventLog
from loragate.events.model import (
    CaseFinished,
    CaseStarted,
    CompileResult,
    Event,
    Expected,
    LegFinished,
    LegStarted,
    Note,
    RunFinished,
    RunStarted,
    Skipped,
)
from loragate.report.summary import Summary, summarize

Plan = Callable[..., RunStarted]
Finished = Callable[..., CaseFinished]
Closing = tuple[Event, ...]

_WRONG = Judgement(OracleName.EXACT, Verdict.FAIL, Failure.WRONG_ANSWER, "17 elements differ")
_OOM = Judgement(OracleName.EXACT, Verdict.INFRA, Failure.OUT_OF_MEMORY, "2 GiB asked")


def _judge(*events: Event) -> Summary:
    return summarize(EventLog(events))


def test_a_run_in_which_every_expected_case_passed_passes(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    summary = _judge(plan("mine.a", "mine.b"), finished("mine.a"), finished("mine.b"), *closing)
    assert (summary.verdict, summary.exit_code) == (Verdict.PASS, ExitCode.OK)
    assert summary.reasons == ()
    assert (summary.total.expected, summary.total.executed, summary.total.passed) == (2, 2, 2)


def test_a_wrong_case_makes_the_run_wrong(plan: Plan, finished: Finished, closing: Closing) -> None:
    wrong = finished("mine.a", Verdict.FAIL, judgements=(_WRONG,))
    summary = _judge(plan("mine.a"), wrong, *closing)
    assert summary.exit_code is ExitCode.WRONG
    (case,) = summary.troubles
    assert (case.failure, case.message) == (Failure.WRONG_ANSWER, "17 elements differ")
    assert case.replay == "loragate replay mine.a --draw 0"


def test_a_wrong_case_outweighs_an_infrastructure_failure(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    wrong = finished("mine.a", Verdict.FAIL, judgements=(_WRONG,))
    lost = finished("mine.b", Verdict.INFRA, judgements=(_OOM,))
    summary = _judge(plan("mine.a", "mine.b"), wrong, lost, *closing)
    assert summary.exit_code is ExitCode.WRONG
    assert summary.reasons[0] == "1 case wrong"


def test_a_planned_case_that_never_started_makes_the_run_incomplete(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    summary = _judge(plan("mine.a", "mine.b"), finished("mine.a"), *closing)
    assert summary.exit_code is ExitCode.INCOMPLETE
    assert summary.missing == ("mine.b",)
    assert "mine/dense_delta: 1 of 2 expected executed" in summary.reasons


def test_a_case_that_was_not_planned_does_not_replace_a_missing_one(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    summary = _judge(plan("mine.a", "mine.b"), finished("mine.a"), finished("mine.c"), *closing)
    assert summary.exit_code is ExitCode.INCOMPLETE
    assert summary.reasons == ("1 planned case was never started",)


def test_a_case_that_ran_twice_counts_once(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    twice = (finished("mine.a"), finished("mine.a", draw=1))
    summary = _judge(plan("mine.a", "mine.b"), *twice, *closing)
    assert summary.total.executed == 1
    assert summary.exit_code is ExitCode.INCOMPLETE


@pytest.mark.parametrize(
    ("verdict", "judgements"),
    [
        (Verdict.INFRA, (_OOM,)),
        # whatever the writer thought of it
        (Verdict.SKIP, (_OOM,)),
        (Verdict.PASS, (Judgement(OracleName.REPEAT, Verdict.PASS), _OOM)),
    ],
)
def test_too_little_memory_is_never_a_pass(
    plan: Plan,
    finished: Finished,
    closing: Closing,
    verdict: Verdict,
    judgements: tuple[Judgement, ...],
) -> None:
    case = finished("mine.a", verdict, judgements=judgements)
    summary = _judge(plan("mine.a"), case, *closing)
    assert summary.exit_code is ExitCode.INFRASTRUCTURE
    assert summary.total.executed == 0


@pytest.mark.parametrize("verdict", [Verdict.SKIP, Verdict.INCONCLUSIVE, Verdict.PASS])
def test_too_little_memory_outside_of_an_oracle_is_never_a_pass(
    plan: Plan, finished: Finished, closing: Closing, verdict: Verdict
) -> None:
    good = (Judgement(OracleName.EXACT, Verdict.PASS),)
    case = finished("mine.a", verdict, failure=Failure.OUT_OF_MEMORY, judgements=good)
    assert _judge(plan("mine.a"), case, *closing).exit_code is ExitCode.INFRASTRUCTURE


def test_a_case_that_calls_itself_passed_is_no_better_than_its_evidence(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    case = finished("mine.a", Verdict.PASS, judgements=(_WRONG,))
    assert _judge(plan("mine.a"), case, *closing).exit_code is ExitCode.WRONG


@pytest.mark.parametrize(
    "judgements", [(), (Judgement(OracleName.EXACT, Verdict.SKIP, message="no exact data"),)]
)
def test_a_pass_that_no_oracle_gave_is_inconclusive(
    plan: Plan, finished: Finished, closing: Closing, judgements: tuple[Judgement, ...]
) -> None:
    summary = _judge(plan("mine.a"), finished("mine.a", judgements=judgements), *closing)
    assert summary.exit_code is ExitCode.INCOMPLETE
    assert summary.troubles[0].message == "no oracle gave a verdict"


def test_an_inconclusive_case_makes_the_run_incomplete(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    unsure = Judgement(OracleName.REFERENCE, Verdict.INCONCLUSIVE, message="ill-conditioned")
    case = finished("mine.a", Verdict.INCONCLUSIVE, judgements=(unsure,))
    summary = _judge(plan("mine.a"), case, *closing)
    assert (summary.exit_code, summary.total.inconclusive) == (ExitCode.INCOMPLETE, 1)


def test_an_expected_case_that_is_skipped_at_run_time_makes_the_run_incomplete(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    skipped = Judgement(OracleName.EXACT, Verdict.SKIP, message="not on this machine")
    case = finished("mine.a", Verdict.SKIP, judgements=(skipped,))
    summary = _judge(plan("mine.a"), case, *closing)
    assert summary.exit_code is ExitCode.INCOMPLETE
    assert (summary.total.executed, summary.total.skipped) == (0, 1)
    assert "1 case skipped at run time" in summary.reasons
    assert [case.run_id for case in summary.troubles] == ["mine.a"]


def test_a_case_that_the_plan_left_out_is_counted_and_does_no_harm(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    left_out = Skipped(run_id="mine.b", subject="mine", site="dense_delta", reason="rank 512")
    summary = _judge(plan("mine.a", skipped=(left_out,)), finished("mine.a"), *closing)
    assert (summary.exit_code, summary.total.skipped) == (ExitCode.OK, 1)


def test_a_site_of_which_the_plan_left_out_every_case_is_counted(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    left_out = Skipped(run_id="mine.c", subject="mine", site="moe_delta", reason="no MoE")
    summary = _judge(plan("mine.a", skipped=(left_out,)), finished("mine.a"), *closing)
    assert [(row.site, row.expected, row.skipped) for row in summary.counts] == [
        ("dense_delta", 1, 0),
        ("moe_delta", 0, 1),
    ]


@pytest.mark.usefixtures("plain_command")
def test_a_case_that_started_and_never_finished_crashed(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    start = CaseStarted(run_id="mine.a", worker="gw3", draw=2, seed=9)
    summary = _judge(plan("mine.a", "mine.b"), start, finished("mine.b"), *closing)
    (case,) = summary.troubles
    assert (case.verdict, case.failure) == (Verdict.FAIL, Failure.CRASH)
    assert case.message == "worker gw3 crashed while it ran draw 2"
    assert (case.subject, case.site) == ("mine", "dense_delta")
    assert case.replay == "loragate replay mine.a --draw 2"
    assert summary.exit_code is ExitCode.WRONG


def test_a_case_that_was_lost_with_its_whole_leg_is_no_wrong_answer(plan: Plan) -> None:
    start = CaseStarted(run_id="mine.a", worker="gw0", draw=0, seed=9)
    leg = LegFinished(name="kernels", verdict=Verdict.INFRA, exit_code=-9, duration_s=1.0)
    end = RunFinished(finished_at="now", duration_s=1.0)
    summary = _judge(plan("mine.a"), start, leg, end)
    assert summary.troubles[0].verdict is Verdict.INFRA
    assert summary.exit_code is ExitCode.INFRASTRUCTURE


def test_a_case_that_ran_when_the_run_was_killed_is_no_wrong_answer(plan: Plan) -> None:
    start = CaseStarted(run_id="mine.a", worker="gw0", draw=0, seed=9)
    summary = _judge(plan("mine.a"), LegStarted(name="kernels"), start)
    assert summary.troubles[0].verdict is Verdict.INFRA
    assert (
        summary.troubles[0].message
        == "worker gw0 was lost together with its leg while it ran draw 0"
    )
    assert summary.exit_code is ExitCode.INFRASTRUCTURE


def test_of_several_draws_that_crashed_the_last_is_shown_in_whatever_order_they_began(
    plan: Plan, closing: Closing
) -> None:
    starts = [CaseStarted(run_id="mine.a", worker="gw0", draw=n, seed=9) for n in (1, 2)]
    for order in (starts, starts[::-1]):
        summary = _judge(plan("mine.a"), *order, *closing)
        assert summary.troubles[0].message == "worker gw0 crashed while it ran draw 2"
        assert summary.troubles[0].bad_trials == ((1, 0), (2, 0))


def test_a_crash_in_a_later_draw_is_not_hidden_by_an_earlier_pass(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    start = CaseStarted(run_id="mine.a", worker="gw0", draw=1, seed=9)
    summary = _judge(plan("mine.a"), finished("mine.a"), start, *closing)
    assert summary.exit_code is ExitCode.WRONG
    assert summary.troubles[0].trials == 2


def test_the_worst_draw_decides(plan: Plan, finished: Finished, closing: Closing) -> None:
    wrong = finished("mine.a", Verdict.FAIL, draw=1, judgements=(_WRONG,))
    summary = _judge(plan("mine.a"), finished("mine.a"), wrong, finished("mine.a", draw=2))
    shown = summary.troubles[0].shown
    assert shown is not None
    assert (shown.draw, summary.troubles[0].trials) == (1, 3)
    assert summary.troubles[0].bad_trials == ((1, 0),)


def test_draws_that_never_started_make_the_run_incomplete(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    ran = (finished("mine.a"), finished("mine.a", draw=2))
    summary = _judge(plan("mine.a", draws=(0, 1, 2, 3)), *ran, *closing)
    assert summary.exit_code is ExitCode.INCOMPLETE
    assert summary.troubles[0].message == "passed, but never started: draw 1, draw 3"


def test_a_killed_run_is_incomplete_although_all_that_ran_passed(
    plan: Plan, finished: Finished
) -> None:
    summary = _judge(plan("mine.a", "mine.b"), LegStarted(name="kernels"), finished("mine.a"))
    assert summary.exit_code is ExitCode.INCOMPLETE
    assert "the run did not come to its end" in summary.reasons
    assert "leg kernels: inconclusive: started and never finished" in summary.reasons


def test_a_run_without_a_plan_is_incomplete(finished: Finished, closing: Closing) -> None:
    summary = _judge(finished("mine.a"), *closing)
    assert summary.reasons == ("no plan is recorded, so nothing shows what is missing",)
    assert summary.exit_code is ExitCode.INCOMPLETE


def test_a_plan_that_expects_nothing_is_incomplete(plan: Plan, closing: Closing) -> None:
    summary = _judge(plan(expected=()), *closing)
    assert summary.exit_code is ExitCode.INCOMPLETE


def test_a_plan_of_kernels_without_a_case_is_incomplete(plan: Plan, closing: Closing) -> None:
    kernels = Expected(leg="kernels", subject="mine", site="compile", count=1)
    summary = _judge(plan(expected=(kernels,)), _compiled(Verdict.PASS), *closing)
    assert summary.exit_code is ExitCode.INCOMPLETE
    assert "the plan expects no case, so nothing was shown about any" in summary.reasons


@pytest.mark.parametrize(
    ("verdict", "exit_code", "expected"),
    [
        (Verdict.FAIL, 1, ExitCode.WRONG),
        (Verdict.INFRA, 3, ExitCode.INFRASTRUCTURE),
        (Verdict.INCONCLUSIVE, 2, ExitCode.INCOMPLETE),
        (Verdict.SKIP, 0, ExitCode.INCOMPLETE),
        # a leg that says one thing and exits with another is not to be believed
        (Verdict.PASS, 139, ExitCode.INFRASTRUCTURE),
    ],
)
def test_a_leg_that_did_not_pass_decides_the_run(
    plan: Plan, finished: Finished, verdict: Verdict, exit_code: int, expected: ExitCode
) -> None:
    leg = LegFinished(name="host", verdict=verdict, exit_code=exit_code, duration_s=1.0)
    good = LegFinished(name="kernels", verdict=Verdict.PASS, exit_code=0, duration_s=1.0)
    end = RunFinished(finished_at="now", duration_s=1.0)
    started = plan("mine.a", legs=("host", "kernels"))
    summary = _judge(started, finished("mine.a"), leg, good, end)
    assert summary.exit_code is expected
    assert summary.reasons[0].startswith("leg host: ")


def test_a_leg_recorded_twice_keeps_its_worse_record(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    wrong = LegFinished(name="kernels", verdict=Verdict.FAIL, exit_code=1, duration_s=1.0)
    for records in ((wrong, *closing), (*closing, wrong)):
        summary = _judge(plan("mine.a"), finished("mine.a"), *records)
        assert summary.exit_code is ExitCode.WRONG


def test_a_planned_leg_that_did_not_run_makes_the_run_incomplete(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    summary = _judge(plan("mine.a", legs=("host", "kernels")), finished("mine.a"), *closing)
    assert summary.exit_code is ExitCode.INCOMPLETE
    assert "leg host: inconclusive: did not run" in summary.reasons


def test_a_leg_that_vanished_from_a_finished_run_is_an_infrastructure_failure(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    started = plan("mine.a", legs=("host", "kernels"))
    summary = _judge(started, LegStarted(name="host"), finished("mine.a"), *closing)
    assert summary.exit_code is ExitCode.INFRASTRUCTURE


def test_a_kernel_that_grew_beyond_its_baseline_makes_the_run_wrong(
    plan: Plan, closing: Closing
) -> None:
    summary = _judge(_compiling(plan, count=1), _compiled(Verdict.FAIL, "8 spills"), *closing)
    assert summary.exit_code is ExitCode.WRONG
    assert summary.reasons[0] == "compile fail: _shrink for sm_90 (rank-16): 8 spills"


def test_a_kernel_that_was_not_compiled_makes_the_run_incomplete(
    plan: Plan, closing: Closing
) -> None:
    same_twice = (_compiled(Verdict.PASS), _compiled(Verdict.PASS))
    summary = _judge(_compiling(plan, count=2), *same_twice, *closing)
    assert summary.exit_code is ExitCode.INCOMPLETE
    assert summary.reasons[0] == "mine/compile: 1 of 2 expected executed"


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (Verdict.INFRA, ExitCode.INFRASTRUCTURE),
        (Verdict.INCONCLUSIVE, ExitCode.INCOMPLETE),
        (Verdict.SKIP, ExitCode.INCOMPLETE),
    ],
)
def test_a_kernel_that_could_not_be_judged_is_never_a_pass(
    plan: Plan, closing: Closing, verdict: Verdict, expected: ExitCode
) -> None:
    summary = _judge(_compiling(plan, count=1), _compiled(verdict, "no ptxas"), *closing)
    assert summary.exit_code is expected
    assert f"compile {verdict}: _shrink for sm_90 (rank-16): no ptxas" in summary.reasons


def test_a_kernel_recorded_twice_keeps_its_worse_record(plan: Plan, closing: Closing) -> None:
    grown, good = _compiled(Verdict.FAIL, "8 spills"), _compiled(Verdict.PASS)
    for records in ((grown, good), (good, grown)):
        summary = _judge(_compiling(plan, count=1), *records, *closing)
        assert [result.message for result in summary.compiles] == ["8 spills"]
        assert summary.exit_code is ExitCode.WRONG


def test_the_order_of_the_events_does_not_matter(example_run: EventLog) -> None:
    shuffled = list(example_run.events)
    random.Random(3).shuffle(shuffled)
    assert summarize(EventLog(tuple(shuffled))) == summarize(example_run)


def test_a_case_recorded_by_two_processes_keeps_its_worse_record(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    hang = finished("mine.a", Verdict.FAIL, judgements=(), failure=Failure.HANG, message="60 s")
    for records in ((hang, finished("mine.a")), (finished("mine.a"), hang)):
        summary = _judge(plan("mine.a"), *records, *closing)
        assert (summary.troubles[0].failure, summary.exit_code) == (Failure.HANG, ExitCode.WRONG)


def test_a_run_that_could_not_be_recorded_in_full_is_no_better_than_infra(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    log = EventLog((plan("mine.a"), finished("mine.a"), *closing))
    summary = summarize(log, problems=("events.jsonl: cannot be written: disk full",))
    assert summary.exit_code is ExitCode.INFRASTRUCTURE
    assert summary.reasons == ("events.jsonl: cannot be written: disk full",)


def test_the_notes_count_what_could_not_be_read(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    events = (plan("mine.a"), finished("mine.a"), Note(text="hello"), *closing)
    summary = summarize(EventLog(events, damaged=2, foreign=1))
    assert summary.notes == (
        "hello",
        "2 records torn or damaged were left out",
        "1 record of another run was left out",
    )


def _compiling(plan: Plan, *, count: int) -> RunStarted:
    row = Expected(leg="kernels", subject="mine", site="compile", count=count)
    return plan(expected=(row,))


def _compiled(verdict: Verdict, message: str = "") -> CompileResult:
    return CompileResult(
        subject="mine",
        kernel="_shrink",
        specialisation="rank-16",
        arch="sm_90",
        verdict=verdict,
        message=message,
    )
