"""Verdicts on tokens, and what a rate of equal texts can and cannot say."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loragate.core.sequential import Decision
from loragate.engine.report import Defect, Report, WrongLogprobs
from loragate.engine.verdicts import MatchRatio, TokenVerdict, chance_to_pass, token_verdict


def test_a_token_is_right_a_near_tie_or_a_defect() -> None:
    assert token_verdict(0.0, 0.25) is TokenVerdict.RIGHT
    assert token_verdict(0.25, 0.25) is TokenVerdict.NEAR_TIE
    assert token_verdict(0.26, 0.25) is TokenVerdict.DEFECT
    # without noise every other token is a defect
    assert token_verdict(1e-9, 0.0) is TokenVerdict.DEFECT


@pytest.mark.parametrize(
    ("gap", "noise"), [(math.nan, 0.25), (0.1, math.nan), (math.nan, math.nan), (math.inf, 0.25)]
)
def test_a_token_that_cannot_be_compared_is_a_defect(gap: float, noise: float) -> None:
    assert token_verdict(gap, noise) is TokenVerdict.DEFECT


@pytest.mark.parametrize("near_ties", [0, 1, 99])
@pytest.mark.parametrize(
    "wrong",
    [
        {"defects": (Defect(0, None, 2, 7, 5, 9.5, 1, ("adapter-1",), None),)},
        {"wrong_logprobs": (WrongLogprobs(0, None, 2, -3.0, -0.5, 1, 2.5, ("adapter-1",)),)},
    ],
    ids=["tokens", "probabilities"],
)
def test_what_is_wrong_fails_however_many_other_tokens_are_near_ties(
    wrong: dict[str, Any], near_ties: int
) -> None:
    report = Report(100, near_ties, 0.25, 0.25, (), requests=4, matches=3)
    assert report.decision is (Decision.UNDECIDED if near_ties > 1 else Decision.PASS)
    found = replace(report, **wrong)
    assert found.decision is Decision.FAIL
    assert found.lines()[0].startswith("fail: 100 tokens of 4 requests")


def test_a_ratio_counts_equal_texts_and_has_the_exact_interval() -> None:
    texts = [[1, 2, 3]] * 97 + [[1, 2, 4]] * 3
    ratio = MatchRatio.of(texts, [[1, 2, 3]] * 100)
    assert (ratio.matches, ratio.requests) == (97, 100)
    # Clopper and Pearson
    assert ratio.low == pytest.approx(0.9148, abs=1e-4)
    assert ratio.high == pytest.approx(0.9938, abs=1e-4)
    # a text that stops early is another text
    assert MatchRatio.of([[1, 2]], [[1, 2, 3]]).matches == 0


@pytest.mark.parametrize("texts", [[], [[1]]])
def test_texts_that_have_no_counterpart_are_refused(texts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="texts must be as many"):
        MatchRatio.of(texts, [[1], [2]] if texts else [])


def test_the_intervals_of_a_defect_and_of_healthy_noise_overlap() -> None:
    # vllm #35204: a healthy engine has 76 to 92 equal texts of 100; vllm #43314: a graph without
    # adapters had 76
    same = [[1]] * 100
    defect = MatchRatio.of([[1]] * 76 + [[2]] * 24, same)
    healthy = MatchRatio.of([[1]] * 84 + [[2]] * 16, same)
    assert healthy.low < defect.high


def test_the_table_of_the_documentation_is_what_the_functions_compute() -> None:
    path = Path(__file__).resolve().parents[2] / "docs" / "engine.md"
    rows = re.findall(
        r"^\| (\d+) \| (\d+%) to (\d+%) \| ([\d.]+%) \|$",
        path.read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    assert [int(row[0]) for row in rows] == [76, 86, 88, 92, 99]
    for equal, low, high, chance in rows:
        ratio = MatchRatio.counted(int(equal), 100)
        assert (low, high) == (f"{ratio.low:.0%}", f"{ratio.high:.0%}")
        assert chance == f"{chance_to_pass(int(equal) / 100, needed=91, requests=100):.1%}"
