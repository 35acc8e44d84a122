"""Rows, bars, record and tables of `bench engine`, from figures that are made up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loragate.bench.engine_figures import (
    EngineFigures,
    EngineRowFigures,
    KernelCounts,
    ServedFigures,
)
from loragate.bench.engine_rows import (
    ADAPTERS,
    BATCHED_TOKENS,
    MAX_LENGTH,
    MAX_REQUESTS,
    EngineRow,
    Load,
    Serving,
    Work,
    engine_rows,
)
from loragate.bench.engine_tables import render_markdown, render_terminal
from loragate.bench.select import select_rows
from loragate.core.verdict import Verdict
from loragate.docs.pages import Records
from loragate.docs.results import bars_table, summary

BASE, VLLM, OURS = Serving.BASE, Serving.VLLM, Serving.LORAKERNELS
DENSE, MOE = "qwen3_8b", "qwen3_30b_a3b"
NOTHING = {"linear": 0, "logits": 0, "experts": 0}
ALL = {"linear": 5, "logits": 5, "experts": 5}


def by_engine(base: float, vllm: float, ours: float) -> dict[Serving, float]:
    return {BASE: base, VLLM: vllm, OURS: ours}


def measured(row: EngineRow) -> EngineRowFigures:
    replays = by_engine(95.0, 150.0, 110.0) if row.work is Work.DECODE else {}
    return EngineRowFigures(row, by_engine(100.0, 200.0, 140.0), replays)


def served(
    serving: Serving,
    model: str = MOE,
    launched: Mapping[str, int] = NOTHING,
    captured: Mapping[str, int] = NOTHING,
    vllms: tuple[int, ...] = (0, 0),
) -> ServedFigures:
    return ServedFigures(model, serving, 40.0, KernelCounts(launched, captured, *vllms))


ENGINES = (
    served(BASE),
    served(VLLM, vllms=(7, 2)),
    # embeddings keep vLLM's kernels
    served(OURS, launched=ALL, captured=ALL, vllms=(3, 1)),
)
GOOD = EngineFigures(OURS, VLLM, tuple(measured(row) for row in engine_rows()), ENGINES)


def row_of(name: str) -> EngineRow:
    (row,) = select_rows(engine_rows(), [name])
    return row


def with_one(name: str, **changes: Any) -> EngineFigures:
    row = row_of(name)
    rows = [replace(one, **changes) if one.row == row else one for one in GOOD.rows]
    return replace(GOOD, rows=tuple(rows))


def test_rows_cover_both_models_and_have_ids_of_their_own() -> None:
    rows = engine_rows()
    assert len({row.id for row in rows}) == len(rows)
    assert [row.id for row in rows if row.model == DENSE] == [
        "qwen3_8b.decode.b16",
        "qwen3_8b.decode.b64",
        "qwen3_8b.prefill.b16",
        "qwen3_8b.serve.b64",
    ]
    assert {row.model for row in rows} == {DENSE, MOE}


def test_the_two_loads_of_a_row_differ_by_what_the_time_is_divided_by() -> None:
    few, many = row_of("qwen3_8b.decode.b16").loads
    assert (few.requests, few.prompt) == (many.requests, many.prompt) == (16, 32)
    assert many.new_tokens - few.new_tokens == row_of("qwen3_8b.decode.b16").units
    # all prompts of a decode batch are one step, and those of a prefill fill each of its steps
    few, many = row_of("qwen3_8b.prefill.b16").loads
    assert few.new_tokens == many.new_tokens == 1
    assert few.requests * few.prompt == BATCHED_TOKENS
    assert (many.requests - few.requests) * few.prompt == row_of("qwen3_8b.prefill.b16").units
    assert BATCHED_TOKENS >= 64 * 32
    assert all(load.requests <= MAX_REQUESTS for row in engine_rows() for load in row.loads)
    assert MAX_LENGTH == 1025


@pytest.mark.parametrize(
    ("name", "unit_us"),
    [
        ("qwen3_8b.decode.b64", 700.0),
        # a step of a prompt takes ten times as long, and computes all tokens of a step
        ("qwen3_8b.prefill.b16", 7000.0 / BATCHED_TOKENS),
    ],
)
def test_what_two_loads_have_in_common_is_not_in_their_difference(
    name: str, unit_us: float
) -> None:
    def seconds(load: Load) -> float:
        prefill_steps = load.requests * load.prompt / BATCHED_TOKENS
        # the start of an engine's call, a step, and a decode step
        return 3.0 + 7000e-6 * prefill_steps + 700e-6 * load.new_tokens

    assert row_of(name).microseconds(seconds) == pytest.approx(unit_us)


def test_requests_that_are_served_whole_are_timed_whole() -> None:
    # 0.64 s for 64 tokens of each of 64 requests
    row = row_of("qwen3_8b.serve.b64")
    assert row.microseconds(lambda load: load.requests / 100.0) == pytest.approx(156.25)


def test_requests_take_the_adapters_in_turns_and_the_base_model_where_it_is_served() -> None:
    turns = [*range(ADAPTERS)]
    assert [Load(8, 1, 1).adapter_of(request) for request in range(8)] == turns * 2
    mixed = Load(10, 1, 1, serves_base=True)
    assert [mixed.adapter_of(request) for request in range(10)] == [*turns, None] * 2


def test_figures_within_all_bars_pass() -> None:
    assert GOOD.complete
    assert [bar.verdict for bar in GOOD.bars()] == [Verdict.PASS] * 6
    assert measured(row_of("qwen3_8b.decode.b16")).ratio == pytest.approx(0.4)
    assert measured(row_of("qwen3_8b.serve.b64")).ratio == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("name", "ours", "missed"),
    [
        ("qwen3_8b.decode.b16", 161.0, {0}),
        ("qwen3_8b.prefill.b16", 161.0, {1}),
        ("qwen3_30b_a3b.decode.b64", 151.0, {2}),
        ("qwen3_30b_a3b.prefill.b16", 151.0, {3}),
        ("qwen3_30b_a3b.serve.b64", 174.5, {4}),
        ("qwen3_8b.serve.b64", 201.0, {5}),
        ("qwen3_8b.decode.b64", 202.0, {0, 5}),
    ],
)
def test_one_row_beyond_a_bar_misses_it(name: str, ours: float, missed: set[int]) -> None:
    bars = with_one(name, us=by_engine(100.0, 200.0, ours)).bars()
    assert {n for n, bar in enumerate(bars) if bar.verdict is Verdict.FAIL} == missed
    assert not [bar for bar in bars if bar.verdict is Verdict.INCONCLUSIVE]


@pytest.mark.parametrize(
    "changes",
    [
        # a third of a step is in its graph
        {"replay_us": by_engine(30.0, 60.0, 40.0)},
        # less than two engines differ by
        {"us": by_engine(100.0, 101.0, 100.5)},
        {"us": by_engine(100.0, 90.0, 80.0)},
        # faster with adapters than without, which is noise and meets no bar
        {"us": by_engine(100.0, 200.0, 99.0)},
    ],
)
def test_a_ratio_of_what_cannot_be_seen_is_none(changes: dict[str, Any]) -> None:
    figures = with_one("qwen3_8b.decode.b16", **changes)
    assert figures.rows[0].ratio is None
    undecided = [bar.verdict is Verdict.INCONCLUSIVE for bar in figures.bars()]
    assert undecided == [True, False, False, False, False, True]


def test_a_bar_of_which_a_row_is_missing_is_inconclusive() -> None:
    few = tuple(one for one in GOOD.rows if one.row.id != "qwen3_8b.decode.b64")
    figures = replace(GOOD, rows=few)
    assert not figures.complete
    assert figures.bars()[0].verdict is Verdict.INCONCLUSIVE
    assert figures.bars()[1].verdict is Verdict.PASS
    nothing = replace(GOOD, rows=())
    assert {bar.verdict for bar in nothing.bars()} == {Verdict.INCONCLUSIVE}


def test_engines_that_were_served_by_the_kernels_of_their_name_have_no_problem() -> None:
    assert [one.problem for one in ENGINES] == [None] * 3
    dense = {"linear": 5, "logits": 5, "experts": 0}
    assert served(OURS, DENSE, launched=dense, captured=dense).problem is None


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        (served(OURS), "'linear', 0 calls launched"),
        (served(OURS, launched=ALL), "0 were captured; it did not serve the engine"),
        (
            served(OURS, launched=ALL, captured={"linear": 5, "experts": 0}),
            "'experts', 5 calls launched kernels and 0 were captured",
        ),
        (served(VLLM, vllms=(7, 2), launched={"linear": 2}), "vllm: the plug-in ran 2 times"),
        (served(BASE, captured={"experts": 4}), "base: the plug-in ran 4 times"),
        (served(VLLM, vllms=(0, 2)), "vllm: vLLM's kernels of adapters were launched 0 times"),
        (served(VLLM, vllms=(7, 0)), "vllm: vLLM's kernels of adapters were captured 0 times"),
        (served(BASE, vllms=(1, 0)), "base: vLLM's kernels of adapters were launched 1 times"),
        (
            served(OURS, launched=ALL, captured=ALL, vllms=(3, 1, 2)),
            "vLLM's kernels of linear layers and experts ran or were captured 2 times",
        ),
    ],
)
def test_an_engine_that_other_kernels_served_says_which(
    engine: ServedFigures, problem: str
) -> None:
    assert engine.problem is not None
    assert problem in engine.problem


def test_a_record_reads_as_the_figures_that_were_written() -> None:
    written = json.loads(json.dumps(GOOD.payload()))
    assert EngineFigures.from_payload(written) == GOOD
    with pytest.raises(ValueError, match="schema is 99"):
        EngineFigures.from_payload(written | {"schema": 99})


def test_tables_name_every_row_engine_and_bar() -> None:
    text, page = render_terminal(GOOD), render_markdown(GOOD)
    for bar in GOOD.bars():
        assert bar.name in text
    line = "| qwen3_8b decode step | 64 | 100.0 | 40.0 | 100.0 | 0.40 | 95.0 | 15.0 | 55.0 |"
    assert line in page
    assert "| qwen3_8b prefill token | 16 | 100.000 | 40.000 | 100.000 | 0.40 | - | - | - |" in page
    assert "| qwen3_30b_a3b | 64 | 10000 | 7143 | 5000 | 1.43 |" in page
    assert "| qwen3_30b_a3b | lorakernels | 40 | 15 | 15 | 3 | 1 |" in page
    only_served = replace(GOOD, rows=GOOD.rows[3:4], engines=())
    assert len(render_markdown(only_served).splitlines()) == 3


def test_pages_show_the_engines_once_they_are_recorded() -> None:
    records = Records(Path(__file__).parents[2])
    dense, moe, gate = map(records.gpu, ("bench_dense", "bench_moe", "gate"))
    seeds = records.seeds()
    engine = GOOD.payload() | {"versions": {"vllm": "0.26.0"}}
    lines = summary(dense, moe, gate, seeds, engine=engine).splitlines()
    (line,) = [line for line in lines if "whole engine" in line]
    assert "engine of vllm 0.26.0, the plug-in adds **0.40** of the time" in line
    assert "1.43 (qwen3_8b, 36 layers) and 1.43 (qwen3_30b_a3b, 16 layers)" in line
    without = summary(dense, moe, gate, seeds)
    assert "whole engine" not in without
    rows = bars_table(dense, moe, engine=engine).splitlines()
    assert sum("`bench engine`: " in row for row in rows) == len(GOOD.bars())
    assert rows[:-6] == bars_table(dense, moe).splitlines()
