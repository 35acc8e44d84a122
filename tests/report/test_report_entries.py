"""What JUnit lists of a run: every red run has a red entry, and every entry says what is wrong."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loragate.core.verdict import EXIT_CODES, Failure, Judgement, OracleName, Verdict
from loragate.events.log import EventLog
from loragate.events.model import (
    CaseFinished,
    CaseStarted,
    CompileResult,
    Event,
    Expected,
    HostTestFinished,
    HostTestsCollected,
    LegFinished,
    LegStarted,
    RunFinished,
    RunStarted,
    Skipped,
)
from loragate.matrix.case import Tier
from loragate.report.junit import render_junit
from loragate.report.summary import Summary, summarize

Plan = Callable[..., RunStarted]
Finished = Callable[..., CaseFinished]
Closing = tuple[Event, ...]

_WRONG = Judgement(
    OracleName.EXACT,
    Verdict.FAIL,
    Failure.WRONG_ANSWER,
    "2 elements differ",
    {"differing": 2.0},
    {"slot": 7, "token": 31},
)
_LEGS = ("cases", "compile", "host", "findings")


def _document(*events: Event) -> ElementTree.Element:
    return ElementTree.fromstring(render_junit(summarize(EventLog(events))))


def _red(root: ElementTree.Element) -> list[tuple[str | None, str | None]]:
    """Suites and names of the entries with a failure or an error."""
    return [
        (suite.get("name"), case.get("name"))
        for suite in root.iter("testsuite")
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]


def _ended(leg: str, verdict: Verdict, **changes: Any) -> LegFinished:
    code = EXIT_CODES[verdict].value
    known: dict[str, Any] = {"name": leg, "verdict": verdict, "exit_code": code, "duration_s": 1.0}
    return LegFinished(**known | changes)


def _test(verdict: Verdict, **changes: Any) -> HostTestFinished:
    known: dict[str, Any] = {"leg": "host", "test": "test_a.py::test_b", "duration_s": 0.5}
    return HostTestFinished(**known | {"verdict": verdict} | changes)


_END = RunFinished(finished_at="", duration_s=1.0)


def test_a_failure_is_one_entry_and_its_leg_is_none(plan: Plan, finished: Finished) -> None:
    wrong = finished("mine.dense_delta.a", Verdict.FAIL, judgements=(_WRONG,))
    started = plan("mine.dense_delta.a", legs=("kernels", "host"))
    legs = (_ended("kernels", Verdict.FAIL), _ended("host", Verdict.FAIL))
    root = _document(started, wrong, _test(Verdict.FAIL), *legs, _END)
    assert _red(root) == [("host", "test_a.py::test_b"), ("mine.dense_delta", "a")]
    assert (root.get("failures"), root.get("errors")) == ("2", "0")


@pytest.mark.parametrize(
    ("ended", "shown"),
    [
        (_ended("kernels", Verdict.FAIL), True),
        (_ended("kernels", Verdict.INCONCLUSIVE), True),
        (_ended("kernels", Verdict.INFRA, exit_code=-9, message="killed by SIGKILL"), True),
        (_ended("kernels", Verdict.INFRA), True),
        (_ended("kernels", Verdict.PASS, exit_code=1), True),
        (_ended("kernels", Verdict.PASS, exit_code=-9), True),
        (_ended("kernels", Verdict.PASS), False),
    ],
)
def test_a_leg_that_no_entry_explains_is_an_entry_of_its_own(
    plan: Plan, finished: Finished, ended: LegFinished, shown: bool
) -> None:
    root = _document(plan("mine.dense_delta.a"), finished("mine.dense_delta.a"), ended, _END)
    assert _red(root) == ([("gate.legs", "kernels")] if shown else [])


def test_a_failure_of_another_leg_does_not_explain_a_leg(plan: Plan, finished: Finished) -> None:
    started = plan("mine.dense_delta.a", legs=("kernels", "host"))
    legs = (_ended("kernels", Verdict.FAIL), _ended("host", Verdict.FAIL))
    root = _document(started, finished("mine.dense_delta.a"), _test(Verdict.FAIL), *legs, _END)
    assert _red(root) == [("gate.legs", "kernels"), ("host", "test_a.py::test_b")]


def test_an_interrupted_leg_is_an_entry_beside_the_cases_that_it_left(
    plan: Plan, finished: Finished
) -> None:
    open_case = finished("mine.dense_delta.a", Verdict.INCONCLUSIVE, judgements=())
    ended = _ended("kernels", Verdict.INCONCLUSIVE, message="interrupted")
    root = _document(plan("mine.dense_delta.a"), open_case, ended, _END)
    assert _red(root) == [("gate.legs", "kernels"), ("mine.dense_delta", "a")]


def test_a_result_that_is_skipped_at_run_time_is_an_error(plan: Plan, finished: Finished) -> None:
    skipped = finished("mine.dense_delta.a", Verdict.SKIP, judgements=())
    root = _document(plan("mine.dense_delta.a"), skipped, _ended("kernels", Verdict.PASS), _END)
    assert _red(root) == [("mine.dense_delta", "a")]


def test_kernels_that_never_compiled_are_an_error_of_the_run(plan: Plan) -> None:
    row = Expected(leg="kernels", subject="mine", site="compile", count=2)
    root = _document(plan(expected=(row,)), _ended("kernels", Verdict.PASS), _END)
    assert ("gate.run", "mine/compile: 0 of 2 expected executed") in _red(root)


def test_a_run_whose_entries_are_all_green_still_says_why_it_did_not_pass(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    stray = finished("mine.dense_delta.a", subject="other")
    root = _document(plan("mine.dense_delta.a"), stray, *closing)
    assert _red(root) == [("gate.run", "verdict")]
    error = root.find(".//error")
    assert error is not None
    assert error.get("message") == "mine/dense_delta: 0 of 1 expected executed"


def test_the_output_of_an_entry_holds_every_oracle_and_the_command(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    good = Judgement(OracleName.REPEAT, Verdict.PASS, metrics={"err": 0.5, "threshold": 1.0})
    wrong = finished("mine.dense_delta.a", Verdict.FAIL, judgements=(_WRONG, good))
    root = _document(plan("mine.dense_delta.a"), wrong, *closing)
    assert root.findtext(".//system-out") == (
        "exact: fail wrong_answer: slot 7, token 31; differing 2; 2 elements differ\n"
        "repeat: pass: error 0.5, threshold 1 (0.5x)\n"
        "replay: loragate replay mine.dense_delta.a --draw 0"
    )


def test_the_message_of_an_entry_is_that_of_the_judgement_that_decided(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    unsure = Judgement(OracleName.REFERENCE, Verdict.INCONCLUSIVE, None, "vague", {}, {"slot": 1})
    case = finished("mine.dense_delta.a", Verdict.FAIL, judgements=(unsure, _WRONG))
    failure = _document(plan("mine.dense_delta.a"), case, *closing).find(".//failure")
    assert failure is not None
    assert failure.get("message") == (
        "wrong_answer; slot 7, token 31; differing 2; 2 elements differ"
    )


def test_a_long_output_is_cut_in_the_middle_with_a_note(plan: Plan, closing: Closing) -> None:
    output = "begin" + "x" * 100_000 + "end"
    root = _document(plan(), _test(Verdict.FAIL, output=output), *closing)
    text = root.findtext(".//system-out") or ""
    assert len(text) < 21_000
    assert "begin" in text
    assert text.endswith("end")
    assert re.search(r"\n\.\.\. \d+ characters left out \.\.\.\n", text)


_NAMES = st.sampled_from(["mine.s.a", "mine.s.b", "other.s.c"]) | st.text(max_size=4)
_TEXTS = st.text(max_size=6) | st.sampled_from(["", "line\nline", "\x1b[31m\u202e\udc80\x9b"])
_VERDICTS = st.sampled_from(list(Verdict))
_LEG_NAMES = st.sampled_from([*_LEGS, ""])
_FLOATS = st.floats()


@st.composite
def _judgements(draw: st.DrawFn) -> Judgement:
    verdict = draw(_VERDICTS)
    needs_kind = verdict in (Verdict.FAIL, Verdict.INFRA)
    failure = draw(st.sampled_from(list(Failure))) if needs_kind else None
    metrics = draw(st.dictionaries(_TEXTS, _FLOATS, max_size=2))
    where = draw(st.dictionaries(_TEXTS, _TEXTS, max_size=2))
    oracle = draw(st.sampled_from(list(OracleName)))
    return Judgement(oracle, verdict, failure, draw(_TEXTS), metrics, where)


_CASES = st.builds(
    CaseFinished,
    run_id=_NAMES,
    subject=st.sampled_from(["mine", "other"]) | _TEXTS,
    site=st.sampled_from(["s", "compile"]) | _TEXTS,
    draw=st.integers(0, 1),
    seed=st.just(1),
    worker=_TEXTS,
    verdict=_VERDICTS,
    judgements=st.lists(_judgements(), max_size=2).map(tuple),
    duration_s=_FLOATS,
    replay=_TEXTS,
    failure=st.none() | st.sampled_from(list(Failure)),
    message=_TEXTS,
)
_STARTS = st.builds(
    CaseStarted, run_id=_NAMES, worker=_TEXTS, draw=st.integers(0, 1), seed=st.just(1)
)
_COMPILES = st.builds(
    CompileResult,
    subject=st.sampled_from(["mine", "other"]),
    kernel=_TEXTS,
    specialisation=_TEXTS,
    arch=_TEXTS,
    verdict=_VERDICTS,
    resources=st.none(),
    baseline=st.none(),
    message=_TEXTS,
)
_TESTS = st.builds(
    HostTestFinished,
    leg=_LEG_NAMES,
    test=_NAMES,
    verdict=_VERDICTS,
    duration_s=_FLOATS,
    message=_TEXTS,
    place=_TEXTS,
    detail=_TEXTS,
    output=_TEXTS,
)
_COLLECTED = st.builds(HostTestsCollected, leg=_LEG_NAMES, tests=st.lists(_NAMES).map(tuple))
_STARTED_LEGS = st.builds(LegStarted, name=_LEG_NAMES)
_ENDED_LEGS = st.builds(
    LegFinished,
    name=_LEG_NAMES,
    verdict=_VERDICTS,
    exit_code=st.sampled_from([-9, 0, 1, 2, 3, 4, 5]),
    duration_s=_FLOATS,
    log_path=_TEXTS,
    message=_TEXTS,
)


@st.composite
def _plans(draw: st.DrawFn) -> RunStarted:
    expected = []
    for subject, site in draw(st.sets(st.sampled_from([("mine", "s"), ("other", "s")]))):
        names = draw(st.sets(_NAMES, max_size=3))
        leg = draw(_LEG_NAMES)
        expected.append(
            Expected(
                leg=leg, subject=subject, site=site, count=len(names), run_ids=tuple(sorted(names))
            )
        )
    if draw(st.booleans()):
        count = draw(st.integers(0, 3))
        expected.append(Expected(leg="compile", subject="mine", site="compile", count=count))
    return RunStarted(
        run="r",
        started_at=draw(_TEXTS),
        tier=Tier.SMOKE,
        subjects=("mine",),
        legs=tuple(draw(st.sets(st.sampled_from(_LEGS)))),
        expected=tuple(expected),
        skipped=tuple(
            Skipped(run_id=name, subject="mine", site="s", reason=draw(_TEXTS))
            for name in draw(st.sets(_NAMES, max_size=1))
        ),
        draws=draw(st.sampled_from([(), (0,), (0, 1)])),
    )


_EVENTS = st.one_of(_CASES, _STARTS, _COMPILES, _TESTS, _COLLECTED, _STARTED_LEGS, _ENDED_LEGS)


@st.composite
def _summaries(draw: st.DrawFn) -> Summary:
    events: list[Event] = draw(st.lists(_EVENTS, max_size=6))
    if draw(st.booleans()):
        events += [draw(_plans()), _END]
    problems = draw(st.lists(_TEXTS, max_size=1))
    return summarize(EventLog(tuple(events)), problems=problems)


@st.composite
def _good_summaries(draw: st.DrawFn) -> Summary:
    """Runs that pass but for at most one event."""
    names = ("mine.s.a", "mine.s.b")
    row = Expected(leg="cases", subject="mine", site="s", count=2, run_ids=names)
    plan = RunStarted(
        run="r",
        started_at="",
        tier=Tier.SMOKE,
        subjects=("mine",),
        legs=("cases", "host"),
        expected=(row,),
    )
    passed = Judgement(OracleName.EXACT, Verdict.PASS)
    cases = [
        CaseFinished(
            run_id=name,
            subject=draw(st.sampled_from(["mine", "mine", "mine", "other"])),
            site="s",
            draw=0,
            seed=1,
            worker="",
            verdict=Verdict.PASS,
            judgements=(passed,),
            duration_s=1.0,
            replay="",
        )
        for name in names
    ]
    legs = [_ended("cases", Verdict.PASS), _ended("host", Verdict.PASS)]
    skipped = _test(Verdict.SKIP, test="skipped")
    events: list[Event] = [plan, *cases, _test(Verdict.PASS), skipped, *legs, _END]
    if draw(st.booleans()):
        events[draw(st.integers(0, len(events) - 1))] = draw(_EVENTS)
    return summarize(EventLog(tuple(events)))


@settings(max_examples=300)
@given(summary=_summaries() | _good_summaries())
def test_the_document_is_red_exactly_if_the_run_did_not_pass(summary: Summary) -> None:
    root = ElementTree.fromstring(render_junit(summary))
    red = int(root.attrib["failures"]) + int(root.attrib["errors"])
    assert (red > 0) == (summary.verdict is not Verdict.PASS)
    assert len(_red(root)) == red


@pytest.mark.parametrize("seconds", [(1e308, 1e308), (float("inf"), float("-inf"))])
def test_durations_that_have_no_sum_leave_the_document_readable(
    plan: Plan, seconds: tuple[float, float]
) -> None:
    tests = [
        _test(Verdict.PASS, test=f"test_a.py::test_{index}", duration_s=duration)
        for index, duration in enumerate(seconds)
    ]
    (suite,) = [
        suite
        for suite in _document(plan(legs=("host",)), *tests, _ended("host", Verdict.PASS), _END)
        if suite.get("name") == "host"
    ]
    assert suite.get("time") == "0.000"


@settings(max_examples=200)
@given(summary=_summaries())
def test_the_document_is_what_readers_of_the_format_expect(summary: Summary) -> None:
    root = ElementTree.fromstring(render_junit(summary))
    assert root.attrib.keys() == {"name", "tests", "failures", "errors"}
    for suite in root:
        counts = {"tests", "failures", "errors", "skipped"}
        assert suite.tag == "testsuite"
        assert (
            {"name", "time", *counts}
            <= suite.attrib.keys()
            <= {
                *("name", "time", "timestamp"),
                *counts,
            }
        )
        assert all(re.fullmatch(r"\d+", suite.attrib[name]) for name in counts)
        for case in suite:
            _check_case(case)
    for node in root.iter():
        for value in node.attrib.values():
            assert value.isprintable()
        assert all(line.isprintable() for line in re.split("[\n\t]", node.text or ""))


def _check_case(case: ElementTree.Element) -> None:
    assert case.tag == "testcase"
    assert case.attrib.keys() == {"classname", "name", "time"}
    assert re.fullmatch(r"\d+\.\d{3}", case.attrib["time"])
    tags = " ".join(child.tag for child in case)
    assert re.fullmatch(r"(properties)? ?(failure|error|skipped)? ?(system-out)?", tags)
    for child in case:
        if child.tag in ("failure", "error"):
            assert child.attrib.keys() == {"message", "type"}
        elif child.tag == "skipped":
            assert child.attrib.keys() == {"message"}
            assert not child.text
        elif child.tag == "properties":
            assert all(entry.attrib.keys() == {"name", "value"} for entry in child)
            assert all(entry.tag == "property" for entry in child)
