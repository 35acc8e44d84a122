from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from loragate.bench.moe_figures import (
    AlignFigures,
    DeltaFigures,
    ExpertsFigures,
    LayerFigures,
    MoEFigures,
    MoEMeasured,
    PathTimes,
    State,
)
from loragate.bench.moe_rows import AlignRow, DeltaRow, ExpertsRow, LayerRow, MoERow, moe_rows
from loragate.bench.moe_tables import render_markdown, render_terminal
from loragate.bench.select import select_rows
from loragate.commands.bench import judge
from loragate.core.verdict import ExitCode, Verdict
from loragate.matrix.case import Path, RouterWeights, Source
from loragate.matrix.ids import case_id
from lorakernels.moe.tiles import Alignment, plan_alignment


def times(best: float, *, plan: float | None = None, aligned: float = 2.0) -> PathTimes:
    """Two kernels take twice as long as one shot; alignment takes `aligned` longer."""
    launch = {"two_kernel": 2 * best, "one_shot": best}
    if plan is not None:
        return PathTimes({"plan": plan, **launch}, {"plan": plan + aligned}, 1.0)
    return PathTimes(launch, {path: us + aligned for path, us in launch.items()}, 1.4)


def delta(row: DeltaRow, over_floor: float = 1.1, ratio: float = 0.25) -> DeltaFigures:
    ours = over_floor * row.floor_us(8)
    subjects = {"lorakernels": times(ours, plan=ours), "vllm": times(ours / ratio)}
    return DeltaFigures(row, 8, Path.ONE_SHOT, subjects)


def experts(row: ExpertsRow, few: float, many: float) -> ExpertsFigures:
    """vLLM takes three times as long with many experts, which no bar judges."""
    return ExpertsFigures(
        row, {"lorakernels": few, "vllm": 10.0}, {"lorakernels": many, "vllm": 30.0}
    )


def measured(row: MoERow) -> MoEMeasured:
    if isinstance(row, DeltaRow):
        return delta(row)
    if isinstance(row, AlignRow):
        return AlignFigures(row, {"lorakernels": 5.0, "vllm": 100.0})
    if isinstance(row, ExpertsRow):
        return experts(row, 4.0, 4.8)
    return LayerFigures(row, 100.0, 114.0, 90.0, {"with adapters": 1.1})


def figures(*changed: MoEMeasured) -> MoEFigures:
    """A run that meets every bar, but for what is `changed`."""
    run = [measured(row) for row in moe_rows()]
    for other in changed:
        run = [other if one.row == other.row else one for one in run]
    return MoEFigures("lorakernels", "vllm", 4.0e12, tuple(run))


def test_the_tables_are_four_projections_by_two_ranks_by_six_batches_alignments_and_layers() -> (
    None
):
    rows = moe_rows()
    deltas = [row for row in rows if isinstance(row, DeltaRow)]
    assert len({row.id for row in rows}) == len(rows) == 4 * 2 * 6 + 4 + 6 + 5
    assert len({case_id(row.case) for row in deltas}) == 48
    assert [row.id for row in select_rows(rows, ["layer.*", "mixtral.m1.*"])] == [
        "mixtral.m1.r16",
        "mixtral.m1.r64",
        *(f"layer.m{tokens}" for tokens in (1, 16, 256, 2048, 8192)),
    ]


def test_alignments_of_many_experts_are_selected_by_their_ids_alone_or_with_the_others() -> None:
    rows = moe_rows()
    assert select_rows(rows, ["align.experts.m4"]) == (ExpertsRow(4),)
    of_experts = [f"align.experts.m{tokens}" for tokens in (4, 12, 25, 32, 51, 64)]
    others = [f"align.m{tokens}" for tokens in (1, 64, 1024, 8192)]
    assert [row.id for row in select_rows(rows, ["align.experts.*"])] == of_experts
    assert [row.id for row in select_rows(rows, ["align.m*"])] == others
    assert [row.id for row in select_rows(rows, ["align.*"])] == [*others, *of_experts]


