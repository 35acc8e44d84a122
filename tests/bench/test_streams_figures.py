from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from loragate.bench.plots import streams_plot
from loragate.bench.select import select_rows
from loragate.bench.streams_draw import LAYERS, RANKS, draw
from loragate.bench.streams_figures import StreamFigures
from loragate.bench.streams_measured import (
    BaselineTimes,
    FormTimes,
    GDNFigures,
    LinearFigures,
    MoEFigures,
    StreamMeasured,
)
from loragate.bench.streams_rows import (
    Adapted,
    GDNRow,
    LinearRow,
    MoERow,
    StreamRow,
    drawn_rows,
    listed_rows,
    stream_rows,
)
from loragate.bench.streams_tables import render_markdown, render_terminal
from loragate.commands.bench import judge
from loragate.core.verdict import ExitCode, Verdict

BASE = 20.0
DOWN = next(row for row in listed_rows() if row.id == "down.m1.r16")
GDN = GDNRow("qwen3_next", Adapted.BOTH, 8)


def linear(
    row: LinearRow,
    *,
    single: float = 3.0,
    ahead: float = 3.2,
    dual: float = 2.0,
    stored: float | None = None,
    planned: float = 2.0,
    theirs: float | None = 10.0,
    chosen: str = "dual",
) -> LinearFigures:
    """What each way to run the layer adds to a base of 20 us."""
    forms = {"single": BASE + single, "ahead": BASE + ahead, "dual": BASE + dual}
    if stored is not None:
        forms["stored"] = BASE + stored
    baseline = BaselineTimes(BASE + 12.0, None if theirs is None else BASE + theirs)
    times = FormTimes(forms, chosen, BASE + planned)
    return LinearFigures(row, BASE, times, baseline, {"dual": 1.0})


def gdn(row: GDNRow, chosen: str = "dual", planned: float = 15.0) -> GDNFigures:
    us = {"serial": 20.0, "dual": 15.0, "merged": 16.0, "beside": 18.0}
    return GDNFigures(row, FormTimes(us, chosen, planned), {"dual": 1.0})


def moe(row: MoERow, chosen: str = "beside", planned: float = 90.0) -> MoEFigures:
    us = {"single": 100.0, "beside": 90.0, "dual": 110.0}
    return MoEFigures(row, FormTimes(us, chosen, planned), {"dual": 1.0})


def of_row(row: StreamRow) -> StreamMeasured:
    if isinstance(row, LinearRow):
        return linear(row)
    return gdn(row) if isinstance(row, GDNRow) else moe(row)


def figures(*changed: StreamMeasured) -> StreamFigures:
    """A run that meets every bar, but for what is `changed`."""
    run = [of_row(row) for row in stream_rows()]
    for other in changed:
        run = [other if one.row == other.row else one for one in run]
    return StreamFigures("lorakernels", "vllm", tuple(run))


def measured(run: StreamFigures) -> Mapping[str, float | None]:
    return {bar.name: bar.measured for bar in run.bars()}


def missed(run: StreamFigures) -> list[str]:
    return [bar.name for bar in run.bars() if bar.verdict is not Verdict.PASS]


def test_the_rows_are_those_of_the_dense_table_as_many_drawn_ones_and_other_layers() -> None:
    rows = stream_rows()
    assert len({row.id for row in rows}) == len(rows) == 30 + 30 + 2 * 3 * 8 + 2 * 7
    assert rows[0].id == "qkv.m1.r16"
    assert rows[-15].id == "gdn.qwen3_5.both.m8192"
    assert rows[-1].id == "moe.shared.m8192"
    assert len(select_rows(rows, ["drawn.*"])) == 30


def test_a_seed_always_draws_the_same_rows_and_another_one_draws_others() -> None:
    assert drawn_rows(7) == drawn_rows(7)
    assert not set(drawn_rows(7)) & set(drawn_rows(8))
    assert [row.id for row in drawn_rows(1)[:3]] == [
        "drawn.qwen2_5_7b.down.m15.r8",
        "drawn.gemma2_9b.gate_up.m211.r16",
        "drawn.mistral_nemo.o.m1.r64",
    ]


