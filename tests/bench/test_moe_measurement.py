from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from loragate.bench import moe_align, moe_delta, moe_layer, moe_rows
from loragate.bench.compiling import compile_in_parallel
from loragate.bench.contender import Contender, Unavailable, WrongResult, find_contender
from loragate.bench.lorakernels_layer import ExpertsLayer
from loragate.bench.moe import measure, run_moe
from loragate.bench.moe_delta import count_buckets, make_step
from loragate.bench.moe_figures import (
    AlignFigures,
    DeltaFigures,
    ExpertsFigures,
    LayerFigures,
    MoEMeasured,
)
from loragate.bench.moe_rows import AlignRow, DeltaRow, ExpertsRow, LayerRow, MoERow, Projection
from loragate.core.machine import detect_machine
from loragate.matrix.case import Path, Site, Source
from loragate.subjects.lorakernels.moe_delta import MoEDelta
from lorakernels.moe.align.metadata import PairMetadata

MACHINE = detect_machine()
ROW = DeltaRow("qwen3_30b_w2", 16, 5)
SMALL = MappingProxyType(
    {
        "qwen3_30b_w13": Projection(32, (24, 24), 6, 3),
        "qwen3_30b_w2": Projection(24, (32,), 6, 3, Source.PAIR),
    }
)
_Key = TypeVar("_Key", bound=Hashable)


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_rows, "PROJECTIONS", SMALL)
    # experts are as many as in the table
    monkeypatch.setattr(moe_rows, "QWEN3_NEXT_W13", Projection(32, (24, 24), 512, 10))
    monkeypatch.setattr(moe_delta, "TOKENS", (5,))
    monkeypatch.setattr(moe_align, "ALIGN_TOKENS", (5,))
    monkeypatch.setattr(moe_layer, "LAYER_TOKENS", (5,))


@pytest.fixture(scope="module")
def ours() -> Contender:
    return find_contender("lorakernels")


def counted(calls: Mapping[_Key, Callable[[], object]]) -> dict[_Key, float]:
    """Time is the number of calls so far: nothing here depends on a clock or a device."""
    for call in calls.values():
        call()
    return {name: 10.0 * (index + 1) for index, name in enumerate(calls)}


def run(ours: Contender, row: MoERow) -> MoEMeasured:
    (found,) = measure(ours, None, [row], MACHINE, counted, print)
    return found


def test_every_path_of_a_delta_is_timed_and_its_plan_with_alignment_as_well(
    ours: Contender,
) -> None:
    found = run(ours, ROW)
    assert isinstance(found, DeltaFigures)
    times = found.subjects["lorakernels"]
    assert set(times.launch_us) == set(Path)
    assert times.aligned_us == {Path.PLAN: 20.0}
    assert 0.5 < times.error < 2
    assert found.chosen in set(Path) - {Path.PLAN}


def test_all_paths_of_a_baseline_are_timed_with_alignment_and_without_but_for_its_plan(
    ours: Contender,
) -> None:
    theirs = Contender(Mock(wraps=ours.subject), ours.have)
    theirs.subject.name = "vllm"
    (found,) = moe_delta.measure_deltas([ROW], [ours, theirs], MACHINE, counted)
    times = found.subjects["vllm"]
    assert set(times.launch_us) == set(times.aligned_us) == set(Path) - {Path.PLAN}


def test_deltas_with_alignment_are_timed_with_a_cold_cache_where_there_is_a_clock_for_it(
    ours: Contender,
) -> None:
    (found,) = measure(ours, None, [ROW], MACHINE, counted, print, cold=counted)
    assert isinstance(found, DeltaFigures)
    assert found.subjects["lorakernels"].cold_us == {Path.PLAN: 10.0}
    warm = run(ours, ROW)
    assert isinstance(warm, DeltaFigures)
    assert warm.subjects["lorakernels"].cold_us is None


def test_a_vllm_layer_that_cannot_be_called_is_reported_once_with_its_reason(
    ours: Contender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe_layer, "load_fused_experts", lambda machine: "it wants a server")
    baseline = Contender(Mock(), ours.have)
    baseline.subject.name = "vllm"
    lines: list[str] = []
    rows = [LayerRow(5), LayerRow(5)]
    found = list(moe_layer.measure_layers(rows, ours, baseline, MACHINE, counted, lines.append))
    assert [figures.baseline_us for figures in found] == [None, None]
    assert lines == ["no baseline of a whole layer: vllm: it wants a server"]


def test_a_step_has_distinct_experts_for_each_token_and_equal_runs_of_slots() -> None:
    batch = make_step(ROW, MACHINE)
    assert batch.routes is not None
    ids = batch.routes.topk_ids
    assert ids.dtype == torch.int32
    assert all(len(set(row)) == 3 and set(row) <= set(range(6)) for row in ids.tolist())
    assert batch.token_slots.tolist() == [0, 0, 1, 2, 3]
    assert batch.routes.weights is not None
    assert (len(batch.x), len(batch.out)) == (15, 15)


def test_a_bucket_counts_once_however_many_pairs_it_has() -> None:
    batch = make_step(ROW, MACHINE)
    assert batch.routes is not None
    batch.routes.topk_ids.copy_(torch.tensor([[0, 1, 2]] * 5))
    # two of the five tokens have the same slot
    assert count_buckets(ROW.case, batch) == 4 * 3


