"""Which layers are adopted, and what becomes of their stacks."""

from __future__ import annotations

import gc
import logging
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.common.slice_stacks import check_constants, pack, whole  # noqa: E402
from lorakernels.integrations.vllm.adoption import (  # noqa: E402
    LOGGER,
    MAX_SLICES,
    adopt,
    refusal,
    refusal_of_server,
)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_stacks_of_several_slices_become_views_of_one_buffer(plain: Any, kit: Any) -> None:
    layer = kit.linear("MergedColumnParallelLinearWithLoRA")
    for stack in (*layer.lora_a_stacked, *layer.lora_b_stacked):
        stack.fill_(2)
    shapes = [stack.shape for stack in (*layer.lora_a_stacked, *layer.lora_b_stacked)]
    assert adopt(layer, plain.wrapper) is plain.wrapper
    for stacks in (layer.lora_a_stacked, layer.lora_b_stacked):
        assert len({stack.untyped_storage().data_ptr() for stack in stacks}) == 1
        assert all((stack == 2).all() for stack in stacks)
    assert [stack.shape for stack in (*layer.lora_a_stacked, *layer.lora_b_stacked)] == shapes


def test_the_stacks_of_one_slice_stay_where_they_are(plain: Any, kit: Any) -> None:
    layer = kit.linear("RowParallelLinearWithLoRA", (8,))
    before = (*layer.lora_a_stacked, *layer.lora_b_stacked)
    adopt(layer, plain.wrapper)
    after = (*layer.lora_a_stacked, *layer.lora_b_stacked)
    assert all(old is new for old, new in zip(before, after, strict=True))


def test_the_stacks_of_logits_stay_where_they_are(plain: Any) -> None:
    kind = type("LogitsProcessorWithLoRA", (), {})
    layer = kind()
    layer.lora_a_stacked, layer.lora_b_stacked = torch.zeros(3, 1, 4, 8), torch.zeros(3, 1, 16, 4)
    before = (layer.lora_a_stacked, layer.lora_b_stacked)
    assert adopt(layer, plain.wrapper) is plain.wrapper
    assert all(new is old for new, old in zip(vars(layer).values(), before, strict=True))


def test_a_layer_of_the_most_slices_is_served(plain: Any, make_linear: Any) -> None:
    layer = make_linear(plain, (4,) * MAX_SLICES)
    layer.load(1, seed=3)
    plain.step((1, -1, 0))
    layer.check((1, -1, 0))


@pytest.mark.parametrize("shared", [False, True])
def test_nothing_keeps_the_old_stacks_of_experts(plain: Any, kit: Any, shared: bool) -> None:
    layer = kit.experts(shared=shared)
    old = [weakref.ref(stack) for stack in (*layer.w13_lora_a_stacked, *layer.w13_lora_b_stacked)]
    adopt(layer, plain.wrapper)
    gc.collect()
    assert all(stack() is None for stack in old)


@pytest.mark.parametrize("shared", [False, True])
def test_experts_of_one_slice_keep_their_stacks(plain: Any, kit: Any, shared: bool) -> None:
    layer = kit.experts("FusedMoE3DWithLoRA", slices=1, shared=shared)
    before = layer.stacks
    adopt(layer, plain.wrapper)
    assert all(old is new for old, new in zip(before, layer.stacks, strict=True))


@pytest.mark.parametrize("shared", [False, True])
def test_the_lists_of_parts_follow_the_stacks_of_experts(
    plain: Any, kit: Any, shared: bool
) -> None:
    layer = kit.experts(shared=shared)
    for number, stack in enumerate(layer.stacks):
        stack.copy_(randn(*stack.shape, seed=number))
    before = [part.clone() for part in (*layer.lora_a_stacked, *layer.lora_b_stacked)]
    adopt(layer, plain.wrapper)
    after = [*layer.lora_a_stacked, *layer.lora_b_stacked]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    # they are the places that vLLM loads
    for stack in layer.stacks:
        stack.zero_()
    assert not any(part.any() for part in after)


@pytest.mark.parametrize("shared", [False, True])
def test_packed_factors_are_found_again_from_their_first_slice(shared: bool) -> None:
    a = [randn(3, 1 if shared else 2, 4, 6, seed=seed) for seed in (1, 2)]
    b = [randn(3, 2, width, 4, seed=width) for width in (5, 7)]
    views_a, views_b = pack(a, b)
    expanded = [view.expand(-1, 2, -1, -1) for view in views_a]
    found = whole(expanded[0], views_b[0], [5, 7])
    assert found.a.shape == (3, 1 if shared else 2, 2, 4, 6)
    assert torch.equal(found.a, torch.stack(a, dim=2))
    assert torch.equal(found.b, torch.cat(b, dim=2))


