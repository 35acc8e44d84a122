"""What surrounds vLLM's MoE layer, with fakes of its classes."""

from __future__ import annotations

import os
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loragate.core.machine import Machine
from loragate.inputs.base_experts import make_base_experts
from loragate.inputs.batch import make_batch
from loragate.inputs.draw import DataKind
from loragate.inputs.pool import make_pool
from loragate.matrix.case import Case, Dtype, Ranks, RouterWeights, Sharing, Site, Streams
from loragate.protocol import Pool, unsupported
from loragate.subjects.vllm.layer_package import VllmLayers
from loragate.subjects.vllm.layer_tables import POINTER_TABLES
from loragate.subjects.vllm.moe_layer import VllmMoELayer
from loragate.subjects.vllm.package import DUAL_STREAM, VllmOps
from loragate.subjects.vllm.subject import VllmSubject

CPU = Machine("cpu", "test", None, 1, 0)
NOTHING: Any = None


def small_case(**changes: Any) -> Case:
    axes: dict[str, Any] = {
        "site": Site.MOE_LAYER,
        "tokens": 5,
        "in_features": 16,
        "slices": (8, 8),
        "rank": 4,
        "slots": 2,
        "dtype": Dtype.BF16,
        "experts": 3,
        "top_k": 2,
        "router": RouterWeights.OUTPUT,
        "ranks": Ranks.FULL,
    }
    return Case(**(axes | changes))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = self.w2_weight = nn.Parameter(torch.empty(1, device="meta"))
        self.processed: list[tuple[Tensor, Tensor]] = []
        self.quant_method = SimpleNamespace(
            process_weights_after_loading=lambda experts: self.processed.append(
                (experts.w13_weight, experts.w2_weight)
            )
        )


class Layer(nn.Module):
    """A fake of the layer, with and without adapters; asks its router as vLLM's does."""

    def __init__(self, router: Any, **options: Any) -> None:
        super().__init__()
        self.router, self.options = router, options
        self.routed_experts = Experts()
        self.calls: list[tuple[Any, ...]] = []

    def set_mapping(self, wrapper: Any) -> None:
        self.wrapper = wrapper

    def set_lora(self, slot: int, a: list[Tensor], b: list[Tensor]) -> None:
        self.calls.append((slot, a, b))

    def reset_lora(self, slot: int) -> None:
        self.calls.append((slot,))

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = self.router.select_experts(
            hidden_states=x, router_logits=logits, topk_indices_dtype=None, input_ids=None
        )
        self.calls.append((weights, ids, os.environ.get(DUAL_STREAM)))
        return torch.zeros_like(x)


class WithAdapters(Layer):
    def __init__(self, layer: Layer, config: Any, names: list[str]) -> None:
        super().__init__(layer.router, **layer.options)
        self.base, self.config, self.names = layer, config, names


class Wrapper:
    def update_metadata(self, mapping: Any, resident: Any, slots: int, vocabulary: int) -> None:
        self.mapping = mapping


@contextmanager
def anything(value: object) -> Any:
    yield


def substitute_layers() -> VllmLayers:
    config = SimpleNamespace(
        VllmConfig=SimpleNamespace,
        DeviceConfig=SimpleNamespace,
        CompilationConfig=SimpleNamespace,
        CompilationMode=SimpleNamespace(NONE=0),
        LoRAConfig=SimpleNamespace,
        set_current_vllm_config=lambda config: nullcontext(),
    )
    return VllmLayers(
        ops=VllmOps("0", NOTHING, NOTHING, NOTHING, ({}, {}), batch_invariant=False),
        config=config,
        linear=NOTHING,
        forward_context=SimpleNamespace(
            create_forward_context=lambda attention, config: config,
            override_forward_context=anything,
        ),
        moe_layer=Layer,
        given_routing="custom",
        from_layer=lambda layer, slots, config, names, model: WithAdapters(layer, config, names),
        mapping=lambda index, prompt, is_prefill: list(index),
        wrapper=lambda rows, batches, device, lora_config: Wrapper(),
        ranks=(1, 8, 16),
    )


def open_layer(case: Case) -> VllmMoELayer:
    base = make_base_experts(case, 3, DataKind.SIGNED, CPU)
    return VllmMoELayer(substitute_layers(), case, "cpu", base)


def pool_of(case: Case) -> Pool:
    return make_pool(case, 3, DataKind.SIGNED, CPU, VllmSubject.describe(True, False))