def test_an_alignment_is_timed_separately(ours: Contender) -> None:
    assert run(ours, AlignRow(5)) == AlignFigures(AlignRow(5), {"lorakernels": 10.0})


def test_few_and_many_experts_are_aligned_in_turns_by_both_subjects(
    ours: Contender, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = Contender(Mock(wraps=ours.subject), ours.have)
    theirs.subject.name = "vllm"
    right, aligned = PairMetadata.prepare, list[int]()

    def noted(self: PairMetadata, *arguments: Any, **others: Any) -> None:
        aligned.append(self.num_experts)
        # a delta needs no tiles of the base product
        assert not self.with_base
        right(self, *arguments, **others)

    def clock(calls: Mapping[_Key, Callable[[], object]]) -> dict[_Key, float]:
        aligned.clear()
        names = [f"{who} with {n} experts" for n in (64, 512) for who in ("lorakernels", "vllm")]
        assert list(map(str, calls)) == names
        return counted(calls)

    monkeypatch.setattr(PairMetadata, "prepare", noted)
    row = ExpertsRow(5)
    (found,) = measure(ours, theirs, [row], MACHINE, clock, print)
    few, many = {"lorakernels": 10.0, "vllm": 20.0}, {"lorakernels": 30.0, "vllm": 40.0}
    assert found == ExpertsFigures(row, few, many)
    assert aligned == [64, 64, 512, 512]


@pytest.mark.parametrize("experts", [64, 512])
def test_a_wrong_alignment_of_few_or_of_many_experts_is_never_timed(
    ours: Contender, experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = PairMetadata.prepare

    def without_a_pair(self: PairMetadata, *arguments: Any, **others: Any) -> None:
        right(self, *arguments, **others)
        if self.num_experts == experts:
            self.tile_pairs[0] = -1

    monkeypatch.setattr(PairMetadata, "prepare", without_a_pair)
    where = rf"lorakernels at align\.experts\.m5 with {experts} experts: its error is"
    with pytest.raises(WrongResult, match=where):
        run(ours, ExpertsRow(5))


def test_a_layer_is_timed_without_adapters_and_with_them(ours: Contender) -> None:
    found = run(ours, LayerRow(5))
    assert isinstance(found, LayerFigures)
    assert (found.base_us, found.lora_us, found.baseline_us) == (10.0, 20.0, None)
    assert all(0.5 < error < 2 for error in found.errors.values())


@pytest.mark.parametrize("row", [ROW, AlignRow(5)], ids=lambda row: row.id)
def test_a_wrong_delta_is_never_timed(
    ours: Contender, row: MoERow, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = MoEDelta.launch

    def without_a_pair(self: MoEDelta, x: Tensor, out: Tensor, *rest: object) -> Tensor:
        before = out[0].clone()
        result = right(self, x, out, *rest)  # type: ignore[arg-type]
        result[0] = before
        return result

    monkeypatch.setattr(MoEDelta, "launch", without_a_pair)
    with pytest.raises(WrongResult, match=rf"lorakernels.* at {row.id}: its error is"):
        run(ours, row)


@pytest.mark.parametrize("half", ["without", "with_adapters"])
def test_a_wrong_layer_is_never_timed(
    ours: Contender, half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(ExpertsLayer, half)
    monkeypatch.setattr(ExpertsLayer, half, lambda *arguments: right(*arguments).mul_(0.9))
    words = half.replace("_", " ").replace("without", "without adapters")
    with pytest.raises(WrongResult, match=rf"{words} at layer\.m5: its error is"):
        run(ours, LayerRow(5))


def test_a_row_that_is_larger_than_those_of_the_table_finds_its_buffers(ours: Contender) -> None:
    found = run(ours, DeltaRow("32x24+24/6/3", 8, 7))
    assert found.row.id == "32x24+24/6/3.m7.r8"


def test_a_run_has_every_row_in_the_order_of_the_tables(
    ours: Contender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loragate.bench.moe.in_turns", counted)
    monkeypatch.setattr("loragate.bench.moe.in_turns_cold", counted)
    monkeypatch.setattr("loragate.bench.moe.copy_bytes_per_s", lambda: 4e12)
    lines: list[str] = []
    rows = (ROW, AlignRow(5), ExpertsRow(5), LayerRow(5))
    found = run_moe(ours, None, rows, MACHINE, lines.append)
    assert tuple(figures.row for figures in found.measured) == rows
    assert lines[1] == "[2/4] align.m5: lorakernels 10.0"
    many = "64 experts lorakernels 10.0; 512 experts lorakernels 20.0"
    assert lines[2] == f"[3/4] align.experts.m5: {many}"
    assert lines[3] == "[4/4] layer.m5: base 10.0, LoRA adds 100%"


def test_a_baseline_without_moe_is_refused_before_anything_runs(
    ours: Contender, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = replace(ours, have=replace(ours.have, sites=frozenset({Site.DENSE_DELTA})))
    with pytest.raises(Unavailable, match="lorakernels: site moe_delta is not supported"):
        run_moe(ours, theirs, [ROW], MACHINE, print)


def test_a_row_that_cannot_be_compiled_ahead_is_reported_and_the_others_continue() -> None:
    (error,) = compile_in_parallel(measure, ["lorakernel"], [ROW])
    assert error.startswith("qwen3_30b_w2.m5.r16: Unavailable: ")
