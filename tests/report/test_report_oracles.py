"""How many cases each oracle judged; an oracle that judged none is shown."""

from __future__ import annotations

import re
from collections.abc import Callable

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.events.log import EventLog
from loragate.events.model import CaseFinished, Event, RunStarted
from loragate.report.by_oracle import OracleCount, count_oracles, never_judged
from loragate.report.html import render_html
from loragate.report.outcomes import case_outcomes
from loragate.report.summary import summarize
from loragate.report.terminal import Colour, render_summary

_EXACT = Judgement(OracleName.EXACT, Verdict.PASS)
_WRONG = Judgement(OracleName.EXACT, Verdict.FAIL, Failure.WRONG_ANSWER)
_NO_ROWS = Judgement(OracleName.BASE_ROWS, Verdict.SKIP, message="the batch has no base rows")
_ROWS = Judgement(OracleName.BASE_ROWS, Verdict.PASS)
_NO_PROMISE = Judgement(OracleName.REPEAT, Verdict.SKIP, message="no promise of equal bits")


def _counts(*events: Event) -> dict[OracleName, OracleCount]:
    return {count.oracle: count for count in count_oracles(case_outcomes(events))}


def test_an_oracle_counts_what_it_judged_apart_from_where_it_did_not_apply(
    finished: Callable[..., CaseFinished],
) -> None:
    counts = _counts(
        finished("a", judgements=(_EXACT, _ROWS)),
        finished("b", judgements=(_EXACT, _NO_ROWS)),
        finished("c", Verdict.FAIL, judgements=(_WRONG, _NO_ROWS)),
    )
    exact, base = counts[OracleName.EXACT], counts[OracleName.BASE_ROWS]
    assert (exact.judged, exact.skipped, exact.reason) == (3, 0, "")
    assert (base.judged, base.skipped, base.reason) == (1, 2, "the batch has no base rows")
    assert not [*never_judged(counts.values())]


def test_sites_are_counted_apart_and_oracles_keep_their_order(
    finished: Callable[..., CaseFinished],
) -> None:
    counts = count_oracles(
        case_outcomes(
            (
                finished("b", site="moe_delta", judgements=(_NO_PROMISE, _EXACT)),
                finished("a", judgements=(_EXACT,)),
            )
        )
    )
    assert [(count.site, count.oracle, count.judged) for count in counts] == [
        ("dense_delta", OracleName.EXACT, 1),
        ("moe_delta", OracleName.EXACT, 1),
        ("moe_delta", OracleName.REPEAT, 0),
    ]


def test_of_several_draws_the_one_that_decided_counts(
    finished: Callable[..., CaseFinished],
) -> None:
    counts = _counts(
        finished("a", draw=0, judgements=(_EXACT, _NO_ROWS)),
        finished("a", Verdict.FAIL, draw=1, judgements=(_WRONG,)),
    )
    assert counts.keys() == {OracleName.EXACT}


def test_an_oracle_that_the_machine_cut_short_has_not_judged(
    finished: Callable[..., CaseFinished],
) -> None:
    no_memory = Judgement(OracleName.EXACT, Verdict.INFRA, Failure.OUT_OF_MEMORY)
    counts = _counts(finished("a", Verdict.INFRA, judgements=(no_memory,)))
    exact = counts[OracleName.EXACT]
    assert (exact.judged, exact.skipped) == (0, 0)
    # the case itself says why
    assert not [*never_judged(counts.values())]


def test_the_summary_says_which_oracle_judged_nothing_and_why(
    plan: Callable[..., RunStarted],
    finished: Callable[..., CaseFinished],
    closing: tuple[Event, ...],
) -> None:
    cases = (
        finished("a", judgements=(_EXACT, _NO_PROMISE, _NO_ROWS)),
        finished("b", judgements=(_EXACT, _NO_PROMISE, _ROWS)),
    )
    text = render_summary(summarize(EventLog((plan("a", "b"), *cases, *closing))), Colour.OFF)
    lines = text.splitlines()
    table = next(number for number, line in enumerate(lines) if line.startswith("judged"))
    assert lines[table].split() == ["judged", "exact", "base_rows", "repeat"]
    assert lines[table + 1].split() == ["mine/dense_delta", "2", "1", "of", "2", "0", "of", "2"]
    assert lines[table + 2] == "mine/dense_delta: repeat judged no case: no promise of equal bits"
    assert "base_rows judged no case" not in text


def test_the_page_shows_the_same_figures_and_why_an_oracle_judged_nothing(
    plan: Callable[..., RunStarted],
    finished: Callable[..., CaseFinished],
    closing: tuple[Event, ...],
) -> None:
    reason = Judgement(OracleName.REPEAT, Verdict.SKIP, message='no "promise" of <b>equal bits')
    cases = (
        finished("a", judgements=(_EXACT, reason, _NO_ROWS)),
        finished("b", judgements=(_EXACT, reason, _ROWS)),
        finished("c", site="moe_delta", judgements=(_EXACT,)),
    )
    page = render_html(summarize(EventLog((plan("a", "b", "c"), *cases, *closing))))
    section = page[page.index('<section id="judged">') :].partition("</section>")[0]
    assert re.findall(r"<th>(.*?)</th>", section)[2:] == ["exact", "base rows", "repeat"]
    assert re.findall(r"<td.*?>(.*?)</td>", section) == [
        *("mine", "dense_delta", "2", "1 of 2", "0 of 2"),
        *("mine", "moe_delta", "1", "", ""),
    ]
    assert 'title="no &#34;promise&#34; of &lt;b&gt;equal bits">0 of 2' in section