def test_few_and_many_experts_get_as_many_pairs_on_as_many_slots() -> None:
    few, many = (delta.case for delta in ExpertsRow(51).deltas)
    assert (few.experts, many.experts) == (64, 512)
    assert replace(few, experts=512) == many
    assert (many.out_rows, many.slots) == (510, 4)


def test_the_pairs_of_few_and_many_experts_are_aligned_in_the_ways_of_small_batches() -> None:
    ways = {
        plan_alignment(case.out_rows, case.experts, case.slots, with_base=False)
        for row in moe_rows()
        if isinstance(row, ExpertsRow)
        for case in (delta.case for delta in row.deltas)
    }
    assert ways == {Alignment.SORTED_AT_ONCE, Alignment.COMPARED}


def test_w2_has_a_row_of_x_and_a_router_weight_per_pair_and_w13_a_row_per_token() -> None:
    w13, w2 = LayerRow(16).deltas
    assert (w13.case.source, w13.case.router) == (Source.TOKEN, RouterWeights.NONE)
    assert (w2.case.source, w2.case.router) == (Source.PAIR, RouterWeights.OUTPUT)
    assert (w13.case.x_rows, w2.case.x_rows) == (16, 128)
    assert w13.case.slices == (w2.case.in_features,) * 2


@pytest.mark.parametrize(
    ("row", "buckets", "microseconds"),
    [
        # by hand, with as many touched buckets
        (DeltaRow("mixtral", 16, 1), 2, 0.4),
        (DeltaRow("mixtral", 64, 1), 2, 1.4),
        (DeltaRow("mixtral", 16, 4096), 24, 121.1),
        (DeltaRow("mixtral", 64, 4096), 24, 133.1),
        (DeltaRow("qwen3_30b_w13", 64, 1), 8, 1.4),
        (DeltaRow("qwen3_30b_w2", 64, 1), 8, 0.7),
    ],
    ids=lambda value: getattr(value, "id", None),
)
def test_the_floor_counts_touched_factors_and_x_once_and_output_twice(
    row: DeltaRow, buckets: int, microseconds: float
) -> None:
    assert round(row.floor_us(buckets), 1) == microseconds


def test_the_floor_is_the_operations_where_these_take_longer_than_the_bytes() -> None:
    row = DeltaRow("qwen3_30b_w13", 64, 4096)
    flops = 2 * 4096 * 8 * 64 * (2 * 2048 + 2 * 768)
    assert row.floor_us(512, bytes_per_s=1e15) == pytest.approx(flops / 780e12 * 1e6)
    assert row.floor_us(512) > row.floor_us(512, bytes_per_s=1e15)


def test_one_program_per_pair_is_timed_for_small_batches_only() -> None:
    assert Path.SMALL_BATCH in DeltaRow("mixtral", 16, 64).paths
    assert Path.SMALL_BATCH not in DeltaRow("mixtral", 16, 256).paths


def test_a_run_that_meets_every_bar_is_exit_code_0() -> None:
    assert [bar.verdict for bar in figures().bars()] == [Verdict.PASS] * 7
    assert judge(figures()) is ExitCode.OK


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        (delta(DeltaRow("mixtral", 16, 1), ratio=1.01), "best path of vllm, worst row"),
        (delta(DeltaRow("mixtral", 16, 64), over_floor=1.51), "over the floor at M >= 64"),
        (AlignFigures(AlignRow(8192), {"lorakernels": 11.0, "vllm": 100.0}), "align over"),
        (experts(ExpertsRow(12), 4.0, 4.9), "align with 512 experts over that with 64 at 4 to 64"),
        (LayerFigures(LayerRow(2048), 100.0, 122.5, None, {}), "added to a layer at M=2048"),
        (LayerFigures(LayerRow(8192), 100.0, 115.5, None, {}), "added to a layer at M=8192"),
    ],
)
def test_a_missed_bar_is_named_and_is_exit_code_1(changed: MoEMeasured, missed: str) -> None:
    run = figures(changed)
    (failed,) = [bar for bar in run.bars() if bar.verdict is Verdict.FAIL]
    assert missed in failed.name
    assert judge(run) is ExitCode.WRONG


