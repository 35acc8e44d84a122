from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from loragate.bench.bars import Bar
from loragate.bench.figures import PREFILL_TOKENS, DenseFigures, RowFigures, StepFigures, Times
from loragate.bench.rows import DenseRow, dense_rows
from loragate.bench.select import select_rows
from loragate.bench.tables import render_markdown, render_terminal
from loragate.commands.bench import judge
from loragate.core.verdict import ExitCode, Verdict
from loragate.matrix.ids import case_id


def figures(
    ours: float = 3.0, theirs: float = 10.0, rows: tuple[DenseRow, ...] | None = None
) -> DenseFigures:
    """Every row adds `ours` and `theirs` microseconds to a base of 50."""
    return DenseFigures(
        candidate="lorakernels",
        baseline="vllm",
        copy_bytes_per_s=4.0e12,
        rows=tuple(
            RowFigures(
                row,
                base_us=50.0,
                with_lora_us={"lorakernels": 50.0 + ours, "vllm": 50.0 + theirs},
                errors={"lorakernels": 1.0, "vllm": 1.4},
            )
            for row in (dense_rows() if rows is None else rows)
        ),
        steps=(StepFigures("lorakernels", 16, 8, 8, 12.0, 20.0, 3.5),),
    )


def with_floor_ratio(factor: float) -> DenseFigures:
    """Rows of M=2048 add `factor` times their floor, and a fifth of what the baseline adds."""
    run = figures()
    rows = []
    for row in run.rows:
        added = factor * row.floor_us()
        times = {"lorakernels": 50.0 + added, "vllm": 50.0 + 5 * added}
        rows.append(replace(row, with_lora_us=times))
    return replace(run, rows=tuple(rows))


def test_the_table_is_three_layers_by_five_batches_by_two_ranks_with_unique_ids() -> None:
    rows = dense_rows()
    assert len({row.id for row in rows}) == len({case_id(row.case) for row in rows}) == 30
    assert [row.id for row in rows[:3]] == ["qkv.m1.r16", "qkv.m1.r64", "qkv.m16.r16"]


@pytest.mark.parametrize(
    ("row", "microseconds"),
    [
        (DenseRow("qkv", 1, 16), 0.1),
        (DenseRow("qkv", 16, 64), 2.3),
        (DenseRow("gate_up", 256, 16), 7.3),
        (DenseRow("gate_up", 2048, 64), 54.6),
        (DenseRow("down", 2048, 16), 20.0),
    ],
)
def test_the_floor_counts_touched_factors_and_input_once_and_output_twice(
    row: DenseRow, microseconds: float
) -> None:
    measured = RowFigures(row, base_us=0, with_lora_us={}, errors={})
    assert round(measured.floor_us(), 1) == microseconds


def test_a_batch_with_fewer_rows_than_slots_touches_fewer_slots() -> None:
    assert DenseRow("down", 1, 16).token_slots == (0,)
    assert set(DenseRow("down", 16, 16).token_slots) == {0, 1, 2, 3}


def test_a_pattern_selects_rows_and_one_without_matches_is_an_error_that_names_some() -> None:
    assert [row.id for row in select_rows(dense_rows(), ["down.m2048.*"])] == [
        "down.m2048.r16",
        "down.m2048.r64",
    ]
    assert select_rows(dense_rows(), []) == dense_rows()
    with pytest.raises(ValueError, match=r"'up\.\*' matches none of the 30 rows.*'qkv\.m1\.r16'"):
        select_rows(dense_rows(), ["down.*", "up.*"])


def test_the_mean_ratio_is_geometric() -> None:
    run = figures(rows=dense_rows()[:2])
    first, second = run.rows
    slow = replace(second, with_lora_us={"lorakernels": 50.0 + 8.0, "vllm": 50.0 + 2.0})
    fast = replace(first, with_lora_us={"lorakernels": 50.0 + 1.0, "vllm": 50.0 + 4.0})
    mean, worst, *_ = replace(run, rows=(fast, slow)).bars()
    assert mean.measured == pytest.approx(1.0)
    assert worst.measured == pytest.approx(4.0)


def test_every_bar_met_on_the_whole_table_is_exit_code_0() -> None:
    run = with_floor_ratio(1.5)
    assert [bar.verdict for bar in run.bars()] == [Verdict.PASS] * 4
    assert judge(run) is ExitCode.OK


@pytest.mark.parametrize(
    ("run", "missed"),
    [
        (figures(ours=4.0, theirs=10.0), "geometric mean"),
        (with_floor_ratio(1.9), "byte floor"),
    ],
)
def test_a_missed_bar_is_exit_code_1(run: DenseFigures, missed: str) -> None:
    assert any(missed in bar.name for bar in run.bars() if bar.verdict is Verdict.FAIL)
    assert judge(run) is ExitCode.WRONG


def test_one_row_above_the_bar_over_its_floor_misses_it_whatever_the_others() -> None:
    run = with_floor_ratio(1.2)
    large = next(row for row in run.rows if row.row.tokens == PREFILL_TOKENS)
    added = 1.9 * large.floor_us()
    slow = replace(large, with_lora_us={"lorakernels": 50.0 + added, "vllm": 50.0 + 5 * added})
    run = replace(run, rows=tuple(slow if row is large else row for row in run.rows))
    assert ["byte floor" in bar.name for bar in run.bars() if bar.verdict is Verdict.FAIL] == [True]


def test_a_figure_that_is_no_number_meets_no_bar() -> None:
    assert Bar("ratio", 1.0, math.nan).verdict is Verdict.FAIL


