"""Cases that fail as the ledger lists it are shown and pass; nothing else is excused."""

from __future__ import annotations

import json
import random
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loragate.core.verdict import ExitCode, Failure, Judgement, OracleName, Verdict
from loragate.events.log import EventLog, encode, read_events
from loragate.events.model import CaseFinished, CaseStarted, Event, KnownFinding, RunStarted
from loragate.findings.ledger import Finding, Kind, State
from loragate.findings.pattern import CasePattern, Limit, Place
from loragate.findings.rate import Rate
from loragate.report.html import render_html
from loragate.report.junit import render_junit
from loragate.report.progress import Liveness, Progress
from loragate.report.summary import Summary, summarize
from loragate.report.terminal import Colour, render_summary

Plan = Callable[..., RunStarted]
Finished = Callable[..., CaseFinished]
Closing = tuple[Event, ...]

RUN = "mine.dense_delta.rank-4"
LISTED = Judgement(OracleName.REFERENCE, Verdict.FAIL, Failure.WRONG_ANSWER, "row 3 is zero")
HELD = Judgement(OracleName.REFERENCE, Verdict.PASS)
STALE = Judgement(OracleName.SEQUENCE, Verdict.FAIL, Failure.STALE_STATE, "old ranks live on")
REPORTS = [lambda s: render_summary(s, Colour.OFF), render_junit, render_html]


def listed(version: str = "0.26.0", **changes: Any) -> KnownFinding:
    known: dict[str, Any] = {
        "id": "far-rows",
        "subject": "mine",
        "versions": ">=0.26,<0.27",
        "kind": Kind.DEFECT,
        "title": "Far rows are lost",
        "statement": "It is so.",
        "evidence": "1 is 2",
        "seen_on": "0.26.0, H200",
        "case": CasePattern(RUN, OracleName.REFERENCE, (Failure.WRONG_ANSWER,)),
    }
    return KnownFinding(finding=Finding(**known | changes), version=version)


@pytest.fixture
def judge(plan: Plan, finished: Finished, closing: Closing) -> Callable[..., Summary]:
    """A run of the listed case and of one that passes."""

    def make(
        *judgements: Judgement,
        entry: KnownFinding | None = None,
        also: Closing = (),
        **changes: Any,
    ) -> Summary:
        verdict = Verdict.FAIL if any(j.failure for j in judgements) else Verdict.PASS
        case = finished(RUN, changes.pop("verdict", verdict), judgements=judgements, **changes)
        events = (plan(RUN, "mine.b"), entry or listed(), case, finished("mine.b"), *also, *closing)
        return summarize(EventLog(events))

    return make


def test_a_case_that_fails_as_listed_is_known_executed_and_does_not_fail_the_run(
    judge: Callable[..., Summary],
) -> None:
    summary = judge(LISTED, Judgement(OracleName.CANARY, Verdict.PASS))
    assert (summary.exit_code, summary.reasons, summary.troubles) == (ExitCode.OK, (), ())
    total = summary.total
    assert (total.executed, total.passed, total.known, total.failed) == (2, 1, 1, 0)
    (case,) = summary.known
    assert [finding.id for finding in case.known] == ["far-rows"]
    assert [line.state for line in summary.ledger] == [State.KNOWN]


@pytest.mark.parametrize(
    "entry",
    [
        listed("0.27.0"),
        listed(""),
        listed(case=CasePattern("mine.other", OracleName.REFERENCE, (Failure.WRONG_ANSWER,))),
        listed(case=CasePattern(RUN, OracleName.EXACT, (Failure.WRONG_ANSWER,))),
        listed(case=CasePattern(RUN, OracleName.REFERENCE, (Failure.BASE_ROW_CHANGED,))),
    ],
    ids=["newer", "not installed", "other case", "other oracle", "other failure"],
)
def test_what_is_not_listed_exactly_fails(
    judge: Callable[..., Summary], entry: KnownFinding
) -> None:
    summary = judge(LISTED, entry=entry)
    assert (summary.exit_code, summary.total.known) == (ExitCode.WRONG, 0)