def test_drawn_batches_are_odd_and_of_every_size_and_ranks_are_8_to_128() -> None:
    drawn = draw(1, 600)
    assert len(set(drawn)) == 600
    assert all(one.tokens % 2 and one.tokens < 4096 for one in drawn)
    assert {one.tokens.bit_length() for one in drawn} == set(range(1, 13))
    assert {one.rank for one in drawn} == set(RANKS) == {8, 16, 32, 64, 128}
    assert {one.layer for one in drawn} == set(LAYERS)
    assert draw(1, 10) == drawn[:10]


def test_an_input_projection_has_a_slice_for_each_module_of_an_adapter() -> None:
    assert GDNRow("qwen3_next", Adapted.BOTH, 1).case.slices == (12288, 64)
    assert GDNRow("qwen3_5", Adapted.BOTH, 1).case.slices == (8192, 4096, 32, 32)
    assert set(GDNRow("qwen3_5", Adapted.NONE, 3).token_slots) == {-1}
    assert set(GDNRow("qwen3_5", Adapted.QKVZ, 8).token_slots) == {0, 1, 2, 3}


def test_every_bar_met_on_all_rows_is_exit_code_0() -> None:
    run = figures()
    assert missed(run) == []
    assert judge(run) is ExitCode.OK
    assert list(measured(run).values()) == pytest.approx([0.2, 2.0, 2.0, 22 / 23, 2 / 3, 1.0, 0.9])


def test_the_mean_counts_drawn_rows_like_those_of_the_table() -> None:
    slow = [linear(row, dual=5.0, planned=5.0) for row in drawn_rows(1)]
    mean = figures(*slow).bars()[0]
    assert mean.measured == pytest.approx((0.2 * 0.5) ** 0.5)
    assert mean.verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("row", "added", "name"),
    [
        ("down.m1.r16", 3.1, "added time at M=1, rank 16, us: down"),
        ("qkv.m1.r16", 4.1, "added time at M=1, rank 16, us: qkv and gate_up"),
        ("gate_up.m1.r16", 4.1, "added time at M=1, rank 16, us: qkv and gate_up"),
    ],
)
def test_a_decode_row_has_a_bar_in_microseconds(row: str, added: float, name: str) -> None:
    (chosen,) = select_rows(listed_rows(), [row])
    # single is as slow, so that the plan is not to blame
    slow = linear(chosen, single=added, ahead=added, dual=added, planned=added)
    assert missed(figures(slow)) == [name]
    fast = added - 0.1
    sound = linear(chosen, single=added, ahead=added, dual=fast, planned=fast)
    assert missed(figures(sound)) == []


def test_a_bar_of_two_layers_is_open_where_one_of_them_was_not_measured() -> None:
    run = figures()
    without = tuple(one for one in run.measured if one.row.id != "gate_up.m1.r16")
    name = "added time at M=1, rank 16, us: qkv and gate_up"
    assert measured(replace(run, measured=without))[name] is None


def test_a_plan_that_takes_a_slow_form_on_one_row_misses_a_bar() -> None:
    row = drawn_rows(1)[4]
    name = "linear layer, planned form over the best one of one stream, worst row"
    run = figures(linear(row, single=3.0, dual=3.6, planned=3.6))
    assert missed(run) == [name]
    assert measured(run)[name] == pytest.approx(23.6 / 23)


def test_a_plan_is_compared_with_shrinking_ahead_as_well() -> None:
    run = figures(linear(DOWN, single=3.0, ahead=2.0, planned=3.0, chosen="single"))
    assert max(m.plan_ratio for m in run.linears) == pytest.approx(23 / 22)


def test_two_timings_of_the_planned_form_are_not_compared_with_each_other() -> None:
    noisy = linear(DOWN, single=2.0, planned=2.9, chosen="single")
    assert noisy.plan_ratio == 1.0
    # both are timings of what is added
    assert noisy.planned_added_us == pytest.approx(2.45)
    # a plan that takes another form is compared with the mean of both timings
    slow = linear(DOWN, single=2.0, dual=4.0, planned=3.0)
    assert slow.plan_ratio == pytest.approx(23.5 / 22)


