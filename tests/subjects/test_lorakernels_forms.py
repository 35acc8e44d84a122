"""That what a case asks for reaches the project's kernels. Most forms give the same numbers, so
that no oracle would notice one that never runs."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch

from loragate.core.machine import detect_machine, select_interpreter
from loragate.core.verdict import OracleName
from loragate.execution.session import inputs_of
from loragate.inputs import DataKind
from loragate.matrix.case import (
    Base,
    Beside,
    Buffers,
    Case,
    Dtype,
    GateUp,
    Loading,
    Parallel,
    Path,
    Placement,
    Plans,
    Products,
    Quantisation,
    Ranks,
    RouterWeights,
    Sharding,
    Site,
    Streams,
)
from loragate.protocol import Trial
from loragate.subjects import find_subject
from loragate.subjects.lorakernels import dense_delta as dense_module
from loragate.subjects.lorakernels import moe_delta as moe_module
from lorakernels.batch.metadata import BatchMetadata
from lorakernels.dense.forms import LinearForm
from lorakernels.dense.weights import SlotWeights
from lorakernels.gdn.forms import GDNForm
from lorakernels.layers.embedding import LoRAEmbedding
from lorakernels.layers.gdn import GatedDeltaNetInputProjection
from lorakernels.layers.linear import LoRALinear
from lorakernels.layers.moe import FusedMoELoRA
from lorakernels.layers.wrapped import WrappedLoRALinear
from lorakernels.moe.delta.ops import MoEPath
from lorakernels.moe.layer.forms import MoEForm
from lorakernels.runtime.options import BATCH_INVARIANT

select_interpreter()
CASE = Case(
    site=Site.DENSE_DELTA,
    tokens=4,
    in_features=16,
    slices=(16, 8),
    rank=4,
    slots=2,
    dtype=Dtype.BF16,
    oracles=(OracleName.REFERENCE,),
)
LINEAR = replace(CASE, site=Site.LORA_LINEAR)
NET = replace(CASE, site=Site.GDN_IN_PROJ, slices=(40, 24, 4, 4), key_heads=2)
MOE = replace(CASE, site=Site.MOE_DELTA, experts=4, top_k=2, slices=(16, 16))
LAYER = replace(MOE, site=Site.MOE_LAYER, router=RouterWeights.OUTPUT)
EMBEDDING = replace(CASE, site=Site.EMBEDDING, slices=(16,))


class Step:
    """An instance of a case, its adapters, and its first step."""

    def __init__(self, case: Case) -> None:
        machine, subject = detect_machine(), find_subject("lorakernels")
        have = subject.capabilities(machine)
        assert not isinstance(have, str)
        trial = Trial(case, subject, have, machine, seed=5)
        self.pool, self.batch, base = inputs_of(trial, DataKind.SIGNED)
        self.own: Any = subject.open(case, machine, base)

    def load(self) -> None:
        for slot in range(self.pool.num_slots):
            self.own.load(slot, self.pool)

    def run(self) -> None:
        self.load()
        self.own.prepare(self.batch.token_slots)
        routes = () if self.batch.routes is None else (self.batch.routes,)
        self.own.apply(self.batch.x, self.batch.out, *routes)


class Calls:
    """Notes what a function is called with, and whether one plan is asked for; and calls it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.args: list[tuple[Any, ...]] = []
        self.options: list[dict[str, Any]] = []
        self.one_plan: list[str | None] = []
        own = getattr(owner, name)

        def noted(*args: Any, **options: Any) -> Any:
            self.args.append(args)
            self.options.append(options)
            self.one_plan.append(os.environ.get(BATCH_INVARIANT))
            return own(*args, **options)

        monkeypatch.setattr(owner, name, noted)


@pytest.mark.parametrize(
    ("changed", "form"),
    [
        ({}, None),
        ({"streams": Streams.DUAL}, LinearForm.DUAL),
        ({"streams": Streams.DUAL, "beside": Beside.DELTA}, LinearForm.STORED),
    ],
)
def test_a_linear_layer_runs_in_the_form_of_its_case(
    changed: dict[str, Any], form: LinearForm | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch, LoRALinear, "forward")
    Step(replace(LINEAR, **changed)).run()
    assert [options.get("form") for options in calls.options] == [form]


