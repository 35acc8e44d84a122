"""The same arguments select the same runs in the same order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loragate.matrix.case import Case, Dtype, Site, Tier
from loragate.matrix.ids import case_id
from loragate.matrix.selection import CaseRun, Selection, select_runs, split_id

CASE = Case(
    site=Site.DENSE_DELTA,
    tokens=5,
    in_features=16,
    slices=(16,),
    rank=8,
    slots=2,
    dtype=Dtype.FP32,
)
CASES = (CASE, replace(CASE, tokens=6), replace(CASE, tokens=7, tier=Tier.PREMERGE))


def selection(**changes: object) -> Selection:
    wanted = {"matrix": (), "subjects": ("a", "b"), "tier": Tier.SMOKE, **changes}
    return Selection(**wanted)


def test_the_order_of_cases_and_subjects_does_not_matter():
    one = select_runs(selection(attempts=(0, 1)), CASES)
    other = select_runs(selection(attempts=(1, 0), subjects=("b", "a")), reversed(CASES))
    assert [run.id for run in one] == [run.id for run in other]
    assert len({run.id for run in one}) == len(one) == 8


def test_a_tier_takes_the_cases_of_lower_tiers_too():
    assert len(select_runs(selection(tier=Tier.PREMERGE), CASES)) == 6


def test_patterns_select_by_subject_or_axis():
    runs = select_runs(selection(patterns=("b.*tokens-6",)), CASES)
    assert [(run.subject, run.case.tokens) for run in runs] == [("b", 6)]


@pytest.mark.parametrize("subject", ["lorakernels", "my.package.module:Subject"])
@pytest.mark.parametrize("attempt", [0, 3])
def test_an_id_leads_back_to_its_run(subject, attempt):
    run = CaseRun(subject, CASES[1], attempt)
    assert split_id(run.id, CASES) == run


def test_an_id_of_no_case_leads_nowhere():
    assert split_id("lorakernels.dense_delta.tokens-999", CASES) is None
    assert split_id(case_id(CASE), CASES) is None


def test_attempts_after_the_first_show_in_the_id_and_change_the_data():
    first, second = CaseRun("a", CASE, 0), CaseRun("a", CASE, 1)
    assert second.id == f"{first.id}#1"
    assert first.seed != second.seed
