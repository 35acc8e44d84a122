"""Arguments of a wrong type or kind, as a user may give them: refused by name, with ValueError, and
before anything is computed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

import lorakernels as lk  # noqa: E402
from lorakernels.layers.partition import cut_layer  # noqa: E402
from lorakernels.moe.layer.ops import run_experts  # noqa: E402

ROWS, K, N, EXPERTS = 3, 16, 8, 4
WEIGHT = torch.ones(N, K)
W13, W2 = torch.ones(EXPERTS, 2 * K, N), torch.ones(EXPERTS, N, K)


def refused(message: str) -> Any:
    return pytest.raises(ValueError, match=re.escape(message))


def linear(**options: Any) -> lk.LoRALinear:
    return lk.LoRALinear(WEIGHT, slices=[lk.Slice("a", N)], num_slots=1, rank=2, **options)


def experts(**options: Any) -> lk.FusedMoELoRA:
    return lk.FusedMoELoRA(W13, W2, num_slots=1, rank=2, **options)


def batch(rows: int = ROWS, **options: Any) -> lk.BatchMetadata:
    metadata = lk.BatchMetadata(max_tokens=128, max_slots=1, device="cpu", **options)
    metadata.prepare(torch.zeros(rows, dtype=torch.int32))
    return metadata


def pairs() -> lk.PairMetadata:
    sizes = {"max_tokens": ROWS, "max_slots": 1, "top_k": 1, "num_experts": EXPERTS}
    return lk.PairMetadata(device="cpu", with_base=True, **sizes)


def run_linear(form: Any) -> Tensor:
    layer = linear()
    workspace = lk.DenseWorkspace([layer.slots], max_tokens=ROWS)
    return layer(torch.ones(ROWS, K), batch(), workspace, form=form)


def run_layer(form: Any) -> Tensor:
    layer = experts()
    scratch = lk.MoEScratch([layer], max_tokens=ROWS, top_k=1)
    ids, weights = torch.zeros(ROWS, 1, dtype=torch.int32), torch.ones(ROWS, 1)
    return layer(torch.ones(ROWS, N), ids, weights, batch(), pairs(), scratch, form=form)


def run_delta_net(form: Any) -> Any:
    heads = lk.DeltaNetHeads(key_heads=1, value_heads=1, key_size=4, value_size=4)
    layer = lk.GatedDeltaNetInputProjection(
        torch.ones(16, K), torch.ones(2, K), modules=heads.grouped(), num_slots=1, rank=2
    )
    workspace = lk.DenseWorkspace([layer.slots], max_tokens=ROWS)
    return layer(torch.ones(ROWS, K), batch(), workspace, form=form)


def run_delta(path: Any) -> None:
    weights = lk.ExpertWeights(
        num_slots=1,
        num_experts=EXPERTS,
        slice_widths=(N,),
        in_features=K,
        rank=2,
        dtype=torch.float32,
        device="cpu",
    )
    prepared = pairs()
    prepared.prepare(torch.zeros(ROWS, 1, dtype=torch.int32), batch())
    workspace = lk.MoEWorkspace([weights], max_tokens=ROWS, top_k=1)
    lk.moe_delta(
        *(torch.ones(ROWS, K), weights, prepared, workspace, torch.zeros(ROWS, N)), path=path
    )


CHOICES: list[tuple[str, type[Any], Callable[[Any], object]]] = [
    ("parallel", lk.Parallel, lambda given: linear(parallel=given)),
    ("parallel", lk.Parallel, lambda given: cut_layer([], K, parallel=given)),
    ("sharding", lk.LoRASharding, lambda given: linear(sharding=given)),
    ("sharding", lk.LoRASharding, lambda given: experts(sharding=given)),
    ("gate_up", lk.GateUp, lambda given: experts(gate_up=given)),
    ("router_weight", lk.RouterWeight, lambda given: experts(router_weight=given)),
    ("form", lk.LinearForm, run_linear),
    ("form", lk.MoEForm, run_layer),
    ("form", lk.GDNForm, run_delta_net),
    ("path", lk.MoEPath, run_delta),
]


@pytest.mark.parametrize("given", [0, "", False])
@pytest.mark.parametrize(("name", "kind", "call"), CHOICES)
def test_what_is_empty_is_no_choice_and_leaves_none_to_the_plan(
    name: str, kind: type[Any], call: Callable[[Any], object], given: object
) -> None:
    with refused(f"{name} must be one of {kind.__name__}.{next(iter(kind)).name}, "):
        call(given)


@pytest.mark.parametrize(("name", "kind", "call"), CHOICES)
def test_a_string_and_a_member_of_another_enum_are_no_member_of_an_enum(
    name: str, kind: type[Any], call: Callable[[Any], object]
) -> None:
    member = next(iter(kind))
    # the member itself is taken
    call(member)
    allowed = ", ".join(f"{kind.__name__}.{one.name}" for one in kind)
    # as the form of another layer, which stands for another number
    other = Enum("Other", {one.name: number for number, one in enumerate(kind, 7)})
    for given in (member.name, member.name.lower(), "typo", other[member.name]):
        with refused(f"{name} must be one of {allowed} (got {given!r})"):
            call(given)


def test_the_operator_of_a_layer_refuses_a_string_for_where_router_weights_go() -> None:
    layer, step, prepared = experts(), batch(), pairs()
    scratch = lk.MoEScratch([layer], max_tokens=ROWS, top_k=1)
    x, weights = torch.ones(ROWS, N), torch.ones(ROWS, 1)
    prepared.prepare(torch.zeros(ROWS, 1, dtype=torch.int32), step)
    operands = x, W13, W2, weights, prepared, scratch.buffers, torch.empty(ROWS, N)
    with refused("router_weight must be one of RouterWeight.ON_"):
        run_experts(*operands, router_weight="ON_INPUT")  # type: ignore[arg-type]


def test_the_name_of_an_activation_is_no_activation() -> None:
    with refused("activation must be an Activation, or None (got 'silu')"):
        experts(activation="silu", gate_up=lk.GateUp.HALVES)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2])
def test_experts_of_other_8_bit_numbers_than_the_products_take_are_refused(
    dtype: torch.dtype,
) -> None:
    weights = [lk.Quantised(w.to(dtype), torch.ones(w.shape[:2])) for w in (W13, W2)]
    with refused(f"values of w13 must be torch.float8_e4m3fn (got {dtype})"):
        lk.FusedMoELoRA(*weights, num_slots=1, rank=2, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (torch.ones(EXPERTS, N, dtype=torch.bfloat16), "torch.float32 (got torch.bfloat16)"),
        (torch.ones(EXPERTS, N, 1), "[4, 8] (got [4, 8, 1])"),
        (torch.ones(EXPERTS, N, device="meta"), "on cpu (got meta)"),
    ],
)
def test_scales_that_no_step_could_take_are_refused_when_a_layer_is_built(
    scales: Tensor, message: str
) -> None:
    values = [w.to(torch.float8_e4m3fn) for w in (W13, W2)]
    weights = lk.Quantised(values[0], torch.ones(EXPERTS, 2 * K)), lk.Quantised(values[1], scales)
    with refused(f"scales of w2 must be {message}"):
        lk.FusedMoELoRA(*weights, num_slots=1, rank=2, dtype=torch.bfloat16)


@pytest.mark.parametrize("given", [1, 8, 17, 48, 256, -16, 0])
def test_a_height_that_no_tiles_have_is_refused(given: int) -> None:
    with refused(f"height must be 16, 32, 64, 128 or None (got {given})"):
        batch(height=given)


def test_operators_refuse_tables_of_another_height_than_the_rows_have() -> None:
    layer = linear()
    workspace = lk.DenseWorkspace([layer.slots], max_tokens=128)
    for height, rows in ((32, ROWS), (16, 128)):
        with refused(f"rows for {rows} rows (got height {height})"):
            layer(torch.ones(rows, K), batch(rows, height=height), workspace)
    for height, rows in ((16, ROWS), (32, 100)):
        layer(torch.ones(rows, K), batch(rows, height=height), workspace)


@pytest.mark.parametrize("scale", [None, "1", [1.0]])
def test_a_scale_that_is_no_number_is_refused_and_changes_nothing(scale: Any) -> None:
    layer = linear()
    layer.load_adapter(0, {"a": lk.LoRAFactors(torch.ones(2, K), torch.ones(N, 2), 1.0)})
    before = [tensor.clone() for tensor in layer.slots.tensors]
    with refused(f"must be a number (got {scale!r})"):
        layer.load_adapter(0, {"a": lk.LoRAFactors(torch.ones(1, K), torch.ones(N, 1), scale)})
    assert all(map(torch.equal, before, layer.slots.tensors))


def test_a_bias_of_another_dtype_than_the_weight_is_refused() -> None:
    with refused("bias must be torch.float32 like the weights (got torch.bfloat16)"):
        linear(bias=torch.ones(N, dtype=torch.bfloat16))


def test_a_workspace_is_made_for_slots_from_any_iterable_and_for_nothing_else() -> None:
    layer = linear()
    wanted = lk.DenseWorkspace([layer.slots], max_tokens=ROWS).shrunk.shape
    # an iterator is read once
    found: Any = iter([layer.slots])
    assert lk.DenseWorkspace(found, max_tokens=ROWS).shrunk.shape == wanted
    wrong: Any = [layer]
    with refused("layers must be SlotWeights, such as the `slots` of a layer (got a LoRALinear)"):
        lk.DenseWorkspace(wrong, max_tokens=ROWS)


def test_workspaces_of_experts_are_made_for_layers_from_any_iterable_and_for_nothing_else() -> None:
    sizes, layer = {"max_tokens": ROWS, "top_k": 2}, experts()
    slots = [layer.w13_slots, layer.w2_slots]
    wanted = lk.MoEWorkspace(slots, **sizes).shrunk.shape
    # an iterator is read once
    found: Any = iter(slots)
    assert lk.MoEWorkspace(found, **sizes).shrunk.shape == wanted
    found = iter([layer])
    assert lk.MoEScratch(found, **sizes).workspace.shrunk.shape == wanted
    wrong: Any = [layer]
    with refused("layers must be ExpertWeights, such as the `w13_slots` of a layer (got a Fused"):
        lk.MoEWorkspace(wrong, **sizes)
    wrong = slots
    with refused("layers must be FusedMoELoRA (got a ExpertWeights)"):
        lk.MoEScratch(wrong, **sizes)


def test_the_kernels_of_experts_cannot_be_listed() -> None:
    layer = linear()
    workspace = lk.DenseWorkspace([layer.slots], max_tokens=1)
    layers: Any = [layer, experts()]
    with refused("input projections of delta nets (got a FusedMoELoRA)"):
        lk.kernel_variants(
            layers, lk.BatchMetadata(max_tokens=1, max_slots=1, device="cpu"), workspace
        )


def test_an_input_of_16_bytes_an_element_is_refused() -> None:
    with refused("dtype of a must have 1 to 8 bytes (got torch.complex128)"):
        lk.StepInputs({"a": lk.InputSpec(dtype=torch.complex128)}, max_tokens=1, device="cpu")


@dataclass(slots=True)
class SlottedGroup:
    """A group that weak references cannot be made to."""

    rank: int = 0
    size: int = 2

    def all_gather(self, part: Tensor, out: Tensor) -> None:
        raise AssertionError

    def all_reduce(self, tensor: Tensor) -> None:
        raise AssertionError


class Group:
    """Of two ranks, of which this one exchanges nothing."""

    rank, size = 0, 2

    def all_gather(self, part: Tensor, out: Tensor) -> None:
        raise AssertionError

    def all_reduce(self, tensor: Tensor) -> None:
        raise AssertionError


def test_a_string_is_no_form_of_a_layer_sharded_by_rank_either() -> None:
    sharding: Any = {"sharding": lk.LoRASharding.RANK, "collective": Group()}
    layer = linear(parallel=lk.Parallel.COLUMN, tp_size=2, **sharding)
    workspace = lk.DenseWorkspace([layer.slots], max_tokens=ROWS)
    form: Any = "SINGLE"
    with refused("form must be one of LinearForm.SINGLE, "):
        layer(torch.ones(ROWS, K), batch(), workspace, form=form)
    routed = experts(place=lk.MoERank(tp_size=2), **sharding)
    scratch = lk.MoEScratch([routed], max_tokens=ROWS, top_k=1)
    ids, weights = torch.zeros(ROWS, 1, dtype=torch.int32), torch.ones(ROWS, 1)
    with refused("form must be one of MoEForm.SINGLE, "):
        routed(torch.ones(ROWS, N), ids, weights, batch(), pairs(), scratch, form=form)


def test_a_group_without_weak_references_is_refused() -> None:
    options = {"parallel": lk.Parallel.COLUMN, "tp_size": 2, "sharding": lk.LoRASharding.RANK}
    with refused("collective must allow weak references"):
        linear(collective=SlottedGroup(), **options)


@pytest.mark.parametrize("factors", [None, 1.0, torch.ones(2, 2)])
def test_an_adapter_whose_module_has_no_factors_is_refused(factors: Any) -> None:
    with pytest.raises(lk.AdapterError, match=r"adapter a: q_proj must have LoRAFactors or"):
        lk.Adapter("a", {"q_proj": factors})


@pytest.mark.parametrize("name", [3, None, ("a",)])
def test_the_name_of_an_adapter_that_is_no_text_is_not_resident(name: Any) -> None:
    slots = lk.AdapterSlots({"a": linear()})
    slots.activate(
        lk.Adapter("other", {"a": lk.LoRAFactors(torch.ones(2, K), torch.ones(N, 2), 1)})
    )
    for call in (slots.slot_of, slots.evict):
        with pytest.raises(lk.AdapterError, match="is not resident"):
            call(name)


def test_a_path_with_a_null_character_is_refused_as_one_of_an_adapter() -> None:
    with pytest.raises(lk.AdapterError, match="is no path: embedded null"):
        lk.read_peft_folder("a\0b")