def test_the_layer_gets_the_weights_of_the_base_before_it_gets_adapters() -> None:
    case = small_case()
    base = make_base_experts(case, 3, DataKind.SIGNED, CPU)
    built = open_layer(case).layer.base
    ((w13, w2),) = built.routed_experts.processed
    assert torch.equal(w13, base.weight)
    assert torch.equal(w2, base.down)
    assert (built.options["num_experts"], built.options["activation"]) == (3, "silu")
    plain = open_layer(small_case(slices=(8,))).layer.base
    assert plain.options["activation"] == "silu_no_mul"


@pytest.mark.parametrize("streams", Streams)
def test_a_step_has_the_experts_and_weights_of_the_case_and_its_own_option(
    streams: Streams,
) -> None:
    case = small_case(streams=streams)
    instance, batch = open_layer(case), make_batch(case, 3, 0, DataKind.SIGNED, CPU)
    assert batch.routes is not None
    instance.apply(batch.x, batch.out, batch.routes)
    weights, ids, option = instance.layer.calls[-1]
    assert weights is batch.routes.weights
    assert ids is batch.routes.topk_ids
    assert option == ("1" if streams is Streams.DUAL else "0")


def test_the_largest_step_with_adapters_precedes_all_others() -> None:
    case = small_case(spare_rows=2)
    layer = open_layer(case).layer
    ((weights, ids, _),) = layer.calls
    assert (tuple(weights.shape), tuple(ids.shape)) == ((7, 2), (7, 2))
    assert ids.tolist() == [[0, 1]] * 7
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    # adapter 1 is in slot 0
    assert layer.wrapper.mapping == [1] * 7


def test_factors_are_loaded_as_gate_down_and_up_with_folded_scales() -> None:
    case = small_case()
    drawn = pool_of(case)
    assert drawn.down is not None
    down = replace(drawn.down, ranks=((2,), (4,)), scales=((4.0,), (1.0,)))
    pool = replace(drawn, ranks=((3, 0), (4, 4)), scales=((0.5, 2.0), (1.0, 1.0)), down=down)
    instance = open_layer(case)
    instance.load(0, pool)
    slot, a, b = instance.layer.calls[-1]
    assert slot == 0
    assert [tuple(part.shape) for part in a] == [(3, 3, 16), (3, 2, 8), (3, 0, 16)]
    assert torch.equal(a[0], pool.a[0, :, 0, :3])
    assert torch.equal(b[0], pool.b[0][0, :, :, :3] * 0.5)
    assert torch.equal(b[1], down.b[0][0, :, :, :2] * 4)


def test_factors_that_experts_share_are_loaded_once() -> None:
    case = small_case(sharing=Sharing.SHARED_OUTER)
    instance = open_layer(case)
    instance.load(1, pool_of(case))
    _, a, b = instance.layer.calls[-1]
    assert [len(part) for part in a] == [1, 3, 1]
    assert [len(part) for part in b] == [3, 1, 3]
    assert instance.layer.config.enable_moe_shared_loras


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"router": RouterWeights.INPUT}, "without the router weights"),
        ({"rank": 129}, "above the limit of 128"),
        ({"experts": 993}, "993 experts are above the limit of 992"),
        ({"input_dims": 3}, "two dimensions"),
        ({"ep": 2}, "ep 2 is above the limit of 1"),
        ({"tp": 2}, "tp 2 is above the limit of 1"),
    ],
)
def test_cases_that_its_layer_cannot_run_are_skips_with_reasons(
    changes: dict[str, Any], part: str
) -> None:
    have = VllmSubject.describe(interpreted=False, batch_invariant=False)
    assert unsupported(small_case(), have) is None
    assert part in str(unsupported(small_case(**changes), have))


def test_tables_of_addresses_are_declared_with_the_weights_of_both_products() -> None:
    stacks = {
        f"{product}_lora_{factor}_stacked": (torch.empty(1),)
        for product in ("w13", "w2")
        for factor in "ab"
    }
    moe = SimpleNamespace(layer=SimpleNamespace(**stacks))
    behind = POINTER_TABLES["_fused_moe_lora_one_shot_kernel", "B_ptrs"](moe, NOTHING)
    assert [*behind] == [*stacks["w13_lora_b_stacked"], *stacks["w2_lora_b_stacked"]]
    a, b = (torch.empty(1),), (torch.empty(1),)
    linear = SimpleNamespace(layer=SimpleNamespace(lora_a_stacked=a, lora_b_stacked=b))
    assert [*POINTER_TABLES["_lora_shrink_kernel", "lora_ptr"](linear, NOTHING)] == [*a]
    assert [*POINTER_TABLES["_lora_expand_kernel", "lora_ptr"](linear, NOTHING)] == [*b]