def test_a_second_stream_must_gain_15_percent_on_one_row_of_the_table() -> None:
    name = "linear layer, added time with two streams over the best with one, best row"
    lost = [linear(row, dual=2.9, planned=3.0, chosen="single") for row in listed_rows()]
    run = figures(*lost)
    assert missed(run) == [name]
    assert measured(run)[name] == pytest.approx(2.9 / 3.0)
    # drawn rows gain as much as before
    assert min(m.dual_ratio or 9.0 for m in run.linears) == pytest.approx(2 / 3)
    won = figures(*lost[1:])
    assert missed(won) == []
    assert won.bars()[4].note == lost[0].row.id


@pytest.mark.parametrize("added", [-0.2, 0.0, 0.1, 0.5])
def test_a_hidden_delta_counts_as_what_the_noise_may_be(added: float) -> None:
    run = figures(linear(DOWN, single=4.0, dual=added, planned=added, theirs=2.0))
    (hidden,) = [m for m in run.linears if m.row == DOWN]
    assert hidden.ratio == pytest.approx(0.5 / 2.0)
    assert hidden.dual_ratio == pytest.approx(0.5 / 3.2)
    assert judge(run) is ExitCode.OK


def test_a_second_stream_is_compared_with_shrinking_ahead_as_well() -> None:
    assert linear(DOWN, single=3.0, ahead=2.0, dual=1.8, planned=1.8).dual_ratio == pytest.approx(
        0.9
    )


def test_of_two_streams_the_faster_form_that_a_batch_can_take_counts() -> None:
    assert linear(DOWN, single=3.0, dual=2.0, stored=1.5).dual_ratio == pytest.approx(0.5)
    assert linear(DOWN, single=3.0, dual=1.5, stored=2.0, planned=1.5).dual_ratio == pytest.approx(
        0.5
    )
    assert "| 3.0 | 3.2 | 2.0* | - | 2.0 |" in render_markdown(figures(linear(DOWN)))
    both = figures(linear(DOWN, stored=1.5, planned=1.5, chosen="stored"))
    assert "| 3.0 | 3.2 | 2.0 | 1.5* | 1.5 |" in render_markdown(both)


def test_an_input_projection_that_is_planned_badly_misses_a_bar_for_itself() -> None:
    name = "input projection of a gated delta net, planned form over the fastest, worst row"
    run = figures(gdn(GDN, chosen="merged", planned=16.0))
    assert missed(run) == [name]
    assert measured(run)[name] == pytest.approx(16 / 15)


def test_a_moe_layer_that_is_planned_badly_misses_a_bar_for_itself() -> None:
    name = "MoE layer, planned form over that of one stream, worst row"
    for shared in (False, True):
        run = figures(moe(MoERow(shared, 8), chosen="dual", planned=110.0))
        assert missed(run) == [name]
        assert measured(run)[name] == pytest.approx(1.1)
    # 2 % are allowed
    assert missed(figures(moe(MoERow(True, 8), chosen="beside", planned=112.0))) == []


@pytest.mark.parametrize(
    "run",
    [
        replace(figures(), measured=figures().measured[1:]),
        replace(figures(), measured=figures().measured[:-1]),
        figures(linear(DOWN, theirs=None)),
        figures(linear(DOWN, theirs=-0.1)),
    ],
    ids=["no first row", "no last row", "no second stream of vllm", "a baseline for nothing"],
)
def test_what_was_not_measured_is_exit_code_2_and_never_0(run: StreamFigures) -> None:
    assert judge(run) is ExitCode.INCOMPLETE


def test_a_run_without_a_baseline_is_incomplete_and_has_no_columns_for_it() -> None:
    alone = [replace(m, baseline=None) for m in figures().linears]
    run = replace(figures(*alone), baseline=None)
    assert judge(run) is ExitCode.INCOMPLETE
    assert "vllm" not in render_markdown(run) + render_terminal(run)


