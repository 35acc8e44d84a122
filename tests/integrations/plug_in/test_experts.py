"""MoE layers of vLLM with the plug-in's methods: w13 and w2 of two- and three-dimensional models,
shared factors, and slices in the other order."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()


from lorakernels.common import slice_stacks  # noqa: E402
from lorakernels.integrations.vllm import experts as experts_module  # noqa: E402
from lorakernels.integrations.vllm import methods  # noqa: E402
from lorakernels.integrations.vllm.experts import factors_of  # noqa: E402
from lorakernels.integrations.vllm.launches import launch_counts  # noqa: E402
from lorakernels.moe.align.metadata import PairMetadata  # noqa: E402
from lorakernels.runtime import tuning  # noqa: E402

MIXED = (0, -1, 2, 1, 2)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("slices", [1, 2])
def test_each_pair_gets_the_adapter_of_its_token_and_expert(
    server: Any, mixin: Any, make_experts: Any, slices: int, shared: bool
) -> None:
    experts = make_experts(server, mixin, slices, shared=shared)
    server.step(MIXED)
    experts.apply(MIXED)
    assert launch_counts()["experts"].launched == 2


def test_a_step_has_the_routing_that_its_ids_hold_then(
    server: Any, mixin: Any, make_experts: Any
) -> None:
    experts = make_experts(server, mixin)
    ids, _ = experts.routes(len(MIXED))
    server.step(MIXED)
    experts.apply(MIXED, ids=ids)
    # a server may keep one buffer of ids for all layers and steps
    ids.copy_(ids.flip(0).clone())
    experts.apply(MIXED, ids=ids)
    # the same routing of other adapters
    server.step(MIXED[::-1])
    experts.apply(MIXED[::-1], ids=ids)


@pytest.fixture
def two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch is small enough for one kernel."""
    moe = replace(tuning.DEFAULT.moe, small_reads=0)
    monkeypatch.setattr(tuning, "DEFAULT", replace(tuning.DEFAULT, moe=moe))


def test_a_delta_in_two_kernels_has_memory_between_them(
    two_kernels: None, plain: Any, mixin: Any, make_experts: Any
) -> None:
    experts = make_experts(plain, mixin)
    plain.step(MIXED)
    experts.apply(MIXED)


def test_a_delta_in_two_kernels_does_not_depend_on_the_default_dtype(
    monkeypatch: pytest.MonkeyPatch, two_kernels: None, plain: Any, mixin: Any, make_experts: Any
) -> None:
    experts = make_experts(plain, mixin)
    plain.step(MIXED)
    for name in ("add_lora_w13", "add_lora_w2"):
        monkeypatch.setattr(plain.wrapper, name, _in_bf16(getattr(plain.wrapper, name)))
    experts.apply(MIXED)


def _in_bf16(method: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **options: Any) -> Any:
        torch.set_default_dtype(torch.bfloat16)
        try:
            return method(*args, **options)
        finally:
            torch.set_default_dtype(torch.float32)

    return called


@pytest.mark.parametrize("adds", [True, False])
def test_slices_in_the_other_order_are_written_in_that_order(
    plain: Any, mixin: Any, make_experts: Any, adds: bool
) -> None:
    experts = make_experts(plain, mixin)
    plain.step(MIXED)
    experts.apply(MIXED, swaps=True, adds=adds)
    experts.apply(MIXED, swaps=False, adds=adds)


def test_one_slice_is_in_no_other_order(plain: Any, mixin: Any, make_experts: Any) -> None:
    layer = make_experts(plain, mixin).layer
    # its delta is added before it is rounded, that of swapped slices afterwards
    _, is_swapped = factors_of(layer.w2_lora_a_stacked, layer.w2_lora_b_stacked)
    assert not is_swapped


def test_counts_of_launches_are_those_of_the_moment_they_were_asked_for(
    plain: Any, mixin: Any, make_experts: Any
) -> None:
    experts = make_experts(plain, mixin)
    plain.step(MIXED)
    before = launch_counts()
    experts.apply(MIXED)
    assert before["experts"].launched == 0
    assert launch_counts()["experts"].launched == 2


