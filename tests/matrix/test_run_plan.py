"""Every selected case of every subject is planned, or skipped with a reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loragate.core.machine import Machine
from loragate.core.verdict import OracleName
from loragate.matrix.case import Case, Dtype, Layout, Site, Tier
from loragate.matrix.ids import run_id, seed_of
from loragate.matrix.patterns import SelectionError
from loragate.matrix.plan import Candidate, Plan, plan
from loragate.matrix.selection import Selection, select_runs
from loragate.matrix.shards import Shard
from loragate.matrix.show import plan_json, render_plan
from loragate.run.planning import skipped_cases

CPU = Machine("cpu", "x86_64", None, 1, 0)
H200 = Machine("cuda", "NVIDIA H200", (9, 0), 132, 139 << 30)
SMALL_GPU = Machine("cuda", "NVIDIA GeForce RTX 3060", (8, 6), 28, 12 << 30)

SMOKE = Case(
    site=Site.DENSE_DELTA,
    tokens=17,
    in_features=48,
    slices=(33,),
    rank=1,
    slots=2,
    dtype=Dtype.BF16,
    oracles=(OracleName.REFERENCE, OracleName.EXACT),
)
WIDE = replace(SMOKE, rank=16, dtype=Dtype.FP32)
LINEAR = replace(SMOKE, site=Site.LORA_LINEAR)
PREMERGE = replace(SMOKE, tokens=256, in_features=4096, tier=Tier.PREMERGE)
HUGE = replace(
    PREMERGE, tokens=87383, in_features=24576, layout=Layout.COLUMN_SLICE, tier=Tier.PREMERGE
)
NIGHTLY = replace(SMOKE, tokens=1000, tier=Tier.NIGHTLY)
CASES = (NIGHTLY, HUGE, PREMERGE, LINEAR, WIDE, SMOKE)

OURS = Candidate("ours", lambda case: None)
THEIRS = Candidate(
    "theirs", lambda case: "dtype fp32 is not supported" if case.dtype is Dtype.FP32 else None
)


def _planned(made: Plan) -> set[Case]:
    return {planned.case for planned in made.planned}


def _with(case: Case, **changes: Any) -> list[Case]:
    return [replace(other, **changes) if other is case else other for other in CASES]


def test_tiers_nest_so_that_no_case_runs_in_a_lower_tier_only() -> None:
    by_tier = {tier: _planned(plan(CASES, [OURS], tier, H200)) for tier in Tier}
    assert by_tier[Tier.SMOKE] == {SMOKE, WIDE, LINEAR}
    assert by_tier[Tier.PREMERGE] == {SMOKE, WIDE, LINEAR, PREMERGE, HUGE}
    assert by_tier[Tier.NIGHTLY] == set(CASES)


def test_without_a_gpu_all_but_smoke_is_skipped_with_that_reason() -> None:
    made = plan(CASES, [OURS], Tier.PREMERGE, CPU)
    assert _planned(made) == {SMOKE, WIDE, LINEAR}
    assert {(skipped.case, skipped.reason) for skipped in made.skipped} == {
        (case, "tier premerge needs a GPU: its shapes are beyond the interpreter")
        for case in (PREMERGE, HUGE)
    }


def test_a_case_that_does_not_fit_into_the_gpu_is_skipped_with_both_figures() -> None:
    made = plan(CASES, [OURS], Tier.PREMERGE, SMALL_GPU)
    assert [(skipped.case, skipped.reason) for skipped in made.skipped] == [
        (HUGE, "needs about 16 GiB of device memory, there are 12")
    ]


def test_the_digest_of_a_plan_says_how_its_cases_are_judged() -> None:
    made = plan(CASES, [OURS], Tier.PREMERGE, CPU)
    assert made.digest == plan(CASES[::-1], [OURS], Tier.PREMERGE, CPU).digest
    assert made.digest == plan(CASES, [OURS], Tier.PREMERGE, H200).digest
    swapped = (OracleName.EXACT, OracleName.REFERENCE)
    assert made.digest == plan(_with(SMOKE, oracles=swapped), [OURS], Tier.PREMERGE, CPU).digest
    # of a case that runs, and of one that does not run here
    for case, changes in (
        (SMOKE, {"oracles": (OracleName.EXACT,)}),
        (SMOKE, {"oracles": (OracleName.EXACT, OracleName.CANARY)}),
        (SMOKE, {"timeout_s": 61.0}),
        (PREMERGE, {"oracles": (OracleName.REFERENCE,)}),
    ):
        assert made.digest != plan(_with(case, **changes), [OURS], Tier.PREMERGE, CPU).digest
    assert made.digest != plan(CASES[:-1], [OURS], Tier.PREMERGE, CPU).digest


def test_what_a_subject_refuses_is_skipped_for_it_alone_and_not_expected() -> None:
    made = plan(CASES, [OURS, THEIRS], Tier.SMOKE, CPU)
    assert [(s.subject, s.case, s.reason) for s in made.skipped] == [
        ("theirs", WIDE, "dtype fp32 is not supported")
    ]
    dense, linear = Site.DENSE_DELTA, Site.LORA_LINEAR
    assert made.expected == {
        ("ours", dense): (run_id("ours", SMOKE), run_id("ours", WIDE)),
        ("ours", linear): (run_id("ours", LINEAR),),
        ("theirs", dense): (run_id("theirs", SMOKE),),
        ("theirs", linear): (run_id("theirs", LINEAR),),
    }


def test_of_a_part_of_a_plan_what_is_left_out_keeps_its_reason() -> None:
    made = plan(CASES, [OURS, THEIRS], Tier.SMOKE, CPU)
    name = run_id("theirs", WIDE)
    for only, reasons in ((None, 1), ({name}, 1), ({run_id("ours", WIDE)}, 0)):
        left_out = skipped_cases(made, unusable=(), only=only)
        assert [(s.run_id, s.reason) for s in left_out] == [
            (name, "dtype fp32 is not supported")
        ] * reasons


@pytest.mark.parametrize("index", [1, 2, 3])
def test_a_plan_and_a_session_give_a_shard_the_same_cases_though_a_subject_refuses_some(
    index: int,
) -> None:
    shard = Shard(index=index, count=3)
    made = plan(CASES, [OURS, THEIRS], Tier.SMOKE, CPU)
    names = (OURS.name, THEIRS.name)
    selection = Selection(matrix=(), subjects=names, tier=Tier.SMOKE, shard=shard)
    assert shard.part(made.run_ids) == {run.run_id for run in select_runs(selection, CASES)}


def test_a_case_that_is_run_once_has_the_first_of_the_draws_alone_in_a_plan_and_in_a_session() -> (
    None
):
    name, draws = run_id("ours", WIDE), (7, 3, 5)
    made = plan(CASES, [OURS], Tier.SMOKE, CPU, draws=draws, repeats=2, once=name.__eq__)
    trials = [(run.draw, run.repeat) for run in made.planned if run.run_id == name]
    assert trials == [(3, 0)]
    assert made.once == {name}
    assert made.of([run_id("ours", SMOKE)]).once == frozenset()
    others = [run.run_id for run in made.planned if run.run_id != name]
    assert len(others) == 2 * 3 * 2
    selection = Selection(matrix=(), subjects=("ours",), tier=Tier.SMOKE, draws=draws, repeats=2)
    selected = select_runs(selection, CASES, once=name.__eq__)
    assert [run.id for run in selected] == [run.id for run in made.planned]


def test_a_plan_is_sorted_by_run_id_and_draw_whatever_the_order_of_its_input() -> None:
    made = plan(CASES, [THEIRS, OURS], Tier.NIGHTLY, H200, draws=(3, 0, 3))
    keys = [(run.run_id, run.draw) for run in made.planned]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys) == 2 * (len(CASES) + len(CASES) - 1)
    again = plan(CASES[::-1], [OURS, THEIRS], Tier.NIGHTLY, H200, draws=(0, 3))
    assert made == again
    assert {p.seed for p in made.planned if p.case is SMOKE} == {
        seed_of(SMOKE, 0),
        seed_of(SMOKE, 3),
    }
    # draws do not add cases
    assert sum(map(len, made.expected.values())) == 2 * len(CASES) - 1


def test_repeats_have_the_seed_of_their_draw_and_do_not_add_cases() -> None:
    made = plan([SMOKE], [OURS], Tier.SMOKE, CPU, draws=(0, 2), repeats=2)
    assert [(run.draw, run.repeat) for run in made.planned] == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert [run.seed for run in made.planned] == [seed_of(SMOKE, n) for n in (0, 0, 2, 2)]
    assert sum(map(len, made.expected.values())) == 1
    assert f"{run_id('ours', SMOKE)}  draws 0, 2  2 repeats\n" in render_plan(made)


@pytest.mark.parametrize(
    ("patterns", "selected"),
    [
        (["lora_linear"], {LINEAR}),
        (["rank-1"], {SMOKE, LINEAR}),
        (["48.layout"], {SMOKE, LINEAR, WIDE}),
        (["dense_delta.rank-16.tokens-17"], {WIDE}),
        (["ours.dense_delta.*.rank-16.*"], {WIDE}),
        ([run_id("ours", SMOKE)], {SMOKE}),
        (["fp32", "lora"], {WIDE, LINEAR}),
    ],
)
def test_a_pattern_is_a_shell_pattern_or_pieces_that_cut_no_number(
    patterns: list[str], selected: set[Case]
) -> None:
    made = plan(CASES, [OURS], Tier.SMOKE, CPU, patterns=patterns)
    assert _planned(made) == selected


def test_what_is_not_selected_is_neither_planned_nor_skipped() -> None:
    made = plan(CASES, [THEIRS], Tier.PREMERGE, CPU, patterns=["lora_linear"])
    assert len(made.planned) == 1
    assert made.skipped == ()


def test_a_pattern_that_selects_nothing_is_an_error_with_the_nearest_ids() -> None:
    wrong = run_id("ours", SMOKE).replace("bf16", "bf61")
    with pytest.raises(SelectionError) as caught:
        plan(CASES, [OURS], Tier.SMOKE, CPU, patterns=["rank-1", wrong])
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{wrong!r} selects none of 3 cases"
    assert lines[1] == f"  nearest: {run_id('ours', SMOKE)}"


def test_a_pattern_for_cases_of_a_higher_tier_says_so() -> None:
    for pattern in ("tokens-256", run_id("ours", PREMERGE)):
        with pytest.raises(SelectionError, match=r"none of 3 cases, but some of tier premerge$"):
            plan(CASES, [OURS], Tier.SMOKE, CPU, patterns=[pattern])


def test_the_id_of_a_case_beyond_the_tier_does_not_stand_for_other_cases() -> None:
    longer = replace(PREMERGE, tier=Tier.SMOKE, layout=Layout.COLUMN_SLICE)
    pattern = run_id("ours", PREMERGE)
    subjects = [OURS, Candidate(f"{pattern}.x", lambda case: None)]
    with pytest.raises(SelectionError, match="tier premerge"):
        plan([PREMERGE, longer], subjects, Tier.SMOKE, CPU, patterns=[pattern])


def test_a_plan_as_text_says_what_runs_where_and_what_does_not_and_why() -> None:
    made = plan([SMOKE, WIDE, PREMERGE], [OURS, THEIRS], Tier.PREMERGE, CPU, draws=(0, 1))
    narrow = (
        "dense_delta.dtype-bf16.exec-eager.in-48.layout-contiguous.mix-ragged.rank-1"
        ".ranks-mixed.slices-33.slots-2.tokens-17"
    )
    wide = narrow.replace("bf16", "fp32").replace("rank-1.", "rank-16.")
    large = narrow.replace("in-48", "in-4096").replace("tokens-17", "tokens-256")
    assert render_plan(made).splitlines() == [
        "tier premerge on cpu (x86_64), Triton interpreter",
        "",
        "subject  site         runs  skipped",
        "ours     dense_delta     2        1",
        "theirs   dense_delta     1        2",
        "",
        "runs, judged by reference, exact:",
        f"  ours.{narrow}  draws 0, 1",
        f"  ours.{wide}  draws 0, 1",
        f"  theirs.{narrow}  draws 0, 1",
        "",
        "skipped, dtype fp32 is not supported:",
        f"  theirs.{wide}",
        "",
        "skipped, tier premerge needs a GPU: its shapes are beyond the interpreter:",
        f"  ours.{large}",
        f"  theirs.{large}",
    ]


def test_a_plan_as_json_contains_the_same(tmp_path: Path) -> None:
    made = plan([SMOKE, WIDE], [THEIRS], Tier.SMOKE, H200)
    text = plan_json(made)
    document = json.loads(text)
    assert document["expected"] == [{"subject": "theirs", "site": "dense_delta", "count": 1}]
    (planned,) = document["planned"]
    assert planned["run_id"] == run_id("theirs", SMOKE)
    assert (planned["draw"], planned["repeat"]) == (0, 0)
    assert planned["seed"] == seed_of(SMOKE, 0)
    assert planned["case"]["slices"] == [33]
    assert planned["case"]["oracles"] == ["reference", "exact"]
    assert [skipped["reason"] for skipped in document["skipped"]] == ["dtype fp32 is not supported"]
    assert (document["schema"], document["tier"]) == (2, "smoke")
    assert document["machine"]["name"] == "NVIDIA H200"
    assert text == plan_json(made)
