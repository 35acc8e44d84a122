"""MoE layers of vLLM with the plug-in's methods: w13 and w2 of two- and three-dimensional models,
shared factors, and slices in the other order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from loragate.core.machine import select_interpreter

select_interpreter()


from lorakernels.integrations.vllm import methods  # noqa: E402
from lorakernels.integrations.vllm.experts import factors_of  # noqa: E402
from lorakernels.integrations.vllm.launches import launch_counts  # noqa: E402
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
    assert len(plain.wrapper._pairs) == 1


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
    assert set(plain.wrapper._pairs) == {(2, 4), (top_k, 4)}


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
        r"topk_ids and lora_a_stacked must be of top 2 of 4 experts while a CUDA graph is "
        r"captured \(got top 3 of 4 experts\)"
    )
    with pytest.raises(ValueError, match=message):
        experts.apply(MIXED)


def test_w2_of_other_sizes_than_w13_is_refused(plain: Any, make_experts: Any, mixin: Any) -> None:
    layer = make_experts(plain, mixin).layer
    plain.step((0,))
    a, b = layer.w2_lora_a_stacked, layer.w2_lora_b_stacked
    message = (
        r"topk_weights and lora_a_stacked must be of top 2 of 4 experts, as w13 was "
        r"\(got top 3 of 4 experts\)"
    )
    with pytest.raises(ValueError, match=message):
        plain.wrapper.add_lora_w2(
            *(torch.zeros(1, 3, 24), torch.zeros(3, 16), a, b, torch.ones(1, 3)),
            *(None, None, None, None, 1, None, None, 3, 3, None, 3, False, 0, False),
        )


def test_w2_of_a_server_without_experts_is_refused(plain: Any) -> None:
    plain.step((0,))
    a, b = (torch.zeros(3, 4, 4, 16),), (torch.zeros(3, 4, 24, 4),)
    message = (
        r"topk_weights and lora_a_stacked must be of an adopted layer, as w13 was "
        r"\(got top 3 of 4 experts\)"
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