def test_a_padded_step_and_one_of_base_rows_follow_each_other(
    plain: Any, mixin: Any, make_experts: Any
) -> None:
    experts = make_experts(plain, mixin)
    for slots, rows in ((MIXED, 8), ((-1, -1), 4), ((1,), 1), ((-1, 0), 2)):
        plain.step(slots)
        experts.apply(slots, rows=rows)
    assert launch_counts()["experts"].left_out == 2


def test_layers_that_run_one_after_the_other_share_their_tables(
    plain: Any, mixin: Any, make_experts: Any
) -> None:
    first, second = make_experts(plain, mixin), make_experts(plain, mixin, 1)
    plain.step(MIXED)
    second.apply(MIXED)
    first.apply(MIXED)
    assert len(plain.wrapper._experts) == 1


@pytest.mark.parametrize(("shared", "swaps"), [(False, False), (True, False), (False, True)])
def test_the_buffers_of_each_layer_are_looked_for_once(
    plain: Any,
    mixin: Any,
    make_experts: Any,
    monkeypatch: pytest.MonkeyPatch,
    shared: bool,
    swaps: bool,
) -> None:
    found = []

    def whole(*slices: Any) -> Any:
        found.append(slice_stacks.whole(*slices))
        return found[-1]

    monkeypatch.setattr(experts_module, "whole", whole)
    layers = [make_experts(plain, mixin, shared=shared) for _ in range(2)]
    for stack in layers[1].layer.stacks:
        stack.mul_(2)
    for slots in (MIXED, (1, 0)):
        plain.step(slots)
        for layer in (*layers, layers[0]):
            layer.apply(slots, swaps=swaps)
    # w13 and w2
    assert len(found) == 2 * len(layers)


def test_adapters_that_are_loaded_between_two_steps_are_seen_by_the_second(
    plain: Any, mixin: Any, make_experts: Any
) -> None:
    experts = make_experts(plain, mixin)
    plain.step(MIXED)
    experts.apply(MIXED)
    for stack in experts.layer.stacks:
        stack.mul_(-0.5)
    experts.apply(MIXED)


def test_the_factors_of_many_layers_do_not_pile_up(
    plain: Any, mixin: Any, make_experts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts_module, "_MOST_FACTORS", 3)
    layers = [make_experts(plain, mixin) for _ in range(3)]
    plain.step(MIXED)
    for _ in range(3):
        for layer in layers:
            layer.apply(MIXED)
    (deltas,) = plain.wrapper._experts.values()
    assert len(deltas._factors) == 3


class Deltas:
    """One pair of each of two experts, and slices of rank 2 that are parts of one buffer."""

    def __init__(self, values: int = 8) -> None:
        pairs = PairMetadata(max_tokens=2, top_k=1, num_experts=2, max_slots=2, device="cpu")
        constants = torch.full((values,), 2, dtype=torch.int32), torch.ones(values)
        self.deltas = experts_module.ExpertDeltas(pairs, constants)
        self.deltas.prepare(torch.tensor([[0], [1]]), torch.tensor([1, 0], dtype=torch.int32))
        self.a = torch.arange(2 * 2 * 2 * 2 * 16).view(2, 2, 2, 2, 16) / 64
        self.b = torch.arange(2 * 2 * 32 * 2).view(2, 2, 32, 2) / 64
        self.x = torch.arange(32).view(2, 16) / 8

    def slices(self, widths: Sequence[int]) -> Any:
        return tuple(self.a.unbind(2)), tuple(self.b.split(widths, dim=2))

    def add(self, a: Any, b: Any) -> Tensor:
        out = torch.zeros(2, 1, 32)
        self.deltas.add(out, self.x, a, b, router_weights=None, add_inputs=True)
        return out.squeeze(1)

    def wanted(self, widths: Sequence[int]) -> Tensor:
        a, b = self.slices(widths)
        rows = zip((1, 0), (0, 1), self.x, strict=True)
        return torch.stack(
            [
                torch.cat([q[s, e] @ (p[s, e] @ x) for p, q in zip(a, b, strict=True)])
                for s, e, x in rows
            ]
        )


def test_slices_of_other_widths_in_the_same_memory_are_other_slices() -> None:
    made = Deltas()
    a, _ = made.slices((16, 16))
    for widths in ((16, 16), (20, 12), (8, 24), (16, 16)):
        _, b = made.slices(widths)
        torch.testing.assert_close(made.add(a, b), made.wanted(widths))


