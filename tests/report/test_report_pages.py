"""The reports themselves: terminal, JUnit XML, HTML, and the files that they are written to."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from loragate.core.files import write_atomically
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.events.log import EventLog, EventWriter
from loragate.events.model import (
    CaseFinished,
    Event,
    LegFinished,
    LegStarted,
    RunFinished,
    RunStarted,
    Skipped,
)
from loragate.report.heatmap import bands
from loragate.report.html import render_html
from loragate.report.junit import render_junit
from loragate.report.progress import Liveness, Progress
from loragate.report.summary import Summary, summarize
from loragate.report.terminal import Colour, colour_for, render_summary
from loragate.report.wording import duration, multiple, place, ratio
from loragate.report.write import write_report

Plan = Callable[..., RunStarted]
Finished = Callable[..., CaseFinished]
Closing = tuple[Event, ...]

_FAR = Judgement(
    OracleName.REFERENCE,
    Verdict.FAIL,
    Failure.WRONG_ANSWER,
    "row 3 is zero",
    {"err": 0.5, "threshold": 0.125, "wrong_rows": 1},
    {"token": 3, "slot": 7},
)
_HOSTILE = "<script>alert(1)</script><img src=https://evil.example/x>\x1b[31m\x00\"'&"


@pytest.fixture
def example(example_run: EventLog) -> Summary:
    return summarize(example_run)


@pytest.fixture
def hostile(plan: Plan, finished: Finished, closing: Closing) -> Summary:
    """A run in which every text that comes from outside tries to get out of its place."""
    bad = Judgement(
        OracleName.EXACT,
        Verdict.FAIL,
        Failure.WRONG_ANSWER,
        _HOSTILE,
        {_HOSTILE: 1.0},
        {_HOSTILE: _HOSTILE},
    )
    owned = {"judgements": (bad,), "worker": _HOSTILE, "replay": _HOSTILE, "gpu": _HOSTILE}
    skipped = Skipped(run_id=_HOSTILE, subject="mine", site="dense_delta", reason=_HOSTILE)
    started = plan(_HOSTILE, "gone" + _HOSTILE, skipped=(skipped,), machine={_HOSTILE: _HOSTILE})
    leg = LegFinished(
        name=_HOSTILE,
        verdict=Verdict.FAIL,
        exit_code=1,
        duration_s=1,
        log_path=f"javascript:{_HOSTILE}",
        message=_HOSTILE,
    )
    events = (started, finished(_HOSTILE, Verdict.FAIL, **owned), leg, *closing)
    return summarize(EventLog(events))


def test_the_terminal_shows_evidence_place_and_the_replay_command(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    wrong = finished("mine.a", Verdict.FAIL, judgements=(_FAR,))
    text = render_summary(summarize(EventLog((plan("mine.a"), wrong, *closing))), Colour.OFF)
    assert text.splitlines()[:4] == [
        "FAIL  mine.a  wrong_answer",
        "  reference: fail wrong_answer: error 0.5, threshold 0.125 (4x), wrong_rows 1; "
        "slot 7, token 3",
        "    row 3 is zero",
        "  replay  loragate replay mine.a --draw 0",
    ]


def test_the_terminal_names_what_never_started(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    events = (plan("mine.a", "mine.gone"), finished("mine.a"), *closing)
    text = render_summary(summarize(EventLog(events)), Colour.OFF)
    assert "planned, but never started:\n  mine.gone\n" in text


def test_judgements_that_differ_in_a_figure_alone_are_shown_apart(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    judgements = [
        Judgement(name, Verdict.FAIL, Failure.RACE, "two writers", {"writes": count})
        for name, count in ((OracleName.RACE, 2.0), (OracleName.SCHEDULE, 3.0))
    ]
    wrong = finished("mine.a", Verdict.FAIL, judgements=tuple(judgements))
    summary = summarize(EventLog((plan("mine.a"), wrong, *closing)))
    for report in (render_summary(summary, Colour.OFF), render_html(summary)):
        assert re.search("writes.*2.*writes.*3", report, re.DOTALL)


def test_the_terminal_ends_with_what_the_exit_code_means(example: Summary) -> None:
    closing = render_summary(example, Colour.OFF).split("\n\n")[-1].splitlines()
    assert closing[0] == "FAIL in 1 min 15 s: a result is not what it must be (exit 1)"
    assert closing[1] == "  2 cases wrong"


def test_the_terminal_shows_expected_beside_executed_for_every_site(example: Summary) -> None:
    text = render_summary(example, Colour.OFF)
    assert re.search(r"^our_fork/dense_delta +36 +34 +32 +0 +2 +0 +1 +12$", text, re.MULTILINE)
    assert re.search(r"^total +120 +118 +116 +0 +2 +0 +1 +12$", text, re.MULTILINE)


def test_without_colour_there_is_no_escape_sequence(hostile: Summary, example: Summary) -> None:
    assert "\x1b" not in render_summary(example, Colour.OFF)
    assert "\x1b" in render_summary(example, Colour.ON)
    assert "\x1b[31m" in _HOSTILE
    assert not re.search(r"[\x00-\x08\x1b]", render_summary(hostile, Colour.OFF))


@pytest.mark.parametrize(
    ("tty", "environ", "expected"),
    [
        (True, {}, Colour.ON),
        (True, {"NO_COLOR": "1"}, Colour.OFF),
        # no-color.org: an empty value asks for nothing
        (True, {"NO_COLOR": ""}, Colour.ON),
        (True, {"TERM": "dumb"}, Colour.OFF),
        (False, {}, Colour.OFF),
    ],
)
def test_colour_needs_a_terminal_and_no_objection(
    tty: bool, environ: dict[str, str], expected: Colour
) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: tty  # type: ignore[method-assign]
    assert colour_for(stream, environ) is expected


def test_progress_in_a_log_shows_trouble_at_once_and_counts_in_tenths(
    plan: Plan, finished: Finished
) -> None:
    progress = Progress(Colour.OFF, Liveness.LOG)
    names = [f"mine.{number:02}" for number in range(20)]
    events: list[Event] = [plan(*names), LegStarted(name="kernels")]
    events += [finished(name) for name in names[:4]]
    events += [finished(names[4], Verdict.FAIL, judgements=(_FAR,))]
    text = "".join(map(progress.feed, events))
    assert text.splitlines() == ["kernels ...", "2/20 cases", "4/20 cases", "FAIL  mine.04"]


def test_progress_on_a_terminal_rewrites_one_line(plan: Plan, finished: Finished) -> None:
    progress = Progress(Colour.OFF, Liveness.TERMINAL)
    progress.feed(plan("mine.a", "mine.b"))
    assert progress.feed(finished("mine.a")) == "\r\x1b[2K1/2 cases"


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"err": 1.0, "threshold": 4.0}, 0.25),
        ({"err": 0.0, "threshold": 0.0}, 0.0),
        ({"err": 1e-30, "threshold": 0.0}, float("inf")),
        ({"err": float("nan"), "threshold": 1.0}, float("inf")),
        ({"err": 1.0}, None),
        ({"err": 0.1, "threshold": 0.2, "ratio": 3.0}, 3.0),
        ({"ratio": float("nan")}, float("inf")),
    ],
)
def test_the_ratio_of_an_error_is_infinite_rather_than_undefined(
    metrics: dict[str, float], expected: float | None
) -> None:
    assert ratio(Judgement(OracleName.EXACT, Verdict.PASS, metrics=metrics)) == expected


def test_a_place_is_given_from_the_outside_in() -> None:
    where = {"warp": 2, "column": 9, "token": 3, "slot": 1}
    judgement = Judgement(OracleName.EXACT, Verdict.PASS, where=where)
    assert place(judgement) == "slot 1, token 3, column 9, warp 2"


def test_figures_are_rounded_for_readers() -> None:
    assert [duration(t) for t in (0.0123, 1.26, 59.94, 59.96, 7384)] == [
        "12 ms",
        "1.3 s",
        "59.9 s",
        "1 min 00 s",
        "2 h 03 min",
    ]
    assert [multiple(r) for r in (0.0424, 3.14, 76.4, 2e6, float("inf"))] == [
        "0.042x",
        "3.1x",
        "76x",
        "2e+06x",
        "inf",
    ]


@pytest.mark.parametrize("seconds", [float("inf"), float("nan")])
def test_a_duration_that_is_no_number_costs_no_page(
    plan: Plan, finished: Finished, tmp_path: Path, seconds: float
) -> None:
    events = [
        plan("mine.a"),
        finished("mine.a", Verdict.INCONCLUSIVE, duration_s=seconds),
        LegFinished(name="kernels", verdict=Verdict.PASS, exit_code=0, duration_s=seconds),
        RunFinished(finished_at="2026-11-21T04:15:40+00:00", duration_s=seconds),
    ]
    with EventWriter(tmp_path / "events.jsonl", run="r") as writer:
        for event in events:
            writer.write(event)
    summary = write_report(tmp_path / "events.jsonl", tmp_path)
    assert f"INCONCLUSIVE in {seconds} s: " in render_summary(summary, Colour.OFF)
    assert f"{seconds} s" in (tmp_path / "index.html").read_text()


def test_junit_counts_agree_with_its_elements_and_with_the_summary(example: Summary) -> None:
    root = ElementTree.fromstring(render_junit(example))
    for node in (root, *root.iter("testsuite")):
        assert int(node.attrib["tests"]) == len(list(node.iter("testcase")))
        assert int(node.attrib["failures"]) == len(list(node.iter("failure")))
        assert int(node.attrib["errors"]) == len(list(node.iter("error")))
    for node in root.iter("testsuite"):
        assert int(node.attrib["skipped"]) == len(list(node.iter("skipped")))
    cases = root.find("testsuite[@name='our_fork.dense_delta']")
    assert cases is not None
    count = next(c for c in example.counts if (c.subject, c.site) == ("our_fork", "dense_delta"))
    assert int(cases.attrib["failures"]) == count.failed
    # the case that ran out of memory and the one that never started
    assert int(cases.attrib["errors"]) == 2
    assert int(cases.attrib["skipped"]) == count.skipped
    assert int(cases.attrib["tests"]) == count.expected + count.skipped


def test_junit_names_verdict_seed_draw_repeat_and_subject(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    wrong = finished("mine.dense_delta.rank-4", Verdict.FAIL, judgements=(_FAR,), draw=3)
    summary = summarize(EventLog((plan("mine.dense_delta.rank-4"), wrong, *closing)))
    root = ElementTree.fromstring(render_junit(summary))
    case = root.find(".//testcase[@name='rank-4']")
    assert case is not None
    properties = {p.attrib["name"]: p.attrib["value"] for p in case.iter("property")}
    expected = {"verdict": "fail", "seed": "7", "draw": "3", "repeat": "0"}
    expected |= {"subject": "mine", "worker": "gw0"}
    assert properties == expected
    failure = case.find("failure")
    assert failure is not None
    assert failure.attrib["type"] == "wrong_answer"
    assert failure.attrib["message"] == (
        "wrong_answer; slot 7, token 3; error 0.5, threshold 0.125 (4x), wrong_rows 1; "
        "row 3 is zero"
    )
    assert "replay: loragate replay" in (failure.text or "")


def test_junit_is_well_formed_whatever_a_message_holds(hostile: Summary) -> None:
    root = ElementTree.fromstring(render_junit(hostile))
    assert any("<script>" in node.attrib["message"] for node in root.iter("failure"))


class _Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_asks_the_network_for_nothing(example: Summary, hostile: Summary) -> None:
    for page in (render_html(example), render_html(hostile)):
        for tag, attributes in _Tags(page).tags:
            assert tag not in ("iframe", "object", "embed", "img", "audio", "video")
            for name in ("src", "href", "action", "srcset", "xlink:href"):
                target = attributes.get(name) or ""
                assert re.match(r"(#|data:,$|[\w.%-]+(/|$)|$)", target), (tag, name, target)
                assert ":" not in target.removeprefix("data:"), (tag, name, target)
        style = page.split("<style>")[1].split("</style>")[0]
        assert "url(" not in style
        assert "@import" not in style


def test_the_page_escapes_hostile_text(hostile: Summary) -> None:
    page = render_html(hostile)
    tags = [tag for tag, _ in _Tags(page).tags]
    assert tags.count("script") == 1
    assert "img" not in tags
    assert page.count("alert(1)") == page.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 10


def test_the_page_names_every_trouble_with_its_place_and_replay_command(example: Summary) -> None:
    page = render_html(example)
    assert len(example.troubles) == 3
    for case in example.troubles:
        assert f'id="case-{case.run_id}"' in page
        assert f"<code>{case.replay}</code>" in page
    assert "slot 7, token 31, slice 1, column 9216" in page
    assert page.index('id="failures"') < page.index('id="map"') < page.index('id="counts"')


def test_the_page_shows_counts_growth_skips_and_environment(example: Summary) -> None:
    page = render_html(example)
    assert "<strong>118</strong> of 120 executed" in page
    assert '104<em class="grew">+24</em>' in page
    assert "our_fork: execution graph is not supported" in page
    assert "8586ae0d6e4f + local changes" in page


def test_one_defect_that_shows_in_many_cases_does_not_hide_another(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    names = [f"mine.{number:02}" for number in range(40)]
    stale = Judgement(OracleName.SEQUENCE, Verdict.FAIL, Failure.STALE_STATE, "old ranks live on")
    many = [finished(name, Verdict.FAIL, judgements=(stale,)) for name in names[:39]]
    last = finished(names[39], Verdict.FAIL, judgements=(_FAR,))
    summary = summarize(EventLog((plan(*names), *many, last, *closing)))
    text = render_summary(summary, Colour.OFF)
    assert "... and 37 more of mine/dense_delta: stale_state, reported by sequence" in text
    assert "FAIL  mine.39  wrong_answer" in text
    page = render_html(summary)
    assert "37 more like this: mine dense_delta, stale state" in page
    assert all(f'id="case-{name}"' in page for name in names)


def test_an_exception_that_stops_every_oracle_is_shown_once(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    judgements = tuple(
        Judgement(name, Verdict.FAIL, Failure.EXCEPTION, f"ValueError: no\n  stack of {name}")
        for name in (OracleName.EXACT, OracleName.CANARY)
    )
    case = finished("mine.a", Verdict.FAIL, judgements=judgements)
    summary = summarize(EventLog((plan("mine.a"), case, *closing)))
    for report in (render_summary(summary, Colour.OFF), render_html(summary)):
        assert report.count("ValueError: no") == 1
        assert "exact, canary" in report


def test_a_page_can_be_made_of_a_run_that_never_got_anywhere() -> None:
    assert "Incomplete" in render_html(summarize(EventLog(())))


def test_templates_are_found_as_package_data() -> None:
    names = {path.name for path in files("loragate.report").joinpath("templates").iterdir()}
    assert {"index.html.j2", "parts.html.j2", "style.css", "script.js"} <= names


def test_the_heat_map_has_one_column_for_every_planned_case(example: Summary) -> None:
    found = {(b.subject, b.site): sum(len(s.columns) for s in b.strips) for b in bands(example)}
    assert found == {
        ("lorakernels", "dense_delta"): 48,
        ("lorakernels", "lora_linear"): 12,
        ("our_fork", "dense_delta"): 36,
    }


def test_the_heat_map_leads_to_each_case_that_the_page_shows_on_its_own(
    example: Summary,
) -> None:
    strips = [strip for band in bands(example) for strip in band.strips]
    linked = {column.run_id for strip in strips for column in strip.columns if column.linked}
    assert {case.verdict for case in example.troubles} > {Verdict.FAIL}
    assert linked == {case.run_id for case in (*example.troubles, *example.known)}


def test_the_heat_map_breaks_many_cases_into_strips_that_fit(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    names = [f"mine.{number:04}" for number in range(250)]
    events = (plan(*names), *map(finished, names), *closing)
    (band,) = bands(summarize(EventLog(events)))
    assert [len(strip.columns) for strip in band.strips] == [98, 98, 54]
    assert max(strip.width for strip in band.strips) <= 1076


@pytest.mark.parametrize(
    ("verdict", "metrics", "tone"),
    [
        (Verdict.PASS, {}, "calm0"),
        (Verdict.PASS, {"err": 0.0, "threshold": 0.0}, "calm0"),
        (Verdict.PASS, {"err": 0.3, "threshold": 1.0}, "calm2"),
        (Verdict.PASS, {"err": 1.0, "threshold": 1.0}, "calm4"),
        (Verdict.FAIL, {"err": 1.1, "threshold": 1.0}, "alarm0"),
        (Verdict.FAIL, {"err": 9.0, "threshold": 1.0}, "alarm1"),
        (Verdict.FAIL, {"err": float("nan"), "threshold": 1.0}, "alarm2"),
        (Verdict.FAIL, {}, "alarm2"),
        (Verdict.INCONCLUSIVE, {"err": 9.0, "threshold": 1.0}, "inconclusive"),
    ],
)
def test_the_shade_of_a_cell_grows_with_error_over_threshold(
    plan: Plan,
    finished: Finished,
    verdict: Verdict,
    metrics: dict[str, float],
    tone: str,
) -> None:
    failure = Failure.WRONG_ANSWER if verdict is Verdict.FAIL else None
    judgement = Judgement(OracleName.REFERENCE, verdict, failure, metrics=metrics)
    events = (plan("mine.a"), finished("mine.a", verdict, judgements=(judgement,)))
    (band,) = bands(summarize(EventLog(events)))
    assert [cell.tone for cell in band.strips[0].columns[0].cells] == [tone]


def test_a_case_without_a_judgement_colours_its_whole_column(
    plan: Plan, finished: Finished
) -> None:
    hang = finished("mine.a", Verdict.FAIL, judgements=(), failure=Failure.HANG)
    events = (plan("mine.a", "mine.b", "mine.c"), hang, finished("mine.b"))
    (band,) = bands(summarize(EventLog(events)))
    tones = [{cell.tone for cell in column.cells} for column in band.strips[0].columns]
    assert tones == [{"alarm2"}, {"calm0"}, {"missing"}]


def test_a_report_is_written_from_its_events_alone(tmp_path: Path, example_run: EventLog) -> None:
    events = tmp_path / "events.jsonl"
    with EventWriter(events, run="20261121-041530-712") as writer:
        for event in example_run.events:
            writer.write(event)
    summary = write_report(events, tmp_path / "out")
    assert summary == summarize(example_run)
    assert (tmp_path / "out" / "index.html").read_text(encoding="utf-8") == render_html(summary)
    assert (tmp_path / "out" / "junit.xml").read_text(encoding="utf-8") == render_junit(summary)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["index.html", "junit.xml"]


def test_a_failed_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "junit.xml"
    write_atomically(target, "old")

    def refuse(*_: object) -> None:
        raise OSError("disk is full")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="disk is full"):
        write_atomically(target, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["junit.xml"]
    assert target.read_text() == "old"


def test_text_that_utf8_cannot_hold_is_still_written(tmp_path: Path) -> None:
    write_atomically(tmp_path / "x", "a\udc80b")
    assert (tmp_path / "x").read_text() == "a\\udc80b"