def test_every_slot_and_slice_must_have_a_rank_and_a_scale() -> None:
    a, ranks, scales = torch.zeros(3, 1, 2, 4, 8), torch.zeros(6), torch.zeros(7)
    check_constants(ranks, scales, a)
    for short in ((ranks[1:], scales, "ranks"), (ranks, scales[2:], "scales")):
        with pytest.raises(ValueError, match=rf"{short[2]} must hold 6 values or more \(got 5\)"):
            check_constants(*short[:2], a)


def test_factors_that_are_not_packed_are_refused() -> None:
    with pytest.raises(ValueError, match="a must be the first slice of a packed layer"):
        whole(torch.zeros(3, 1, 4, 6), torch.zeros(3, 1, 5, 4), [5, 7])
    views_a, views_b = pack(
        [torch.zeros(3, 1, 4, 6)] * 2, [torch.zeros(3, 1, width, 4) for width in (5, 7)]
    )
    # widths of the same sum, so that all strides fit
    with pytest.raises(ValueError, match="b must be the first slice of a packed layer"):
        whole(views_a[0], views_b[0], [4, 8])


def sharded_experts(kit: Any) -> Any:
    layer = kit.experts()
    layer.fully_sharded = True
    return layer


@pytest.mark.parametrize(
    ("rank", "reason"), [(512, None), (513, "rank 513 above 512"), (600, "rank 600 above 512")]
)
def test_factors_of_the_largest_rank_are_served_and_larger_ones_are_not(
    kit: Any, rank: int, reason: str | None
) -> None:
    layer = kit.linear("RowParallelLinearWithLoRA", (8,))
    (stack,) = layer.lora_a_stacked
    layer.lora_a_stacked = (stack.new_zeros(*stack.shape[:2], rank, stack.shape[3]),)
    assert refusal(layer) == reason


def experts_elsewhere(kit: Any) -> Any:
    layer = kit.experts("FusedMoE3DWithLoRA", 1)
    layer.use_ep = True
    return layer


def experts_of_data_parallel_ranks(kit: Any) -> Any:
    layer = kit.experts()
    layer.moe_config.moe_parallel_config.dp_size = 2
    return layer


def scores_of_a_router(kit: Any) -> Any:
    layer = kit.linear("ReplicatedLinearWithLoRA", (8,))
    layer.base_layer = SimpleNamespace(out_dtype=torch.float64)
    return layer


def linear_of(kit: Any, params_dtype: torch.dtype, out_dtype: torch.dtype | None) -> Any:
    """As some routers and the heads of classifiers, whose weights alone are of a higher precision:
    ernie45_moe.py and adapters.py of vLLM 0.26."""
    layer = kit.linear("ReplicatedLinearWithLoRA", (8,))
    layer.base_layer = SimpleNamespace(params_dtype=params_dtype, out_dtype=out_dtype)
    return layer


def logits_of(kit: Any, head_dtype: torch.dtype | None) -> Any:
    layer = kit.linear("LogitsProcessorWithLoRA", (8,))
    layer.lora_a_stacked, layer.lora_b_stacked = layer.lora_a_stacked[0], layer.lora_b_stacked[0]
    layer.base_layer = SimpleNamespace(head_dtype=head_dtype)
    return layer


@pytest.mark.parametrize(("rank", "reason"), [(512, None), (513, "rank 513 above 512")])
def test_logits_of_the_largest_rank_are_served_and_of_larger_ones_are_not(
    kit: Any, rank: int, reason: str | None
) -> None:
    layer = logits_of(kit, None)
    stack = layer.lora_a_stacked
    layer.lora_a_stacked = stack.new_zeros(*stack.shape[:2], rank, stack.shape[3])
    assert refusal(layer) == reason


@pytest.mark.parametrize("head_dtype", [None, torch.float32])
def test_outputs_of_the_dtype_of_the_adapters_are_served(
    kit: Any, head_dtype: torch.dtype | None
) -> None:
    assert refusal(logits_of(kit, head_dtype)) is None
    router = scores_of_a_router(kit)
    router.base_layer.out_dtype = head_dtype
    assert refusal(router) is None


@pytest.mark.parametrize(
    ("params_dtype", "out_dtype", "reason"),
    [
        (torch.float32, None, None),
        (torch.float64, None, "outputs of torch.float64"),
        (torch.float64, torch.float32, None),
        (torch.float32, torch.float64, "outputs of torch.float64"),
    ],
)
def test_outputs_are_of_the_dtype_of_the_weights_where_a_layer_says_nothing_else(
    kit: Any, params_dtype: torch.dtype, out_dtype: torch.dtype | None, reason: str | None
) -> None:
    assert refusal(linear_of(kit, params_dtype, out_dtype)) == reason


def adapters_of_bytes(kit: Any) -> Any:
    layer = kit.linear("RowParallelLinearWithLoRA", (8,))
    layer.lora_a_stacked = tuple(stack.char() for stack in layer.lora_a_stacked)
    return layer