def test_rows_of_another_seed_are_complete_as_well() -> None:
    rows = [of_row(row) for row in stream_rows(9)]
    run = replace(figures(), measured=tuple(rows))
    assert run.complete
    assert run.payload()["seed"] == 9
    mixed = replace(run, measured=figures().measured[:31] + run.measured[31:])
    assert not mixed.complete


def test_a_record_round_trips_and_shows_the_seed_and_the_drawn_shapes() -> None:
    run = figures()
    payload: dict[str, Any] = json.loads(json.dumps(run.payload()))
    assert StreamFigures.from_payload(payload) == run
    assert (payload["expected"], payload["executed"], payload["seed"]) == (122, 122, 1)
    assert payload["linears"][30]["row"] == {
        "layer": "qwen2_5_7b.down",
        "shape": {"in_features": 18944, "slices": [3584]},
        "tokens": 15,
        "rank": 8,
        "seed": 1,
    }
    assert payload["linears"][0]["ratio"] == pytest.approx(0.2)
    assert payload["gdns"][0]["plan_ratio"] == pytest.approx(1.0)
    assert payload["moes"][0]["plan_ratio"] == pytest.approx(0.9)
    assert payload["bars"][4]["note"] == "qkv.m1.r16"


def test_a_record_of_a_newer_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="schema is 99, this version reads up to 1"):
        StreamFigures.from_payload(figures().payload() | {"schema": 99})


def test_the_markdown_tables_show_every_form_and_mark_the_one_of_the_plan() -> None:
    run = figures(linear(DOWN, planned=2.4), gdn(GDN, planned=15.2))
    lines = render_markdown(run).splitlines()
    assert lines[0] == (
        "| layer | M | rank | base | +single | +ahead | +dual | +stored | +planned | +vllm | "
        "+vllm dual | ratio | planned / one stream |"
    )
    assert (
        "| down 12288 -> 4096 | 1 | 16 | 20.0 | 3.0 | 3.2 | 2.0* | - | 2.4 | 12.0 | 10.0 | 0.22 | "
        "0.965 |"
    ) in lines
    assert "| both | 8 | 20.0 | 15.0* | 16.0 | 18.0 | 15.2 | 1.000 |" in "\n".join(lines)
    assert "| qwen3_next 2048 -> 12288, 64 | none | 1 |" in "\n".join(lines)
    assert "| qwen2_5_7b.down 18944 -> 3584 | 15 | 8 |" in "\n".join(lines)
    assert "| with a shared expert | 1 | 100.0 | 90.0* | 110.0 | 90.0 | 0.900 |" in lines


def test_both_renderings_say_what_was_drawn_and_where_a_second_stream_gains_most() -> None:
    run = figures(linear(DOWN, dual=1.5, planned=1.5))
    best = "down: with two streams LoRA adds 0.50 of what the best form of one stream adds at M=1"
    for text in (render_markdown(run), render_terminal(run)):
        assert "30 rows were drawn from seed 1" in text
        assert best in text
    assert f"bar {1.03}" in render_terminal(run)
    table = replace(run, measured=tuple(m for m in run.measured if m in run.listed))
    assert "no row was drawn" in render_terminal(table)


def test_the_plot_has_a_line_for_one_stream_the_plan_and_the_baseline_over_the_table() -> None:
    run = figures(linear(DOWN, dual=1.75, planned=1.75, theirs=-1.0))
    plot = streams_plot(run)
    assert [panel.title for panel in plot.panels] == ["qkv", "gate_up", "down"]
    lines = {(s.subject, s.rank): s.points for s in plot.panels[2].series}
    assert {name for name, _ in lines} == {"one stream", "planned", "vllm dual"}
    assert {rank for _, rank in lines} == {16, 64}
    assert lines["one stream", 16] == tuple((m, 3.0) for m in (1, 16, 64, 256, 2048))
    assert lines["planned", 16][0] == (1, 1.75)
    # the noise is larger than what it adds
    assert lines["vllm dual", 16] == tuple((m, 10.0) for m in (16, 64, 256, 2048))
