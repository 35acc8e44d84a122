"""Ids and seeds identify results in history and in replay commands: literal values pin them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from loragate.core.verdict import OracleName
from loragate.matrix.case import (
    Case,
    Dtype,
    Execution,
    ExpertMap,
    Layout,
    Mix,
    Parallel,
    Path,
    Quantisation,
    Ranks,
    RouterWeights,
    Routing,
    Sharing,
    Site,
    Source,
    Tier,
    Write,
)
from loragate.matrix.ids import case_id, run_id, seed_of

DENSE = Case(
    site=Site.DENSE_DELTA,
    tokens=17,
    in_features=100,
    slices=(48, 16, 16),
    rank=8,
    slots=4,
    dtype=Dtype.BF16,
)
LINEAR = Case(
    site=Site.LORA_LINEAR,
    tokens=256,
    in_features=4096,
    slices=(12288, 12288),
    rank=320,
    slots=8,
    dtype=Dtype.FP16,
    mix=Mix.SHUFFLED,
    ranks=Ranks.FULL,
    layout=Layout.COLUMN_SLICE,
    execution=Execution.GRAPH,
    parallel=Parallel.COLUMN,
    tp=4,
)


def test_the_id_of_a_dense_case_is_sorted_axis_value_text() -> None:
    assert case_id(DENSE) == (
        "dense_delta.dtype-bf16.exec-eager.in-100.layout-contiguous.mix-ragged.rank-8"
        ".ranks-mixed.slices-48x16x16.slots-4.tokens-17"
    )


def test_the_id_of_a_linear_case_also_names_its_cut() -> None:
    assert case_id(LINEAR) == (
        "lora_linear.dtype-fp16.exec-graph.in-4096.layout-column_slice.mix-shuffled"
        ".parallel-column.rank-320.ranks-full.slices-12288x12288.slots-8.tokens-256.tp-4"
    )


MOE = Case(
    site=Site.MOE_DELTA,
    tokens=9,
    in_features=2048,
    slices=(768, 768),
    rank=16,
    slots=4,
    dtype=Dtype.BF16,
    experts=128,
    top_k=8,
    source=Source.PAIR,
    routing=Routing.SKEWED,
    expert_map=ExpertMap.PARALLEL,
    sharing=Sharing.SHARED_A,
    router=RouterWeights.OUTPUT,
    write=Write.STORE,
    path=Path.ONE_SHOT,
)


def test_the_id_of_an_moe_delta_names_all_axes_of_its_site() -> None:
    assert case_id(MOE) == (
        "moe_delta.dtype-bf16.exec-eager.experts-128.in-2048.layout-contiguous.map-parallel"
        ".mix-ragged.path-one_shot.rank-16.ranks-mixed.router-output.routing-skewed"
        ".sharing-shared_a.slices-768x768.slots-4.source-pair.tokens-9.topk-8.write-store"
    )
    assert seed_of(MOE, 0) == 5854025133468737297


LAYER = Case(
    site=Site.MOE_LAYER,
    tokens=9,
    in_features=2048,
    slices=(768, 768),
    rank=16,
    slots=4,
    dtype=Dtype.BF16,
    experts=128,
    top_k=8,
    tp=2,
    ep=4,
    sharing=Sharing.SHARED_OUTER,
    router=RouterWeights.INPUT,
)


def test_the_id_of_an_moe_layer_names_its_cut_and_its_quantisation() -> None:
    assert case_id(LAYER) == (
        "moe_layer.dtype-bf16.ep-4.exec-eager.experts-128.in-2048.layout-contiguous.mix-ragged"
        ".quant-none.rank-16.ranks-mixed.router-input.routing-uniform.sharing-shared_outer"
        ".slices-768x768.slots-4.tokens-9.topk-8.tp-2"
    )
    others: dict[str, Any] = {
        "tp": 1,
        "ep": 2,
        "quantisation": Quantisation.FP8,
        "sharing": Sharing.PER_EXPERT,
        "router": RouterWeights.OUTPUT,
        "routing": Routing.SKEWED,
        "experts": 64,
        "top_k": 4,
    }
    ids = {case_id(replace(LAYER, **{axis: value})) for axis, value in others.items()}
    assert len(ids | {case_id(LAYER)}) == len(others) + 1


def test_a_run_id_puts_the_subject_first() -> None:
    assert run_id("vllm", DENSE) == f"vllm.{case_id(DENSE)}"


def test_seeds_never_change_and_differ_between_draws() -> None:
    assert seed_of(DENSE, 0) == 6834784917668034657
    assert seed_of(DENSE, 1) == 1975968193862185032
    assert seed_of(LINEAR, 0) == 7424318564280684574


def test_every_axis_enters_the_id_but_the_way_of_running_does_not() -> None:
    other: dict[str, Any] = {
        "tokens": 18,
        "in_features": 101,
        "slices": (48, 32),
        "rank": 9,
        "slots": 5,
        "dtype": Dtype.FP32,
        "mix": Mix.SINGLE,
        "ranks": Ranks.FULL,
        "layout": Layout.TRANSPOSED,
        "execution": Execution.GRAPH,
        "parallel": Parallel.ROW,
        "tp": 2,
    }
    linear = replace(LINEAR, execution=Execution.EAGER, ranks=Ranks.MIXED)
    ids = {case_id(replace(linear, **{axis: value})) for axis, value in other.items()}
    assert len(ids | {case_id(linear)}) == len(other) + 1
    experts: dict[str, Any] = {
        "experts": 64,
        "top_k": 7,
        "source": Source.TOKEN,
        "routing": Routing.UNIFORM,
        "expert_map": ExpertMap.LOCAL,
        "sharing": Sharing.SHARED_B,
        "router": RouterWeights.NONE,
        "write": Write.ADD,
        "path": Path.SMALL_BATCH,
    }
    ids = {case_id(replace(MOE, **{axis: value})) for axis, value in experts.items()}
    assert len(ids | {case_id(MOE)}) == len(experts) + 1
    run_otherwise = replace(DENSE, tier=Tier.NIGHTLY, oracles=(OracleName.EXACT,), timeout_s=1.0)
    assert case_id(run_otherwise) == case_id(DENSE)
