"""The verdict of a group: what is worse outweighs what is better, and nothing shows nothing."""

from __future__ import annotations

from itertools import combinations

import pytest

from loragate.core.verdict import EXIT_CODES, ExitCode, Verdict, worst

WORST_FIRST = (Verdict.FAIL, Verdict.INFRA, Verdict.INCONCLUSIVE, Verdict.SKIP, Verdict.PASS)


@pytest.mark.parametrize(("worse", "better"), [*combinations(WORST_FIRST, 2)])
def test_the_worse_of_two_verdicts_decides_in_whatever_order_they_come(
    worse: Verdict, better: Verdict
) -> None:
    assert worst([worse, better]) is worst([better, worse]) is worse


def test_a_group_without_a_verdict_has_shown_nothing() -> None:
    assert worst([]) is Verdict.INCONCLUSIVE


def test_only_a_pass_exits_with_0() -> None:
    assert [verdict for verdict in Verdict if EXIT_CODES[verdict] is ExitCode.OK] == [Verdict.PASS]