def many_slices(kit: Any) -> Any:
    return kit.linear("MergedColumnParallelLinearVariableSliceWithLoRA", (4,) * 17)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (many_slices, "17 slices, above 16"),
        (sharded_experts, "fully sharded"),
        (experts_elsewhere, "expert parallel"),
        (experts_of_data_parallel_ranks, "rows of other data parallel ranks"),
        (scores_of_a_router, "outputs of torch.float64"),
        (lambda kit: linear_of(kit, torch.float64, None), "outputs of torch.float64"),
        (lambda kit: logits_of(kit, torch.float64), "outputs of torch.float64"),
        (adapters_of_bytes, "adapters of torch.int8"),
        (lambda kit: kit.linear("ColumnParallelLinearWithShardedLoRA"), "of no known class"),
        (lambda kit: kit.linear("VocabParallelEmbeddingWithLoRA"), "of no known class"),
    ],
)
def test_a_layer_that_is_not_served_keeps_its_stacks_and_gets_vllms_methods(
    plain: Any, kit: Any, make: Any, reason: str
) -> None:
    layer = make(kit)
    stacks = [layer.lora_a_stacked, layer.lora_b_stacked]
    assert refusal(layer) == reason
    wrapper = adopt(layer, plain.wrapper)
    assert type(wrapper) is kit.wrapper
    assert [layer.lora_a_stacked, layer.lora_b_stacked] == stacks
    # it sees each step as the wrapper does
    plain.step((0, -1))
    assert wrapper.token_lora_indices.tolist() == [0, -1]
    wrapper.add_lora_linear()
    assert plain.wrapper.own_calls == ["linear"]


FAST_PREFILL = SimpleNamespace(cache_config=SimpleNamespace(kv_sharing_fast_prefill=True))
MICROBATCHES = SimpleNamespace(parallel_config=SimpleNamespace(use_ubatching=True))


@pytest.mark.parametrize(
    ("config", "reason"),
    [(FAST_PREFILL, "KV sharing with fast prefill"), (MICROBATCHES, "microbatches")],
)
def test_no_layer_is_served_where_layers_get_other_rows_than_the_first_ones_that_are_mapped(
    plain: Any, kit: Any, config: Any, reason: str
) -> None:
    plain.wrapper.refusal = refusal_of_server(config)
    for layer in (kit.linear("QKVParallelLinearWithLoRA"), kit.experts()):
        assert type(adopt(layer, plain.wrapper)) is kit.wrapper
    assert plain.wrapper.adoption.summary() == (
        "lorakernels serves no layer. vLLM's kernels serve "
        f"1 FusedMoEWithLoRA ({reason}); 1 QKVParallelLinearWithLoRA ({reason})."
    )


def test_the_layers_of_other_servers_are_looked_at_one_by_one() -> None:
    plain_server = SimpleNamespace(
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
        parallel_config=SimpleNamespace(use_ubatching=False),
    )
    assert refusal_of_server(plain_server) is None
    assert refusal_of_server(None) is None


def not_served(kit: Any, server: Any) -> Any:
    """The wrapper of a layer that keeps vLLM's kernels."""
    return adopt(kit.linear("UnknownWithLoRA"), server.wrapper)


def test_a_layer_that_is_not_served_sees_all_that_a_later_step_assigns(
    plain: Any, kit: Any
) -> None:
    early = not_served(kit, plain)
    assert not hasattr(early, "is_prefill")
    for is_prefill in (True, False):
        plain.step((0, -1), is_prefill=is_prefill)
        assert early.is_prefill is is_prefill
    # whichever of them a layer has
    late = not_served(kit, plain)
    early.mark = object()
    assert late.mark is plain.wrapper.mark is early.mark


def test_one_line_names_the_layers_that_keep_vllms_kernels(
    plain: Any, kit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("QKVParallelLinearWithLoRA", "QKVParallelLinearWithLoRA", "UnknownWithLoRA"):
        adopt(kit.linear(name), plain.wrapper)
    adopt(sharded_experts(kit), plain.wrapper)
    with caplog.at_level(logging.INFO, logger=LOGGER.name):
        plain.step((0,))
        plain.step((-1,))
    assert [record.getMessage() for record in caplog.records] == [
        "lorakernels serves 2 QKVParallelLinearWithLoRA. vLLM's kernels serve "
        "1 FusedMoEWithLoRA (fully sharded); 1 UnknownWithLoRA (of no known class)."
    ]


def test_two_wrappers_share_nothing(plain: Any, kit: Any, make_linear: Any) -> None:
    tower = kit.server(kit.wrapper)
    text_layer, tower_layer = make_linear(plain), make_linear(tower)
    text_layer.load(0, seed=1)
    tower_layer.load(1, seed=2)
    plain.step((0, -1, 0))
    tower.step((-1, 1))
    text_layer.check((0, -1, 0))
    tower_layer.check((-1, 1))
    assert sum(plain.wrapper.adoption.served.values()) == 1