def test_another_oracle_that_fails_in_a_listed_case_fails_the_run(
    judge: Callable[..., Summary],
) -> None:
    summary = judge(LISTED, STALE)
    assert (summary.exit_code, summary.total.known) == (ExitCode.WRONG, 0)
    (case,) = summary.troubles
    assert (case.failure, case.message) == (Failure.STALE_STATE, "old ranks live on")
    assert "  known: far-rows: Far rows are lost" in render_summary(summary, Colour.OFF)


@pytest.mark.parametrize(
    ("rest", "changes", "expected"),
    [
        ((), {"failure": Failure.HANG, "message": "60 s"}, ExitCode.WRONG),
        (
            (Judgement(OracleName.EXACT, Verdict.INFRA, Failure.OUT_OF_MEMORY),),
            {},
            ExitCode.INFRASTRUCTURE,
        ),
        ((Judgement(OracleName.EXACT, Verdict.INCONCLUSIVE),), {}, ExitCode.INCOMPLETE),
    ],
)
def test_a_listed_failure_excuses_nothing_else_that_went_wrong(
    judge: Callable[..., Summary],
    rest: tuple[Judgement, ...],
    changes: dict[str, Any],
    expected: ExitCode,
) -> None:
    assert judge(LISTED, *rest, **changes).exit_code is expected


def test_a_listed_case_that_crashes_fails(judge: Callable[..., Summary]) -> None:
    start = CaseStarted(run_id=RUN, worker="gw0", draw=1, seed=9)
    assert judge(LISTED, also=(start,)).exit_code is ExitCode.WRONG