@pytest.mark.parametrize(
    "unjudged",
    [
        delta(DeltaRow("mixtral", 16, 16), over_floor=9.0),
        AlignFigures(AlignRow(1024), {"lorakernels": 90.0, "vllm": 100.0}),
        LayerFigures(LayerRow(256), 100.0, 190.0, None, {}),
    ],
)
def test_no_bar_depends_on_launch_overhead_alone(unjudged: MoEMeasured) -> None:
    assert judge(figures(unjudged)) is ExitCode.OK


def test_the_plan_of_the_candidate_is_compared_with_the_best_path_of_the_baseline() -> None:
    row = DeltaRow("mixtral", 16, 64)
    slow_plan = times(3.0, plan=6.0)
    one = DeltaFigures(row, 8, Path.TWO_KERNEL, {"lorakernels": slow_plan, "vllm": times(10.0)})
    assert one.ratio("lorakernels", "vllm") == pytest.approx(0.6)
    assert one.ratio("lorakernels", "vllm", State.ALIGNED) == pytest.approx(8 / 12)
    assert one.ratio("lorakernels", None) is None


def test_few_experts_are_compared_with_many_of_the_same_subject_with_or_without_a_baseline() -> (
    None
):
    one = experts(ExpertsRow(25), 4.0, 5.0)
    assert (one.ratio("lorakernels"), one.ratio("vllm")) == (1.25, 3.0)
    for run in (figures(one), replace(figures(one), baseline=None)):
        (bar,) = [bar for bar in run.bars() if "512 experts" in bar.name]
        assert (bar.measured, bar.target, bar.verdict) == (1.25, 1.2, Verdict.FAIL)


def test_a_record_without_rows_of_many_experts_leaves_their_bar_unmeasured() -> None:
    payload = figures().payload() | {"schema": 2}
    del payload["experts"]
    run = MoEFigures.from_payload(json.loads(json.dumps(payload)))
    assert run.experts == ()
    assert run.layers == figures().layers
    (bar,) = [bar for bar in run.bars() if bar.verdict is not Verdict.PASS]
    assert (bar.verdict, "512 experts" in bar.name) == (Verdict.INCONCLUSIVE, True)
    assert judge(run) is ExitCode.INCOMPLETE
    assert "512 experts" in render_markdown(figures())
    assert "512 experts" not in render_markdown(run)


def with_cold(ours: float, theirs: float) -> MoEFigures:
    """A run whose first delta was measured with a cold cache as well."""
    first = figures().deltas[0]
    subjects = {
        "lorakernels": replace(first.subjects["lorakernels"], cold_us={"plan": ours}),
        "vllm": replace(first.subjects["vllm"], cold_us={"two_kernel": 99.0, "one_shot": theirs}),
    }
    return figures(replace(first, subjects=subjects))


def test_a_delta_that_is_slower_with_a_cold_cache_misses_a_bar_of_its_own() -> None:
    missed = [bar for bar in with_cold(8.0, 5.0).bars() if bar.verdict is Verdict.FAIL]
    name = "moe_delta over the best path of vllm, aligned, cold L2, worst row"
    assert [(bar.name, bar.measured) for bar in missed] == [(name, pytest.approx(1.6))]
    assert judge(with_cold(4.0, 5.0)) is ExitCode.OK