@pytest.mark.parametrize("widths", [(20, 12), (8, 24), (16, 16)])
@pytest.mark.parametrize("adds", [True, False])
def test_slices_of_any_widths_are_written_in_the_other_order(
    widths: tuple[int, int], adds: bool
) -> None:
    made = Deltas()
    a, b = made.slices(widths)
    first, second = made.wanted(widths).split(widths, dim=1)
    wanted = torch.cat([second, first], dim=1)
    before = torch.full((2, 1, 32), 3.0)
    out = before.clone()
    made.deltas.add(out, made.x, a[::-1], b[::-1], router_weights=None, add_inputs=adds)
    torch.testing.assert_close((out - before * adds).squeeze(1), wanted)


@pytest.mark.parametrize("side", ["a", "b"])
def test_slices_that_get_other_memory_are_read_there(side: str) -> None:
    made = Deltas()
    a, b = made.slices((20, 12))
    made.add(a, b)
    setattr(made, side, 2 * getattr(made, side))
    for part, new in zip((*a, *b), sum(made.slices((20, 12)), ()), strict=True):
        part.data = new
    torch.testing.assert_close(made.add(a, b), made.wanted((20, 12)))


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("side", ["a", "b"])
def test_slices_of_other_strides_in_the_memory_of_a_layer_are_refused(
    side: str, swaps: bool
) -> None:
    made = Deltas()
    a, b = made.slices((16, 16))
    # the first one in memory
    part = a[0] if side == "a" else b[0]
    if swaps:
        a, b = a[::-1], b[::-1]
    made.add(a, b)
    part.data = part.data.transpose(2, 3).contiguous().transpose(2, 3)
    part.data = torch.as_strided(getattr(made, side), part.shape, part.stride())
    with pytest.raises(ValueError, match=rf"^{side} must be the first slice of a packed layer, "):
        made.add(a, b)


def test_slices_of_another_dtype_in_the_memory_of_a_layer_are_other_slices() -> None:
    made = Deltas()
    a, b = made.slices((16, 16))
    made.add(a, b)
    for part in a:
        part.data = part.data.view(torch.int32)
    with pytest.raises(ValueError, match=r"^x must be torch.int32 like the weights"):
        made.add(a, b)


def test_the_memory_of_slices_that_are_remembered_is_not_given_to_others() -> None:
    made = Deltas()
    made.add(*made.slices((16, 16)))
    # a storage lives as long as one of its views
    seen = [each.untyped_storage()._weak_ref() for each in (made.a, made.b)]
    del made.a, made.b
    gc.collect()
    assert not any(map(torch.UntypedStorage._expired, seen))


def test_a_that_is_no_slice_of_a_packed_layer_is_refused_also_in_the_memory_of_one() -> None:
    made = Deltas()
    a, b = made.slices((16, 16))
    made.add(a, b)
    with pytest.raises(ValueError, match=r"^a must be the first slice of a packed layer, "):
        made.add((made.a.view(2, 2, 4, 16)[:, :, :1], a[1]), b)


def test_fewer_ranks_and_scales_than_the_slots_and_slices_of_a_layer_are_refused() -> None:
    made = Deltas(values=3)
    with pytest.raises(ValueError, match=r"^ranks must hold 4 values or more \(got 3\)$"):
        made.add(*made.slices((16, 16)))