def test_draws_of_a_listed_case_that_never_started_are_not_said_to_follow_on_ones_that_passed(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    fails = finished(RUN, Verdict.FAIL, judgements=(LISTED,))
    summary = summarize(EventLog((plan(RUN, draws=(0, 1)), listed(), fails, *closing)))
    assert summary.exit_code is ExitCode.INCOMPLETE
    assert summary.troubles[0].message == "failed as listed, but never started: draw 1"


def test_a_listed_case_that_passes_is_a_failure_of_the_ledger(
    judge: Callable[..., Summary],
) -> None:
    summary = judge(HELD)
    assert (summary.exit_code, summary.total.passed) == (ExitCode.WRONG, 2)
    assert summary.reasons == (
        "finding far-rows stopped reproducing: remove it or narrow its version range, "
        "mine >=0.26,<0.27 (none of 1 draws shows it)",
    )


def test_a_listed_case_that_did_not_run_is_shown_and_not_judged(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    events = (plan("mine.b"), listed(), finished("mine.b"), *closing)
    summary = summarize(EventLog(events))
    assert (summary.exit_code, [line.state for line in summary.ledger]) == (
        ExitCode.OK,
        [State.NOT_TRIED],
    )
    for render in REPORTS[::2]:
        assert re.search("not run here.*far-rows", render(summary), re.DOTALL | re.IGNORECASE)


def test_the_draw_that_shows_a_finding_is_the_one_that_is_shown(
    judge: Callable[..., Summary], finished: Finished
) -> None:
    summary = judge(HELD, also=(finished(RUN, Verdict.FAIL, judgements=(LISTED,), draw=1),))
    assert summary.exit_code is ExitCode.OK
    (case,) = summary.known
    assert (case.shown and case.shown.draw, case.trials) == (1, 2)
    # none of them failed in another way
    assert case.bad_trials == ()


def test_each_subject_of_an_entry_must_show_it_in_its_own_cases(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    """What another subject shows neither excuses nor reproduces anything of this one."""
    both, other = listed(also=("theirs",)), RUN.replace("mine", "theirs")
    entries = tuple(replace(both, finding=both.finding.of(name)) for name in ("mine", "theirs"))
    fails = finished(RUN, Verdict.FAIL, judgements=(LISTED,))
    holds = finished(other, judgements=(HELD,))
    summary = summarize(EventLog((plan(RUN, other), *entries, fails, holds, *closing)))
    assert [(line.finding.subject, line.state) for line in summary.ledger] == [
        ("mine", State.KNOWN),
        ("theirs", State.STALE),
    ]
    assert summary.exit_code is ExitCode.WRONG
    as_listed = finished(other, Verdict.FAIL, judgements=(LISTED,))
    events = (plan(RUN, other), *entries, fails, as_listed, *closing)
    assert summarize(EventLog(events)).exit_code is ExitCode.OK
    # listed for one of them only
    events = (plan(RUN, other), entries[0], fails, as_listed, *closing)
    assert summarize(EventLog(events)).exit_code is ExitCode.WRONG


def test_each_finding_goes_by_the_version_of_its_own_package(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    other = listed(
        "0.27.0", id="another", case=CasePattern("mine.b", LISTED.oracle, (LISTED.failure,))
    )
    case = finished(RUN, Verdict.FAIL, judgements=(LISTED,))
    events = (plan(RUN, "mine.b"), listed(), other, case, finished("mine.b"), *closing)
    summary = summarize(EventLog(events))
    assert [(line.finding.id, line.state) for line in summary.ledger] == [
        ("another", State.OUT_OF_RANGE),
        ("far-rows", State.KNOWN),
    ]


def test_the_order_of_listed_findings_does_not_matter(
    plan: Plan, finished: Finished, closing: Closing
) -> None:
    case = finished(RUN, Verdict.FAIL, judgements=(LISTED,))
    entries = (listed(), listed(id="another"), listed())
    events = [plan(RUN), *entries, case, *closing]
    first = summarize(EventLog(tuple(events)))
    random.Random(5).shuffle(events)
    assert summarize(EventLog(tuple(events))) == first
    assert [line.finding.id for line in first.ledger] == ["another", "far-rows"]


def test_every_report_names_the_finding_of_a_known_case(judge: Callable[..., Summary]) -> None:
    summary = judge(LISTED)
    text = render_summary(summary, Colour.OFF)
    assert text.splitlines()[:5] == [
        "KNOWN  finding far-rows: Far rows are lost",
        f"  {RUN}",
        "    reference: fail wrong_answer",
        "      row 3 is zero",
        f"    replay  loragate replay {RUN} --draw 0",
    ]
    assert text.endswith("  1 case failed as listed among the findings")
    root = ElementTree.fromstring(render_junit(summary))
    case = root.find(".//testcase[@name='rank-4']")
    assert case is not None
    properties = {p.attrib["name"]: p.attrib["value"] for p in case.iter("property")}
    assert (properties["verdict"], properties["finding"]) == ("known", "far-rows")
    assert (root.attrib["failures"], case.find("failure")) == ("0", None)
    page = render_html(summary)
    assert f'id="case-{RUN}"' in page
    assert '<span class="pill v-known">known</span>' in page
    assert "known: far-rows: Far rows are lost" in page
    assert "1 known" in page


SIZED = CasePattern(
    RUN, OracleName.REFERENCE, (Failure.WRONG_ANSWER,), (Limit("wrong_rows", 2),), seen=Rate(4, 20)
)
SMALL = replace(LISTED, metrics={"wrong_rows": 2.0})
LARGE = replace(LISTED, metrics={"wrong_rows": 3.0})


def test_a_failure_up_to_the_listed_size_is_known_and_its_size_is_shown(
    judge: Callable[..., Summary],
) -> None:
    summary = judge(SMALL, entry=listed(case=SIZED))
    assert (summary.exit_code, len(summary.known)) == (ExitCode.OK, 1)
    text = render_summary(summary, Colour.OFF)
    assert text.startswith("KNOWN  finding far-rows: Far rows are lost\n  listed: wrong_rows at mo")
    assert f"1 of 1 draws, first {RUN}; listed: wrong_rows at most 2</td>" in render_html(summary)


@pytest.mark.parametrize(
    ("planted", "says"),
    [
        ((LARGE,), "exceeds what finding far-rows lists: wrong_rows at most 2, not 3"),
        ((replace(LISTED, failure=Failure.EXCEPTION),), "row 3 is zero"),
        ((SMALL, STALE), "old ranks live on"),
    ],
    ids=["larger", "other kind", "other oracle"],
)
def test_a_defect_on_top_of_a_listed_one_fails(
    judge: Callable[..., Summary], planted: tuple[Judgement, ...], says: str
) -> None:
    summary = judge(*planted, entry=listed(case=SIZED))
    assert (summary.exit_code, len(summary.known)) == (ExitCode.WRONG, 0)
    (case,) = summary.troubles
    assert case.message.splitlines()[0] == says
    for render in REPORTS:
        assert says in render(summary)


def test_a_larger_failure_does_not_make_the_finding_count_as_gone(
    judge: Callable[..., Summary],
) -> None:
    summary = judge(LARGE, entry=listed(case=SIZED))
    assert [line.state for line in summary.ledger] == [State.NOT_TRIED]


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (listed(case=SIZED), "none of 1 draws shows it, which 4 of 20 draws allow"),
        (
            listed(probe="far", case=replace(SIZED, seen=None)),
            "none of 1 draws shows it; probe far",
        ),
    ],
    ids=["rate", "probe"],
)
def test_a_finding_that_a_draw_need_not_show_is_shown_as_not_seen(
    judge: Callable[..., Summary], entry: KnownFinding, text: str
) -> None:
    summary = judge(HELD, entry=entry)
    assert (summary.exit_code, summary.reasons) == (ExitCode.OK, ())
    assert [line.state for line in summary.ledger] == [State.UNSEEN]
    assert f"NOT SEEN  finding {entry.finding.id}" in render_summary(summary, Colour.OFF)
    for render in REPORTS[::2]:
        assert text in render(summary)


def test_a_rate_that_a_run_excludes_fails_it(
    judge: Callable[..., Summary], finished: Finished
) -> None:
    more = tuple(finished(RUN, judgements=(HELD,), draw=draw) for draw in range(1, 155))
    summary = judge(HELD, entry=listed(case=SIZED), also=more)
    assert summary.exit_code is ExitCode.WRONG
    assert "(none of 155 draws shows it, which 4 of 20 draws exclude)" in summary.reasons[0]


def test_a_finding_that_an_older_run_recorded_lists_every_size(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(encode(listed(), run="r") + "\n")
    new = json.loads(path.read_text())
    for field in ("size", "where", "seen"):
        del new["event"]["finding"]["case"][field]
    path.write_text(json.dumps(new) + "\n")
    log = read_events(path)
    assert (log.events, log.damaged) == ((listed(),), 0)
    entry = log.events[0]
    assert isinstance(entry, KnownFinding)
    assert entry.finding.case is not None
    assert entry.finding.case.shows(RUN, LARGE)


def test_a_finding_with_a_size_is_read_back_as_it_was_recorded(tmp_path: Path) -> None:
    entry = listed(case=replace(SIZED, where=(Place("slot", -1), Place("name", "x"))), probe=None)
    path = tmp_path / "events.jsonl"
    path.write_text(encode(entry, run="r") + "\n")
    assert read_events(path).events == (entry,)


def test_progress_shows_a_known_case_as_known(plan: Plan, finished: Finished) -> None:
    progress = Progress(Colour.OFF, Liveness.LOG)
    case = finished(RUN, Verdict.FAIL, judgements=(LISTED,))
    another = listed(id="another", case=replace(SIZED, run="mine.b"))
    events: list[Event] = [plan(RUN), listed(), another, case]
    text = "".join(map(progress.feed, events))
    assert text.splitlines() == [f"KNOWN  {RUN}  far-rows", "1/1 cases"]
