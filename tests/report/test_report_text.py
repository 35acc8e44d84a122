"""Names and messages of a run: they are shown in every report, and act in none."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loragate.core.clipped import clipped
from loragate.core.plural import counted
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.events.log import EventLog
from loragate.events.model import (
    CaseFinished,
    CompileResult,
    Event,
    Expected,
    HostTestFinished,
    LegFinished,
    LegStarted,
    Note,
    RunStarted,
    Skipped,
)
from loragate.report.evidence import render_evidence
from loragate.report.html import render_html
from loragate.report.junit import render_junit
from loragate.report.progress import Liveness, Progress
from loragate.report.step_summary import render_step_summary
from loragate.report.summary import Summary, summarize
from loragate.report.terminal import Colour, render_summary
from loragate.report.text import headline, one_line, printable, without_commands

Plan = Callable[..., RunStarted]
Finished = Callable[..., CaseFinished]
Closing = tuple[Event, ...]

# every class of characters that acts or hides, the way it is shown
_SHOWN = {
    "\x00": "\\x00",
    "\x1b": "\\x1b",
    "\n": "\\n",
    "\t": "\\t",
    "\r": "\\r",
    "\x7f": "\\x7f",
    "\x9b": "\\x9b",
    "\xad": "\\xad",
    "\u200b": "\\u200b",
    "\u202e": "\\u202e",
    "\u2028": "\\u2028",
    "\u2066": "\\u2066",
    "\ufeff": "\\ufeff",
    "\udc80": "\\udc80",
    "\ufffe": "\\ufffe",
    "\U000e0041": "\\U000e0041",
}
_NAME = "".join(f"a{character}" for character in _SHOWN)
_NAME_SHOWN = "".join(f"a{shown}" for shown in _SHOWN.values())
_COMMANDS = "all is well\n::error::x\n \t::set-output name=a::b\n##[error]c ##vso[task.d]\n"


@pytest.fixture
def hostile(plan: Plan, closing: Closing) -> Callable[[str], Summary]:
    """A run in which every name and message is the given text."""

    def make(text: str) -> Summary:
        wrong = Judgement(
            OracleName.EXACT, Verdict.FAIL, Failure.WRONG_ANSWER, text, {text: 1.0}, {text: text}
        )
        case = CaseFinished(
            run_id=f"{text}.{text}.{text}",
            subject=text,
            site=text,
            draw=0,
            seed=7,
            worker=text,
            gpu=text,
            verdict=Verdict.FAIL,
            judgements=(wrong,),
            duration_s=1.0,
            replay=text,
            message=text,
        )
        kernel = CompileResult(
            subject=text,
            kernel=text,
            specialisation=text,
            arch=text,
            verdict=Verdict.FAIL,
            message=text,
        )
        test = HostTestFinished(
            leg=text,
            test=text,
            verdict=Verdict.FAIL,
            duration_s=1.0,
            message=text,
            place=text,
            detail=text,
            output=text,
        )
        leg = LegFinished(
            name=text, verdict=Verdict.FAIL, exit_code=1, duration_s=1, log_path=text, message=text
        )
        missing = Expected(leg=text, subject=text, site=text, count=1, run_ids=(f"gone {text}",))
        started = plan(
            expected=(missing,),
            subjects=(text,),
            skipped=(Skipped(run_id=text, subject=text, site=text, reason=text),),
            machine={text: text},
            versions={text: text},
            commit=text,
        )
        events = (started, case, kernel, test, leg, Note(text=text), *closing)
        return summarize(EventLog(events), problems=[text])

    return make


def test_a_name_is_one_line_with_an_escape_for_what_cannot_be_seen() -> None:
    assert one_line(_NAME) == _NAME_SHOWN
    assert one_line("rank 16, größe 漢字 😀") == "rank 16, größe 漢字 😀"


def test_a_message_keeps_its_lines_and_loses_its_colours() -> None:
    coloured = "\x1b[1;31merror\x1b[0m: \x1b[2Kx\r\n\tnext\rover"
    assert printable(coloured) == "error: \\x1b[2Kx\n\tnext\\rover"
    assert headline("\n \n  first\tline \nsecond") == "first\\tline"


@given(text=st.text())
def test_shown_text_cannot_act(text: str) -> None:
    assert one_line(text).isprintable()
    assert all(line.isprintable() for line in re.split("[\n\t]", printable(text)))
    assert headline(text).isprintable()


def test_no_line_is_a_command_to_a_ci_system() -> None:
    lines = without_commands(_COMMANDS).splitlines()
    assert lines[:3] == ["all is well", "\\::error::x", " \t\\::set-output name=a::b"]
    assert lines[3] == "##\\[error]c ##\\vso[task.d]"
    assert without_commands("a ::b torch::c ## d") == "a ::b torch::c ## d"


def test_what_is_cut_out_of_a_text_is_counted() -> None:
    assert clipped("0123456789", 10) == "0123456789"
    assert clipped("0123456789", 4) == "01\n... 6 characters left out ...\n89"


def test_a_count_of_one_has_no_plural() -> None:
    assert [counted(n, "row") for n in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
    assert counted(1, "row is", "rows are") == "1 row is"


def test_every_report_shows_hostile_names_as_escapes(hostile: Callable[[str], Summary]) -> None:
    summary = hostile(_NAME)
    reports = {
        "terminal": render_summary(summary, Colour.OFF),
        "html": render_html(summary),
        "junit": render_junit(summary),
        "step": render_step_summary(summary, Path(_NAME)),
    }
    for kind, text in reports.items():
        assert "a\\u202ea" in text, kind
        # tabs and line ends are the report's own, or those of a message that has several lines
        acting = [c for c in _SHOWN if c not in "\n\t" and c in text]
        assert acting == [], kind


@pytest.mark.parametrize("character", ["\n", "\t"])
def test_a_name_with_a_line_end_or_a_tab_stays_on_its_line(
    hostile: Callable[[str], Summary], plan: Plan, closing: Closing, character: str
) -> None:
    name, shown = f"one{character}two", one_line(f"one{character}two")
    test = HostTestFinished(leg="host", test=name, verdict=Verdict.FAIL, duration_s=1.0)
    case = {"subject": name, "site": name, "draw": 0, "seed": 7, "worker": "", "judgements": ()}
    crashed = CaseFinished(
        run_id=name,
        verdict=Verdict.FAIL,
        failure=Failure.CRASH,
        duration_s=1.0,
        replay=name,
        **case,
    )
    summary = summarize(EventLog((plan(), test, crashed, *closing)))
    document = render_junit(summary)
    for text in (
        render_summary(summary, Colour.OFF),
        render_html(summary),
        document,
        render_step_summary(summary, Path("report")),
        render_evidence(crashed),
    ):
        assert shown in text
        assert name not in text
    for node in ElementTree.fromstring(document).iter():
        assert not any(character in value for value in node.attrib.values())


@pytest.mark.parametrize("colour", list(Colour))
def test_nothing_that_is_printed_is_a_command_to_a_ci_system(
    hostile: Callable[[str], Summary], finished: Finished, colour: Colour
) -> None:
    summary = hostile(_COMMANDS)
    progress = Progress(colour, Liveness.LOG)
    live = [
        progress.feed(event)
        for event in (
            LegStarted(name=_COMMANDS),
            finished(_COMMANDS, Verdict.FAIL),
            summary.host_tests[0],
            *(leg.finished for leg in summary.legs if leg.finished),
        )
    ]
    (case,) = [case.shown for case in summary.cases if case.shown]
    for text in (render_summary(summary, colour), render_evidence(case), *live):
        for line in re.split(r"[\n\r]", text):
            assert not line.lstrip().startswith("::"), text
            assert not re.search(r"##\w*\[", line), text