@pytest.mark.parametrize("top_k", [1, 3])
def test_a_layer_may_route_to_another_number_of_experts_than_it_said(
    plain: Any, mixin: Any, make_experts: Any, top_k: int
) -> None:
    experts = make_experts(plain, mixin)
    routes = experts.routes
    experts.routes = lambda rows: routes(rows, top_k=top_k)  # type: ignore[method-assign]
    plain.step(MIXED)
    experts.apply(MIXED)
    experts.apply(MIXED)
    assert set(plain.wrapper._experts) == {(2, 5), (top_k, 5)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_weights_may_be_of_16_bits_and_lie_apart(
    plain: Any, mixin: Any, make_experts: Any, dtype: torch.dtype
) -> None:
    experts = make_experts(plain, mixin)
    routes = experts.routes

    def apart(rows: int) -> Any:
        ids, weights = routes(rows)
        return ids, weights.to(dtype).repeat_interleave(2, dim=1)[:, ::2]

    experts.routes = apart  # type: ignore[method-assign]
    plain.step(MIXED)
    experts.apply(MIXED)


def test_the_experts_of_a_token_may_lie_apart(plain: Any, mixin: Any, make_experts: Any) -> None:
    experts = make_experts(plain, mixin)
    routes = experts.routes

    def apart(rows: int) -> Any:
        ids, weights = routes(rows)
        return ids.T.contiguous().T, weights

    experts.routes = apart  # type: ignore[method-assign]
    plain.step(MIXED)
    experts.apply(MIXED)


@pytest.mark.parametrize("slices", [1, 2])
def test_tables_are_not_made_while_a_graph_is_captured(
    plain: Any, mixin: Any, make_experts: Any, monkeypatch: pytest.MonkeyPatch, slices: int
) -> None:
    # adopted, and no step has run yet
    experts = make_experts(plain, mixin, slices)
    plain.step(MIXED)
    monkeypatch.setattr(methods, "is_capturing", lambda device: True)
    experts.apply(MIXED)
    routes = experts.routes
    experts.routes = lambda rows: routes(rows, top_k=3)  # type: ignore[method-assign]
    message = (
        r"topk_ids and lora_a_stacked must be of top 2 of 5 experts while a CUDA graph is "
        r"captured \(got top 3 of 5 experts\)"
    )
    # a refusal that left tables behind would refuse once
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            experts.apply(MIXED)


def test_w2_of_other_sizes_than_w13_is_refused(plain: Any, make_experts: Any, mixin: Any) -> None:
    layer = make_experts(plain, mixin).layer
    plain.step((0,))
    a, b = layer.w2_lora_a_stacked, layer.w2_lora_b_stacked
    message = (
        r"topk_weights and lora_a_stacked must be of top 2 of 5 experts, as w13 was "
        r"\(got top 3 of 5 experts\)"
    )
    with pytest.raises(ValueError, match=message):
        plain.wrapper.add_lora_w2(
            *(torch.zeros(1, 3, 24), torch.zeros(3, 16), a, b, torch.ones(1, 3)),
            *(None, None, None, None, 1, None, None, 3, 3, None, 3, False, 0, False),
        )


def test_w2_of_a_server_without_experts_is_refused(plain: Any) -> None:
    plain.step((0,))
    a, b = (torch.zeros(3, 5, 4, 16),), (torch.zeros(3, 5, 24, 4),)
    message = (
        r"topk_weights and lora_a_stacked must be of an adopted layer, as w13 was "
        r"\(got top 3 of 5 experts\)"
    )
    with pytest.raises(ValueError, match=message):
        plain.wrapper.add_lora_w2(
            *(torch.zeros(1, 3, 24), torch.zeros(3, 16), a, b, torch.ones(1, 3)),
            *(None, None, None, None, 1, None, None, 3, 3, None, 3, False, 0, False),
        )


@pytest.mark.parametrize("name", ["expert_map", "token_lora_mapping"])
def test_what_only_experts_on_other_ranks_have_is_refused(
    plain: Any, make_experts: Any, mixin: Any, name: str
) -> None:
    experts = make_experts(plain, mixin)
    layer, (ids, weights) = experts.layer, experts.routes(1)
    plain.step((0,))
    given = {"expert_map": None, "token_lora_mapping": None, name: torch.zeros(4)}
    with pytest.raises(ValueError, match=rf"{name} must be None, .* \(got a tensor of shape \[4\]"):
        plain.wrapper.add_lora_w13(
            *(torch.zeros(1, 2, 32), torch.zeros(1, 24)),
            *(layer.w13_lora_a_stacked, layer.w13_lora_b_stacked, ids, weights),
            w1=None,
            w2=None,
            num_tokens=1,
            top_k_num=2,
            max_loras=3,
            adapter_enabled=None,
            local_num_experts=4,
            top_k=2,
            num_slices=2,
            **{"fully_sharded": False, "use_tuned_config": False, **given},
        )


def test_ids_of_another_integer_type_are_taken(plain: Any, mixin: Any, make_experts: Any) -> None:
    experts = make_experts(plain, mixin)
    routes = experts.routes
    experts.routes = lambda rows: (routes(rows)[0].long(), routes(rows)[1])  # type: ignore[method-assign]
    plain.step(MIXED)
    experts.apply(MIXED)