@pytest.mark.parametrize(
    ("products", "streams", "form"),
    [
        (Products.PLAN, Streams.SEQUENTIAL, None),
        (Products.PLAN, Streams.DUAL, GDNForm.DUAL),
        (Products.TWO, Streams.SEQUENTIAL, GDNForm.SERIAL),
        (Products.TWO, Streams.DUAL, GDNForm.DUAL),
        (Products.ONE, Streams.SEQUENTIAL, GDNForm.MERGED),
        (Products.ONE, Streams.DUAL, GDNForm.BESIDE),
    ],
)
def test_a_delta_net_runs_in_the_form_of_its_case(
    products: Products,
    streams: Streams,
    form: GDNForm | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = Calls(monkeypatch, GatedDeltaNetInputProjection, "forward")
    Step(replace(NET, products=products, streams=streams)).run()
    assert [options["form"] for options in calls.options] == [form]


@pytest.mark.parametrize(
    ("streams", "form"), [(Streams.SEQUENTIAL, None), (Streams.DUAL, MoEForm.DUAL)]
)
def test_a_moe_layer_runs_in_the_form_of_its_case(
    streams: Streams, form: MoEForm | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch, FusedMoELoRA, "forward")
    Step(replace(LAYER, streams=streams, tp=2)).run()
    assert [options["form"] for options in calls.options] == [form] * 2
    # of two streams the first rank has the second one beside it
    beside = [options["shared"] is not None for options in calls.options]
    assert beside == [streams is Streams.DUAL, False]


@pytest.mark.parametrize("path", Path)
def test_a_delta_of_experts_takes_the_path_of_its_case(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch, moe_module, "moe_delta")
    Step(replace(MOE, path=path)).run()
    taken = None if path is Path.PLAN else MoEPath[path.name]
    assert [options["path"] for options in calls.options] == [taken]


@pytest.mark.parametrize(
    ("case", "owner", "name"),
    [
        (CASE, dense_module, "dense_delta"),
        (MOE, moe_module, "moe_delta"),
        (LAYER, FusedMoELoRA, "forward"),
    ],
    ids=["dense", "experts", "layer"],
)
def test_one_plan_for_all_batches_is_asked_for_in_every_call_and_in_no_other_case(
    case: Case, owner: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(BATCH_INVARIANT, raising=False)
    prepared = Calls(monkeypatch, BatchMetadata, "prepare")
    calls = Calls(monkeypatch, owner, name)
    Step(replace(case, plans=Plans.ONE)).run()
    Step(case).run()
    assert prepared.one_plan == calls.one_plan == ["1", None]


@pytest.mark.parametrize(
    ("base", "layer"), [(Base.WEIGHT, LoRALinear), (Base.CALLABLE, WrappedLoRALinear)]
)
def test_a_base_that_is_called_is_wrapped_and_one_that_is_given_is_owned(
    base: Base, layer: type
) -> None:
    assert [type(rank) for rank in Step(replace(LINEAR, base=base, tp=2)).own.ranks] == [layer] * 2


@pytest.mark.parametrize("base", Base)
def test_adapters_that_are_cut_by_rank_are_held_in_parts(base: Base) -> None:
    sharded = replace(LINEAR, base=base, parallel=Parallel.COLUMN, tp=2, sharding=Sharding.RANK)
    ranks = Step(sharded).own.ranks
    assert [rank.slots.a.shape[-2] for rank in ranks] == [sharded.rank // 2] * 2
    whole = Step(replace(sharded, sharding=Sharding.BASE)).own.ranks
    assert [rank.slots.a.shape[-2] for rank in whole] == [sharded.rank] * 2


def test_adapters_of_experts_that_are_cut_by_rank_are_held_in_parts() -> None:
    ranks = Step(replace(LAYER, tp=2, sharding=Sharding.RANK)).own.ranks
    assert [rank.w13_slots.a.shape[-2] for rank in ranks] == [LAYER.rank // 2] * 2


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({}, ["load"]),
        ({"loading": Loading.DEVICE}, ["load_padded"]),
        # what a server writes into its own tensors
        ({"buffers": Buffers.STACKS}, []),
    ],
    ids=["host", "device", "stacks"],
)
def test_adapters_come_into_their_slots_as_the_case_says(
    changed: dict[str, Any], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {name: Calls(monkeypatch, SlotWeights, name) for name in ("load", "load_padded")}
    step = Step(replace(CASE, slots=1, **changed))
    step.load()
    assert [name for name, seen in calls.items() for _ in seen.args] == names
    assert step.own.weights.a.any()


def test_slots_in_an_arena_lie_between_what_nothing_may_read() -> None:
    weights = Step(replace(CASE, buffers=Buffers.ARENA)).own.weights
    for tensor in (weights.a, weights.b, weights.scales):
        around = tensor.new_empty(0).set_(tensor.untyped_storage())
        assert len(around) > tensor.numel()
        assert around[0].isnan()
        assert around[-1].isnan()
    assert weights.ranks.new_empty(0).set_(weights.ranks.untyped_storage())[[0, -1]].tolist() == [
        -1,
        -1,
    ]


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize(
    ("case", "layer", "more"),
    [
        (LINEAR, LoRALinear, 0),
        (NET, GatedDeltaNetInputProjection, 0),
        (LAYER, FusedMoELoRA, 0),
        # ids have no features
        (EMBEDDING, LoRAEmbedding, -1),
    ],
    ids=["linear", "delta net", "layer", "embedding"],
)
def test_a_layer_gets_an_input_of_as_many_dimensions_as_its_case_has(
    case: Case, layer: type, more: int, dims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch, layer, "forward")
    Step(replace(case, input_dims=dims)).run()
    assert [args[1].dim() for args in calls.args] == [dims + more]


@pytest.mark.parametrize("quantisation", [Quantisation.NONE, Quantisation.FP8])
def test_the_input_of_a_quantised_layer_is_quantised_once_for_all_ranks(
    quantisation: Quantisation, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch, FusedMoELoRA, "forward")
    Step(replace(LAYER, tp=2, quantisation=quantisation)).run()
    first, second = (options["quantised_x"] for options in calls.options)
    assert first is second
    assert (first is None) == (quantisation is Quantisation.NONE)


@pytest.mark.parametrize("gate_up", GateUp)
def test_gate_and_up_that_are_interleaved_are_loaded_as_the_one_module_of_their_models(
    gate_up: GateUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch, FusedMoELoRA, "load_adapter")
    Step(replace(LAYER, gate_up=gate_up, slots=1, ranks=Ranks.FULL)).load()
    ((_, _, parts),) = calls.args
    assert len(parts) == (2 if gate_up is GateUp.INTERLEAVED else 3)


def test_experts_are_placed_as_the_case_says() -> None:
    def experts(placement: Placement) -> list[tuple[int, ...]]:
        ranks = Step(replace(LAYER, ep=2, placement=placement)).own.ranks
        return [rank.cut.experts.ids for rank in ranks]

    assert experts(Placement.RUNS) == [(0, 1), (2, 3)]
    assert experts(Placement.ROUND_ROBIN) == [(0, 2), (1, 3)]
    assert len([*chain(*experts(Placement.REPLICATED))]) > LAYER.experts


def test_base_rows_at_the_end_are_left_out_of_what_a_step_is_prepared_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, step = Calls(monkeypatch, BatchMetadata, "prepare"), Step(CASE)
    step.own.prepare(torch.tensor([1, -1, 0, -1], dtype=torch.int32))
    ((_, slots),) = calls.args
    assert slots.tolist() == [1, -1, 0]
    assert calls.options == [{"num_rows": 4}]
