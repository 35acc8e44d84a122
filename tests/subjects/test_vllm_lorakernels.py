"""What the subject of the plug-in hands to the wrapper that vLLM's layers call, without vLLM."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loragate.core.machine import detect_machine, select_interpreter
from loragate.execution.session import inputs_of
from loragate.inputs import DataKind, make_batch, make_pool
from loragate.matrix.case import Case, Dtype, Ranks, RouterWeights, Sharing, Site, Source, Write
from loragate.protocol import BaseExperts, BaseLayer, Pool, Trial, unsupported
from loragate.subjects import find_subject
from loragate.subjects.vllm.layer_package import VllmLayers
from loragate.subjects.vllm.package import fold_scale
from loragate.subjects.vllm_lorakernels import subject as module
from loragate.subjects.vllm_lorakernels.deltas import LinearDelta, MoEDelta
from loragate.subjects.vllm_lorakernels.subject import VllmLoraKernelsSubject

select_interpreter()
CASE = Case(
    site=Site.DENSE_DELTA,
    tokens=4,
    in_features=8,
    slices=(8, 4),
    rank=4,
    slots=2,
    dtype=Dtype.BF16,
)
W13 = replace(CASE, site=Site.MOE_DELTA, slices=(8, 8), experts=4, top_k=2)
W2 = replace(W13, slices=(8,), source=Source.PAIR, router=RouterWeights.OUTPUT)


class Wrapper:
    """Notes what it is called with."""

    def __init__(self, *sizes: object, **options: object) -> None:
        self.sizes, self.options = sizes, options
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.token_step = SimpleNamespace(row_slots="the slots of the rows")

    def __getattr__(self, name: str) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            self.calls.append((name, args, options))
            return SimpleNamespace(prepare=lambda *given: self.calls.append(("prepare", given, {})))

        return noted

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, options) for called, args, options in self.calls if called == name]


def layers_of(wrapper: Any = Wrapper) -> VllmLayers:
    def mapping(*ids: tuple[int, ...], is_prefill: bool) -> Any:
        return (*ids, is_prefill)

    nothing: Any = None
    return VllmLayers(
        ops=nothing,
        config=nothing,
        linear=nothing,
        forward_context=nothing,
        moe_layer=nothing,
        given_routing=nothing,
        from_layer=nothing,
        mapping=mapping,
        wrapper=wrapper,
        ranks=(8,),
    )


def pool_of(case: Case, seed: int = 5) -> Pool:
    machine = detect_machine()
    have = VllmLoraKernelsSubject.describe(machine.interpreted)
    return make_pool(case, seed, DataKind.SIGNED, machine, have)


@pytest.mark.parametrize(
    ("case", "target"),
    [
        (CASE, "LinearDelta"),
        (W13, "MoEDelta"),
        (replace(CASE, site=Site.LORA_LINEAR), "VllmLoRALinear"),
        (replace(W13, site=Site.MOE_LAYER, router=RouterWeights.OUTPUT), "VllmMoELayer"),
    ],
)
def test_every_site_is_served_by_the_wrapper_of_the_plug_in(
    case: Case, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, ours = detect_machine(), find_subject("lorakernels")
    have = ours.capabilities(machine)
    assert not isinstance(have, str)
    _, _, base = inputs_of(Trial(case, ours, have, machine, seed=5), DataKind.SIGNED)
    plug_in, served = object(), list[VllmLayers]()
    monkeypatch.setattr(module, "load_vllm_layers", lambda machine: layers_of())
    monkeypatch.setattr(module, "_wrapper", lambda: plug_in)
    monkeypatch.setattr(module, target, lambda layers, *_: served.append(layers))
    VllmLoraKernelsSubject().open(case, machine, base)
    assert [layers.wrapper for layers in served] == [plug_in]
    assert isinstance(base, (BaseLayer, BaseExperts)) is (case.site not in (CASE.site, W13.site))


def delta_of(case: Case) -> Any:
    kind = MoEDelta if case.site is Site.MOE_DELTA else LinearDelta
    return kind(layers_of(), case, "cpu")


@pytest.mark.parametrize(
    "case",
    [CASE, W13, replace(W13, sharing=Sharing.SHARED_A), replace(W13, sharing=Sharing.SHARED_B)],
)
def test_a_slot_has_the_live_ranks_of_its_last_adapter_with_folded_scales(case: Case) -> None:
    delta = delta_of(case)
    full, mixed = (pool_of(replace(case, ranks=ranks)) for ranks in (Ranks.FULL, Ranks.MIXED))
    delta.load(1, full)
    delta.load(1, mixed)
    for part, (rank, scale) in enumerate(zip(mixed.ranks[1], mixed.scales[1], strict=True)):
        a, b = delta.a[part][1], delta.b[part][1]
        assert torch.equal(a[:, :rank], mixed.a[1, ..., part, :rank, :].view_as(a[:, :rank]))
        folded = fold_scale(mixed.b[part][1, ..., :rank], scale)
        assert torch.equal(b[..., :rank], folded.view_as(b[..., :rank]))
        assert not a[:, rank:].any()
        assert not b[..., rank:].any()
    delta.unload(1)
    assert not any(weight.any() for weight in (*delta.a, *delta.b))


def test_a_step_names_adapters_from_one_on_and_all_that_are_resident() -> None:
    delta = delta_of(CASE)
    delta.prepare(torch.tensor([1, -1, 0, 1], dtype=torch.int32))
    ((mapping, resident, slots, _), _) = delta.wrapper.named("update_metadata")[0]
    assert mapping == ((2, 0, 1, 2), (2, 0, 1, 2), True)
    assert (resident, slots) == ([1, 2], 3)


def test_a_linear_delta_is_that_of_a_linear_layer() -> None:
    delta = delta_of(CASE)
    x, out = torch.zeros(4, 8), torch.zeros(4, 12)
    assert delta.apply(x, out) is out
    (((*given, scale, slices), _),) = delta.wrapper.named("add_lora_linear")
    assert given[0] is out
    assert given[1] is x
    assert (given[2], given[3], scale, slices) == (delta.a, delta.b, 1.0, (8, 4))


@pytest.mark.parametrize("write", Write)
@pytest.mark.parametrize(("case", "method"), [(W13, "add_lora_w13"), (W2, "add_lora_w2")])
def test_a_delta_of_experts_is_that_of_the_product_whose_weights_it_has(
    case: Case, method: str, write: Write
) -> None:
    delta = delta_of(replace(case, write=write))
    batch = make_batch(case, 5, 0, DataKind.SIGNED, detect_machine())
    assert batch.routes is not None
    assert delta.apply(batch.x, batch.out, batch.routes) is batch.out
    called = [name for name, *_ in delta.wrapper.calls if name.startswith("add_lora")]
    assert called == [method]
    ((given, options),) = delta.wrapper.named(method)
    assert given[0].data_ptr() == batch.out.data_ptr()
    assert given[1] is batch.x
    assert options == {"add_inputs": write is Write.ADD}
    assert any(one is batch.routes.topk_ids for one in given) is (case is W13)
    # w2 reads weights that belong to its pairs, which its layer has sorted before
    assert any(one is batch.routes.weights for one in given)
    sorted_pairs = delta.wrapper.named("prepare")
    assert len(sorted_pairs) == (1 if case is W2 else 0)


@pytest.mark.parametrize("of_layer", [False, True])
def test_behind_the_first_slice_of_a_layer_are_all_of_its_slices(of_layer: bool) -> None:
    delta = delta_of(CASE)
    layer = SimpleNamespace(lora_a_stacked=delta.a, lora_b_stacked=delta.b)
    instance = SimpleNamespace(layer=layer) if of_layer else delta
    declared = VllmLoraKernelsSubject.describe(interpreted=True).pointer_tables
    behind_a = declared["lora_shrink_kernel", "a_ptr"](instance, delta.a[0])
    behind_b = declared["lora_expand_kernel", "b_ptr"](instance, delta.b[0])
    for behind, stacks in ((behind_a, delta.a), (behind_b, delta.b)):
        assert len(behind) == len(CASE.slices)
        assert all(one is stack for one, stack in zip(behind, stacks, strict=True))


@pytest.mark.parametrize(
    ("change", "is_run"),
    [
        ({}, False),
        ({"write": Write.ADD}, True),
        ({"ranks": Ranks.FULL}, True),
        ({"slices": (8,)}, True),
    ],
)
def test_deltas_that_are_stored_are_refused_where_a_slice_may_be_absent(
    change: dict[str, Any], is_run: bool
) -> None:
    case = replace(W13, **{"write": Write.STORE, "ranks": Ranks.MIXED, **change})
    reason = unsupported(case, VllmLoraKernelsSubject.describe(interpreted=True))
    if is_run:
        assert reason is None
    else:
        assert reason is not None
        assert "absent slice" in reason