def with_cold(ours: float, theirs: float, run: DenseFigures) -> DenseFigures:
    """The first row adds so many microseconds to a cold base of 60."""
    times = Times(60.0, {"lorakernels": 60.0 + ours, "vllm": 60.0 + theirs})
    first, *others = run.rows
    return replace(run, rows=(replace(first, cold=times), *others))


def test_a_row_that_is_slower_with_a_cold_cache_misses_a_bar_of_its_own() -> None:
    missed = [bar for bar in with_cold(8.0, 5.0, figures()).bars() if bar.verdict is Verdict.FAIL]
    assert [bar.name for bar in missed] == ["added time over vllm, cold L2, worst row"]
    assert judge(with_cold(4.0, 5.0, figures())) is ExitCode.OK
    # below the noise
    assert judge(with_cold(-1.0, 5.0, figures())) is ExitCode.INCOMPLETE


def test_the_table_has_columns_of_the_cold_cache_where_it_was_measured() -> None:
    run = with_cold(4.0, 5.0, figures(rows=dense_rows()[:2]))
    header, _, first, second = render_markdown(run).splitlines()
    assert header.endswith("over floor | cold: base | +lorakernels | +vllm | ratio |")
    assert first.endswith("| 60.0 | 4.0 | 5.0 | 0.80 |")
    assert second.count("|") == first.count("|")
    assert "cold: base" not in render_markdown(figures())


def test_one_row_slower_than_the_baseline_misses_a_bar_whatever_the_mean() -> None:
    run = with_floor_ratio(1.5)
    slow = replace(run.rows[0], with_lora_us={"lorakernels": 58.0, "vllm": 57.0})
    mean, worst, *_ = replace(run, rows=(slow, *run.rows[1:])).bars()
    assert mean.verdict is Verdict.PASS
    assert worst.verdict is Verdict.FAIL


@pytest.mark.parametrize(("tokens", "verdict"), [(64, Verdict.FAIL), (256, Verdict.PASS)])
def test_a_row_of_up_to_64_tokens_that_takes_over_0_6_of_the_baseline_misses_their_bar(
    tokens: int, verdict: Verdict
) -> None:
    run = with_floor_ratio(1.5)
    rows = [
        replace(row, with_lora_us={"lorakernels": row.base_us + 7.0, "vllm": row.base_us + 10.0})
        if row.row.tokens == tokens
        else row
        for row in run.rows
    ]
    by_name = {bar.name: bar for bar in replace(run, rows=tuple(rows)).bars()}
    assert by_name["added time over vllm, at most 64 tokens, worst row"].verdict is verdict


@pytest.mark.parametrize(
    "run",
    [
        replace(with_floor_ratio(1.5), baseline=None),
        replace(with_floor_ratio(1.5), rows=with_floor_ratio(1.5).rows[1:]),
    ],
    ids=["no baseline", "a row is missing"],
)
def test_what_was_not_measured_is_exit_code_2_and_never_0(run: DenseFigures) -> None:
    assert judge(run) is ExitCode.INCOMPLETE


def test_as_many_other_rows_as_the_table_has_are_not_the_table() -> None:
    run = with_floor_ratio(1.5)
    other = replace(run.rows[0], row=DenseRow("8192x8192", 1, 16))
    assert judge(replace(run, rows=(other, *run.rows[1:]))) is ExitCode.INCOMPLETE


def test_a_row_whose_added_time_is_below_the_noise_leaves_the_comparison_open() -> None:
    run = with_floor_ratio(1.5)
    noisy = replace(run.rows[0], with_lora_us={"lorakernels": 50.5, "vllm": 49.9})
    run = replace(run, rows=(noisy, *run.rows[1:]))
    assert run.ratios()[0] is None
    assert [bar.measured for bar in run.bars()[:3]] == [None] * 3
    assert judge(run) is ExitCode.INCOMPLETE


def test_a_record_round_trips_and_states_expected_and_executed() -> None:
    run = with_floor_ratio(1.5)
    cold = with_cold(4.0, 5.0, figures())
    assert DenseFigures.from_payload(json.loads(json.dumps(cold.payload()))) == cold
    payload: dict[str, Any] = json.loads(json.dumps(run.payload()))
    assert DenseFigures.from_payload(payload) == run
    assert (payload["expected"], payload["executed"]) == (30, 30)
    assert payload["bars"][0] == {
        "name": "added time over vllm, geometric mean",
        "target": 0.3,
        "measured": pytest.approx(0.2),
        "note": "",
        "verdict": "pass",
    }


def test_a_record_of_a_newer_schema_is_refused() -> None:
    payload = figures().payload() | {"schema": 99}
    with pytest.raises(ValueError, match="schema is 99, this version reads up to 1"):
        DenseFigures.from_payload(payload)


def test_the_markdown_table_names_each_layer_once_and_shows_ratio_and_floor() -> None:
    lines = render_markdown(figures(ours=2.5)).splitlines()
    assert lines[0] == (
        "| site | M | rank | base | +lorakernels | +vllm | ratio | floor | over floor |"
    )
    assert lines[2] == (
        "| qkv 4096 -> 4096+1024+1024 | 1 | 16 | 50.0 | 2.5 | 10.0 | 0.25 | 0.1 | 17.3 |"
    )
    assert lines[3].startswith("|  | 1 | 64 |")
    assert len(lines) == 2 + len(dense_rows())


def test_the_terminal_table_shows_the_metadata_of_a_step_and_every_bar() -> None:
    text = render_terminal(replace(figures(), baseline=None))
    assert "lorakernels  16       8  12.0   20.0     3.5" in text
    assert "inconclusive added time over a baseline, geometric mean: -, bar 0.3" in text
    assert "this machine copies 4.00 TB/s" in text
