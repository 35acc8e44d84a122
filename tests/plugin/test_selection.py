"""The same arguments select the same runs in the same order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loragate.matrix.case import Case, Dtype, Site, Tier
from loragate.matrix.case_run import CaseRun, find_run
from loragate.matrix.ids import case_id
from loragate.matrix.selection import Selection, select_runs

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
    one = select_runs(selection(draws=(0, 1), repeats=3), CASES)
    others = selection(draws=(1, 0), repeats=3, subjects=("b", "a"))
    assert [run.id for run in one] == [run.id for run in select_runs(others, reversed(CASES))]
    assert len({run.id for run in one}) == len(one) == 24


def test_repeats_of_a_draw_follow_each_other():
    runs = select_runs(selection(draws=(0, 4), repeats=2, patterns=("a.*tokens-5",)), CASES)
    assert [(run.draw, run.repeat) for run in runs] == [(0, 0), (0, 1), (4, 0), (4, 1)]


def test_a_tier_takes_the_cases_of_lower_tiers_too():
    assert len(select_runs(selection(tier=Tier.PREMERGE), CASES)) == 6


def test_patterns_select_by_subject_or_axis():
    runs = select_runs(selection(patterns=("b.*tokens-6",)), CASES)
    assert [(run.subject, run.case.tokens) for run in runs] == [("b", 6)]


@pytest.mark.parametrize("subject", ["lorakernels", "my.package.module:Subject"])
@pytest.mark.parametrize(("draw", "repeat"), [(0, 0), (3, 0), (0, 2), (3, 2)])
def test_an_id_leads_back_to_its_run(subject, draw, repeat):
    run = CaseRun(subject, CASES[1], draw, repeat)
    assert find_run(run.id, CASES) == run


def test_an_id_of_no_case_leads_nowhere():
    assert find_run("lorakernels.dense_delta.tokens-999", CASES) is None
    assert find_run(case_id(CASE), CASES) is None
    for suffix in ("#", "#x", "#1.", "#1.2.3", "#-1"):
        assert find_run(CaseRun("a", CASE).id + suffix, CASES) is None


def test_draws_after_the_first_show_in_the_id_and_change_the_data():
    first, second = CaseRun("a", CASE), CaseRun("a", CASE, draw=1)
    assert first.id == first.run_id
    assert second.id == f"{first.id}#1"
    assert first.seed != second.seed


def test_repeats_after_the_first_show_in_the_id_and_have_the_same_data():
    first, second = CaseRun("a", CASE), CaseRun("a", CASE, repeat=1)
    assert second.id == f"{first.id}#0.1"
    assert first.seed == second.seed


@pytest.mark.parametrize(
    ("draw", "repeat", "options"),
    [(0, 0, "--draw 0"), (7, 0, "--draw 7"), (0, 2, "--draw 0 --repeats 3")],
)
def test_a_replay_command_names_the_draw_and_includes_the_repeats_before(draw, repeat, options):
    run = CaseRun("a", CASE, draw, repeat)
    assert run.replay == f"loragate replay {run.run_id} {options}"
