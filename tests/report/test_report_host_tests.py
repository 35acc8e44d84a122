"""Host tests in the reports: bad ones by name and first, good ones counted."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from loragate.core.verdict import ExitCode, Verdict
from loragate.events.log import EventLog
from loragate.events.model import (
    CaseFinished,
    Event,
    HostTestFinished,
    HostTestsCollected,
    LegFinished,
    RunStarted,
)
from loragate.report.html import render_html
from loragate.report.progress import Liveness, Progress
from loragate.report.summary import Summary, summarize
from loragate.report.terminal import Colour, render_summary

Plan = Callable[..., RunStarted]
Finished = Callable[..., CaseFinished]
Closing = tuple[Event, ...]


def _test(name: str, verdict: Verdict = Verdict.PASS, **changes: Any) -> HostTestFinished:
    known: dict[str, Any] = {"leg": "host", "test": name, "duration_s": 0.5}
    return HostTestFinished(**known | {"verdict": verdict} | changes)


def _judge(plan: Plan, finished: Finished, closing: Closing, *events: Event) -> Summary:
    return summarize(EventLog((plan("mine.a"), finished("mine.a"), *events, *closing)))


def test_a_host_test_that_fails_makes_the_run_wrong_whatever_its_leg_says(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    summary = _judge(plan, finished, closing, _test("t::a", Verdict.FAIL), _test("t::b"))
    assert summary.exit_code is ExitCode.WRONG
    assert summary.reasons == ("1 host test failed",)


def test_good_and_skipped_host_tests_change_nothing(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    summary = _judge(plan, finished, closing, _test("t::a"), _test("t::b", Verdict.SKIP))
    assert summary.exit_code is ExitCode.OK
    assert summary.total.executed == 1


def test_a_leg_of_host_tests_that_passed_without_any_has_judged_nothing(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    leg = LegFinished(name="host", verdict=Verdict.PASS, exit_code=0, duration_s=1.0)
    summary = _judge(plan, finished, closing, leg)
    assert summary.exit_code is ExitCode.INCOMPLETE
    assert summary.reasons == ("leg host: no test was collected",)
    assert _judge(plan, finished, closing, leg, _test("t::a")).exit_code is ExitCode.OK
    # of another leg
    found = HostTestFinished(leg="gpu", test="t::a", verdict=Verdict.PASS, duration_s=1.0)
    assert _judge(plan, finished, closing, leg, found).exit_code is ExitCode.INCOMPLETE


def test_a_leg_of_host_tests_that_passed_with_each_of_them_skipped_has_judged_nothing(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    leg = LegFinished(name="host", verdict=Verdict.PASS, exit_code=0, duration_s=1.0)
    skipped = [_test(name, Verdict.SKIP, message="no GPU") for name in ("t::a", "t::b")]
    summary = _judge(plan, finished, closing, leg, *skipped)
    assert summary.exit_code is ExitCode.INCOMPLETE
    assert summary.reasons == ("leg host: every test was skipped",)
    assert _judge(plan, finished, closing, leg, *skipped, _test("t::c")).exit_code is ExitCode.OK


def test_tests_of_one_name_in_two_legs_are_two(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    collected = HostTestsCollected(leg="host 2", tests=("t::a",))
    ends = (_test("t::a"), _test("t::a", Verdict.FAIL, leg="host 2"))
    summary = _judge(plan, finished, closing, collected, *ends)
    assert [(test.leg, test.verdict) for test in summary.host_tests] == [
        ("host", Verdict.PASS),
        ("host 2", Verdict.FAIL),
    ]


def test_a_host_test_that_never_ended_is_inconclusive_by_name(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    collected = HostTestsCollected(leg="host", tests=("t::a", "t::b"))
    summary = _judge(plan, finished, closing, collected, _test("t::a"))
    assert summary.exit_code is ExitCode.INCOMPLETE
    assert "INCONCLUSIVE  t::b\n  collected, but never ended\n" in render_summary(
        summary, Colour.OFF
    )


def test_a_later_end_of_a_host_test_does_not_improve_an_earlier_one(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    events = [_test("t::a", Verdict.FAIL), _test("t::a"), _test("t::a", Verdict.SKIP)]
    for seed in range(6):
        random.Random(seed).shuffle(events)
        summary = _judge(plan, finished, closing, *events)
        assert [test.verdict for test in summary.host_tests] == [Verdict.FAIL]


def test_the_page_lists_bad_host_tests_first_and_folds_the_others(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    failed = _test(
        "t::failed", Verdict.FAIL, message="no", place="t:7", detail="a stack", output="spoken"
    )
    tests = [
        _test("t::a"),
        failed,
        _test("t::lost", Verdict.INCONCLUSIVE),
        _test("t::skipped", Verdict.SKIP, message="from Triton 9 on"),
    ]
    page = render_html(_judge(plan, finished, closing, *tests))
    section = page[page.index('<section id="host-tests">') :]
    section = section[: section.index("</section>")]
    order = ["2 of 4 did not pass", "t::failed", "a stack", "spoken", "python -m pytest t::failed"]
    order += ["t::lost", "2 passed or skipped", "t::a", "t::skipped", "from Triton 9 on"]
    places = [section.index(text) for text in order]
    assert all(before < after for before, after in pairwise(places))
    assert '<section id="host-tests">' not in render_html(_judge(plan, finished, closing))


def test_a_terminal_shows_twenty_bad_host_tests_and_names_the_next_twenty(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    tests = [_test(f"t::{number:02}", Verdict.FAIL, message="no") for number in range(45)]
    text = render_summary(_judge(plan, finished, closing, *tests), Colour.OFF)
    assert text.count("  rerun  python -m pytest t::") == 20
    assert "... and 25 more host tests that did not pass\n  t::20\n" in text
    assert "  t::39\n  ... and 5 more\n" in text
    assert "t::40" not in text


def test_progress_names_a_bad_host_test_at_once_and_no_good_one() -> None:
    progress = Progress(Colour.OFF, Liveness.LOG)
    assert progress.feed(_test("t::a")) == ""
    assert progress.feed(_test("t::a", Verdict.SKIP)) == ""
    for bad in (Verdict.FAIL, Verdict.INFRA, Verdict.INCONCLUSIVE):
        assert progress.feed(_test("t::a", bad)) == f"{bad.upper()}  t::a\n"
