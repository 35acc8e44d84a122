"""vLLM's own layers with the plug-in's wrapper, where vLLM is installed: adopted by its own calls,
loaded by its own methods, and run as far as a machine without a GPU can."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import Machine, select_interpreter

select_interpreter()


from loragate.inputs.base_experts import make_base_experts  # noqa: E402
from loragate.inputs.draw import DataKind  # noqa: E402
from loragate.matrix.case import Case, Dtype, Parallel, Ranks, Sharing, Site  # noqa: E402
from loragate.subjects.vllm.layer_host import LayerHost  # noqa: E402
from loragate.subjects.vllm.moe_layer import VllmMoELayer  # noqa: E402

CPU = Machine("cpu", "test", None, 1, 0)
SLOTS = (0, -1, 1, 2, 0)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def layers(installed_layers: Any) -> Any:
    """vLLM's layers with the plug-in's wrapper."""
    from loragate.subjects.vllm_lorakernels.subject import _with_plug_in

    return _with_plug_in(installed_layers)


def case_of(**changes: Any) -> Case:
    axes: dict[str, Any] = {
        "site": Site.MOE_LAYER,
        "tokens": len(SLOTS),
        "in_features": 32,
        "slices": (16, 16),
        "rank": 8,
        "slots": 3,
        "experts": 4,
        "top_k": 2,
        "dtype": Dtype.BF16,
        "ranks": Ranks.FULL,
    }
    return Case(**(axes | changes))


@pytest.mark.parametrize("sharing", [Sharing.PER_EXPERT, Sharing.SHARED_OUTER])
def test_the_experts_of_an_installed_layer_get_the_packed_adapters(
    layers: Any, monkeypatch: pytest.MonkeyPatch, sharing: Sharing
) -> None:
    # running the base layer needs a GPU
    monkeypatch.setattr(VllmMoELayer, "_profile", lambda *_: None)
    case = case_of(sharing=sharing)
    base = make_base_experts(case, 3, DataKind.SIGNED, CPU)
    instance = VllmMoELayer(layers, case, "cpu", base)
    layer: Any = instance.layer
    assert layer.punica_wrapper.adoption.served == {"FusedMoEWithLoRA": 1}
    outer = 1 if sharing is Sharing.SHARED_OUTER else 4
    factors = {
        slot: [
            (
                randn(4 if part == 1 else outer, 5, 16 if part == 1 else 32, seed=seed + part),
                randn(outer if part == 1 else 4, 32 if part == 1 else 16, 5, seed=seed + 9 + part),
            )
            for part in range(3)
        ]
        for slot, seed in ((0, 100), (1, 200), (2, 300))
    }
    for slot, parts in factors.items():
        # gate, down, up, as its manager packs them
        layer.set_lora(slot, [a.bfloat16() for a, _ in parts], [b.bfloat16() for _, b in parts])
    instance.prepare(torch.tensor(SLOTS, dtype=torch.int32))
    experts = layer._moe_kernel.fused_experts
    x = randn(len(SLOTS), 32, seed=5).bfloat16()
    ids = torch.tensor([[0, 1], [1, 2], [3, 0], [2, 3], [1, 3]], dtype=torch.int32)
    y = torch.zeros(len(SLOTS), 2, 32, dtype=torch.bfloat16)
    weights = torch.ones(len(SLOTS), 2)
    experts.apply_w13_lora(
        experts._lora_context,
        y=y,
        x=x,
        topk_ids=ids,
        topk_weights=weights,
        expert_map=None,
        w1=None,
        w2=None,
        num_tokens=len(SLOTS),
        top_k_num=2,
    )
    for row, slot in enumerate(SLOTS):
        for choice, expert in enumerate(ids[row].tolist()):
            wanted = torch.zeros(32)
            if slot >= 0:
                parts = [factors[slot][0], factors[slot][2]]
                wanted = torch.cat([delta(a, b, expert, x[row]) for a, b in parts])
            torch.testing.assert_close(y[row, choice].float(), wanted, rtol=0.05, atol=0.3)


def delta(a: Tensor, b: Tensor, expert: int, x: Tensor) -> Tensor:
    of_a, of_b = (part[0 if len(part) == 1 else expert].bfloat16().float() for part in (a, b))
    return of_b @ (of_a @ x.float())


def test_installed_logits_get_the_adapters_of_the_samples(
    layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_logits: Any = importlib.import_module("vllm.lora.layers.logits_processor")
    processors: Any = importlib.import_module("vllm.model_executor.layers.logits_processor")
    heads: Any = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    monkeypatch.setattr(with_logits, "current_platform", _Platform)
    case = case_of(site=Site.LORA_LINEAR, slices=(24,), parallel=Parallel.COLUMN)
    host = LayerHost(layers, case, "cpu")
    with host.configured():
        head = heads.ParallelLMHead(50, 32, params_dtype=torch.bfloat16)
        plain = processors.LogitsProcessor(50)
        layer = with_logits.LogitsProcessorWithLoRA(plain, 32, torch.bfloat16, "cpu", None)
        layer.create_lora_weights(3, host._lora_config)
        layer.set_mapping(host._wrapper)
    assert layer.punica_wrapper.adoption.served == {"LogitsProcessorWithLoRA": 1}
    head.weight.data.copy_(randn(*head.weight.shape, seed=1))
    a, b = randn(5, 32, seed=2).bfloat16(), randn(50, 5, seed=3).bfloat16()
    layer.set_lora(1, a, b)
    ids = [2, 0, 2, 1]
    mapping = layers.mapping((1,) * 5, tuple(ids), is_prefill=True)
    host._wrapper.update_metadata(mapping, [1, 2, 3], 4, 50)
    x = randn(4, 32, seed=4).bfloat16()
    with host.running():
        logits = layer._get_logits(x, head)
    wanted = x.float() @ head.weight[:50].float().T
    for row in (0, 2):
        wanted[row] += b.float() @ (a.float() @ x[row].float())
    torch.testing.assert_close(logits.float(), wanted, rtol=0.03, atol=0.5)


class _Platform:
    @staticmethod
    def can_update_inplace() -> bool:
        return True
