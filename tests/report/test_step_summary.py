"""The page for GitHub Actions: Markdown that no name can break, appended within GitHub's limit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.events.log import EventLog
from loragate.events.model import (
    CaseFinished,
    CompileResult,
    Event,
    HostTestFinished,
    Note,
    RunStarted,
)
from loragate.report.step_summary import cell, code, cut_to, render_step_summary
from loragate.report.summary import Summary, summarize
from loragate.report.text import one_line
from loragate.report.write import append_step_summary

Plan = Callable[..., RunStarted]
Finished = Callable[..., CaseFinished]
Closing = tuple[Event, ...]

_LIMIT = 1024 * 1024
_WRONG = Judgement(
    OracleName.EXACT,
    Verdict.FAIL,
    Failure.WRONG_ANSWER,
    "2 elements differ",
    {"differing": 2.0},
    {"slot": 7, "token": 31},
)
_HOSTILE = (
    "a|b`c``d <i>e</i> [f](http://g) ![h](i) @all #1 *j* _k_ &amp; \\| \u202e\n# l\n- m\n```\nn"
)


@pytest.fixture
def summary(plan: Plan, finished: Finished, closing: Closing) -> Summary:
    """A run with one of everything that the page shows."""
    wrong = finished("mine.dense_delta.a", Verdict.FAIL, judgements=(_WRONG,))
    test = HostTestFinished(
        leg="host",
        test="test_a.py::test_b",
        verdict=Verdict.FAIL,
        duration_s=1.0,
        message="AssertionError: no",
        place="test_a.py:7",
    )
    kernel = CompileResult(
        subject="mine",
        kernel="expand",
        specialisation="rank-16",
        arch="sm_90",
        verdict=Verdict.FAIL,
        message="24 registers more",
    )
    started = plan("mine.dense_delta.a", "mine.dense_delta.gone")
    note = Note(text="host tests: 1 executed, 0 skipped")
    return summarize(EventLog((started, wrong, test, kernel, note, *closing)))


def _tokens(page: str) -> list[Token]:
    found = MarkdownIt("commonmark").enable("table").parse(page)
    return [inner for token in found for inner in (token, *(token.children or ()))]


def test_the_page_says_what_is_wrong_where_and_how_to_run_it_again(summary: Summary) -> None:
    page = render_step_summary(summary, Path("report"))
    assert page.startswith(
        "## loragate: FAIL in 10.0 s\n\nA result is not what it must be (exit 1)."
    )
    for shown in (
        "- ` 1 case wrong `\n",
        "| ` mine/dense_delta ` | 2 | 1 | 0 | 0 | 1 | 0 | 0 | 0 |\n",
        "- **FAIL** ` mine.dense_delta.a ` wrong answer\n"
        "  - exact: ` slot 7, token 31 `, ` differing 2 `, ` 2 elements differ `\n"
        "  - replay ` loragate replay mine.dense_delta.a --draw 0 `\n",
        "- **FAIL** ` test_a.py::test_b `\n  - ` AssertionError: no `\n  - at ` test_a.py:7 `\n"
        "  - rerun ` python -m pytest test_a.py::test_b `\n",
        "- **FAIL** ` expand (rank-16) for sm_90 `\n  - ` 24 registers more `\n",
        "### Planned, but never started (1)\n\n- ` mine.dense_delta.gone `\n",
        "- ` host tests: 1 executed, 0 skipped `\n",
    ):
        assert shown in page
    assert page.endswith("\nReport: ` report `\n")


def test_a_kernel_that_could_not_be_compiled_is_among_those_that_did_not_pass(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    kernel = CompileResult(
        subject="mine",
        kernel="expand",
        specialisation="rank-16",
        arch="sm_90",
        verdict=Verdict.INFRA,
        message="no ptxas",
    )
    summary = summarize(EventLog((plan("mine.a"), finished("mine.a"), kernel, *closing)))
    page = render_step_summary(summary, Path("report"))
    assert "- **INFRA** ` expand (rank-16) for sm_90 `\n  - ` no ptxas `\n" in page


def test_many_failures_are_shortened_to_a_number(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    names = [f"mine.dense_delta.{number:03}" for number in range(100)]
    cases = (finished(name, Verdict.FAIL, judgements=(_WRONG,)) for name in names)
    summary = summarize(EventLog((plan(*names), *cases, *closing)))
    page = render_step_summary(summary, Path("report"))
    assert "### Cases that did not pass (100)" in page
    assert page.count("**FAIL**") == 20
    assert "\n- ... and 80 more\n" in page


def test_names_cannot_break_the_page(plan: Plan, finished: Finished, closing: Closing) -> None:
    judgement = Judgement(
        OracleName.EXACT, Verdict.FAIL, Failure.WRONG_ANSWER, _HOSTILE, {}, {_HOSTILE: _HOSTILE}
    )
    owner = {"subject": _HOSTILE, "site": _HOSTILE, "replay": _HOSTILE}
    wrong = finished(_HOSTILE, Verdict.FAIL, judgements=(judgement,), **owner)
    test = HostTestFinished(
        leg="host",
        test=_HOSTILE,
        verdict=Verdict.FAIL,
        duration_s=1.0,
        message=_HOSTILE,
        place=_HOSTILE,
    )
    summary = summarize(EventLog((plan(), wrong, test, Note(text=_HOSTILE), *closing)))
    tokens = _tokens(render_step_summary(summary, Path(_HOSTILE)))
    acting = {"html_inline", "html_block", "link_open", "image", "em_open", "fence", "code_block"}
    assert not acting & {token.type for token in tokens}
    heads = (after for before, after in pairwise(tokens) if before.type == "heading_open")
    headings = [head.content for head in heads]
    assert headings == [
        *("loragate: FAIL in 10.0 s", "Cases that did not pass (1)"),
        *("Host tests that did not pass (1)", "Notes (1)"),
    ]
    rows = [token for token in tokens if token.type == "tr_open"]
    cells = [token for token in tokens if token.type in ("td_open", "th_open")]
    assert len(cells) == 9 * len(rows)
    shown = [token.content for token in tokens if token.type == "code_inline"]
    assert one_line(_HOSTILE) in shown
    outside = "".join(token.content for token in tokens if token.type == "text")
    assert not set("|`<>[@#\\") & set(outside)


@given(text=st.text(min_size=1, max_size=40) | st.text(alphabet="`| \\a", min_size=1, max_size=12))
def test_any_text_is_code_and_nothing_else(text: str) -> None:
    spans = [t for t in _tokens(f"- before {code(text)} after") if t.type == "code_inline"]
    assert [span.content.strip(" ") for span in spans] == [one_line(text).strip(" ")]
    table = _tokens(f"| a | b |\n|---|---|\n| {cell(text)} | {cell(text)} |\n")
    assert sum(token.type == "td_open" for token in table) == 2
    assert sum(token.type == "code_inline" for token in table) == 2


def test_a_page_that_is_too_long_is_cut_at_a_line_with_a_note() -> None:
    page = "\n".join(f"line {number} größer" for number in range(100))
    cut = cut_to(page, 500)
    assert len(cut.encode()) <= 500
    kept, _, note = cut.rpartition("\n\n")
    assert page.startswith(kept + "\n")
    assert note == "... the rest is cut off: the page would be too long.\n"
    assert cut_to(page, len(page.encode())) == page
    assert cut_to(page, 10) == ""


def test_the_page_is_appended_to_what_others_wrote(tmp_path: Path, summary: Summary) -> None:
    file = tmp_path / "summary.md"
    file.write_text("built in 3 s")
    environ = {"GITHUB_STEP_SUMMARY": str(file)}
    for _ in range(2):
        append_step_summary(summary, Path("report"), environ)
    text = file.read_text()
    assert text.startswith("built in 3 s\n\n## loragate: FAIL")
    assert text.count("## loragate: FAIL") == 2


def test_without_a_step_nothing_is_written(tmp_path: Path, summary: Summary, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    append_step_summary(summary, Path("report"), {})
    append_step_summary(summary, Path("report"), {"GITHUB_STEP_SUMMARY": ""})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("room", [0, 40, 400])
def test_a_step_never_gets_more_than_github_takes(
    tmp_path: Path, summary: Summary, capsys: pytest.CaptureFixture[str], room: int
) -> None:
    file = tmp_path / "summary.md"
    before = b"x" * (_LIMIT - room)
    file.write_bytes(before)
    append_step_summary(summary, Path("report"), {"GITHUB_STEP_SUMMARY": str(file)})
    after = file.read_bytes()
    assert after.startswith(before)
    assert len(after) <= _LIMIT
    problem = capsys.readouterr().err
    if room == 400:
        assert b"## loragate: FAIL" in after[len(before) :]
        assert after.endswith(b"the page would be too long.\n")
        assert not problem
    else:
        assert after == before
        assert problem.startswith("GITHUB_STEP_SUMMARY: ")
        assert problem.count("\n") == 1


@pytest.mark.parametrize("path", ["/dev/full", "missing/summary.md", "."])
def test_a_page_that_cannot_be_written_costs_one_line(
    tmp_path: Path, summary: Summary, capsys: pytest.CaptureFixture[str], monkeypatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    append_step_summary(summary, Path("report"), {"GITHUB_STEP_SUMMARY": path})
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert f"GITHUB_STEP_SUMMARY: {path}: no page was added: " in printed.err
    assert not printed.out