def test_both_renderings_show_the_cold_cache_where_it_was_measured() -> None:
    run = with_cold(4.0, 5.0)
    markdown = render_markdown(run)
    header, _, first, second, *_ = markdown.splitlines()
    assert header.endswith("| cold: lorakernels | vllm | ratio |")
    assert first.endswith("| 4.0 | 5.0 | 0.80 |")
    assert second.count("|") == first.count("|")
    for text in (markdown, render_terminal(run)):
        assert "so with a cold L2 cache, geometric mean 0.80, worst row 0.80" in text
    assert "cold" not in render_markdown(figures())
    assert MoEFigures.from_payload(json.loads(json.dumps(run.payload()))) == run


def test_the_mean_ratio_is_geometric() -> None:
    first, second = DeltaRow("mixtral", 16, 1), DeltaRow("mixtral", 16, 16)
    pair = (delta(first, ratio=0.1), delta(second, ratio=0.4))
    mean, worst, *_ = replace(figures(), measured=pair).bars()
    assert (mean.measured, worst.measured) == (pytest.approx(0.2), pytest.approx(0.4))


@pytest.mark.parametrize(
    "run",
    [
        replace(figures(), baseline=None),
        replace(figures(), measured=figures().measured[1:]),
        replace(figures(), measured=figures().layers),
    ],
    ids=["no baseline", "a row is missing", "layers alone"],
)
def test_what_was_not_measured_is_exit_code_2_and_never_0(run: MoEFigures) -> None:
    assert judge(run) is ExitCode.INCOMPLETE


def test_a_record_round_trips_and_states_expected_and_executed() -> None:
    payload: dict[str, Any] = json.loads(json.dumps(figures().payload()))
    assert MoEFigures.from_payload(payload) == figures()
    assert (payload["expected"], payload["executed"]) == (63, 63)
    assert payload["deltas"][0]["ratio"] == pytest.approx(0.25)
    assert payload["layers"][0]["added"] == pytest.approx(0.14)
    assert payload["bars"][3]["verdict"] == "pass"


def test_a_record_of_a_newer_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="schema is 99, this version reads up to 3"):
        MoEFigures.from_payload(figures().payload() | {"schema": 99})


def test_the_markdown_table_shows_all_paths_and_marks_the_one_that_the_plan_chooses() -> None:
    row = DeltaRow("mixtral", 16, 64)
    one = DeltaFigures(
        row, 8, Path.ONE_SHOT, {"lorakernels": times(7.0, plan=7.1), "vllm": times(20.0)}
    )
    lines = render_markdown(replace(figures(), measured=(one,))).splitlines()
    assert lines[0] == (
        "| projection | rank | M | floor | lorakernels | two kernel | one shot | small batch | "
        "vllm two kernel | vllm one shot | vllm small batch | ratio | over floor | "
        "aligned: lorakernels | vllm | ratio |"
    )
    assert lines[2] == (
        "| mixtral 4096 -> 7168+7168, 2 of 8 experts | 16 | 64 | 3.2 | 7.1 | 14.0 | 7.0* | - | "
        "40.0 | 20.0 | - | 0.35 | 2.2 | 9.1 | 22.0 | 0.41 |"
    )


def test_both_renderings_end_with_the_ratio_that_includes_alignment() -> None:
    end = "eltas with alignment on both sides, geometric mean"
    markdown, terminal = render_markdown(figures()), render_terminal(figures())
    assert "| 8192 | 5.0 | 100.0 | 0.05 |" in markdown
    assert "| align, M | lorakernels, 64 experts | 512 experts | ratio | vllm, 64 e" in markdown
    assert "| 64 | 4.0 | 4.8 | 1.20 | 10.0 | 30.0 | 3.00 |" in markdown
    assert "| 2048 | 90.0 | 100.0 | 114.0 | 14% |" in markdown
    assert "pass         align over that of vllm at M=8192: 0.050, bar 0.1" in terminal
    assert markdown.splitlines()[-1].startswith(f"D{end}")
    assert terminal.splitlines()[-1].startswith(f"d{end}")


def test_without_a_baseline_its_columns_are_gone() -> None:
    alone = replace(figures(), baseline=None)
    assert "vllm" not in render_markdown(alone) + render_terminal(alone)
