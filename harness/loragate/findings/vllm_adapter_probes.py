"""Probes of how vLLM loads adapters, cuts their factors and keeps them in slots. They call its own
functions, with as little around them as these read; nothing runs on a device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from loragate.findings.ledger import Observation
from loragate.findings.probing import Probe, layer_probe, seen
from loragate.subjects.vllm.layer_package import VllmLayers

_RANK, _SIZE = 8, 4
# of gpt-oss, in blocks of MXFP4
_FEATURES, _BLOCK = 2880, 32


def patterns_ignored(layers: VllmLayers, device: str) -> Observation:
    config = {"rank_pattern": {"o_proj": 4}, "alpha_pattern": {"q_proj": 64}}
    model = _loaded(layers, {"q_proj": _RANK, "o_proj": 4}, lora_alpha=16, **config)
    found = {name: _scale(layer) for name, layer in model.loras.items()}
    right = {"q_proj": 64 / _RANK, "o_proj": 16 / 4}
    text = (
        f"q_proj of alpha 64 and rank 8 is scaled by {found['q_proj']}, o_proj of alpha 16 and "
        f"rank 4 by {found['o_proj']}; PEFT scales by {right['q_proj']} and {right['o_proj']}"
    )
    return seen(found == {"q_proj": 2.0, "o_proj": 2.0}, text)


def rank_stabilised_experts_scaled_otherwise(layers: VllmLayers, device: str) -> Observation:
    names = ("w1", "w2", "w3")
    model = _loaded(
        layers, {"q_proj": 16, **dict.fromkeys(names, 16)}, lora_alpha=16, use_rslora=True
    )
    packed = layers.module("lora.lora_weights").PackedLoRALayerWeights.pack_moe_stacked(
        [model.loras[name] for name in names], "experts"
    )
    experts = {b.flatten()[0].item() for b in packed.optimize().lora_b}
    dense, right = _scale(model.loras["q_proj"]), 16 / math.sqrt(16)
    text = (
        f"with use_rslora, alpha 16 and rank 16 a linear layer is scaled by {dense}, experts by "
        f"{sorted(experts)}; PEFT scales both by {right}"
    )
    return seen(dense == right and experts == {1.0}, text)


def uneven_experts_get_factors_of_others(layers: VllmLayers, device: str) -> Observation:
    experts, size = 60, 8
    maps: Any = layers.module("model_executor.layers.fused_moe.expert_map_manager")
    loading = layers.module("lora.lora_model")
    wrong = {}
    for rank in range(size):
        count, places, *_ = maps.determine_expert_map(size, rank, experts)
        own = [expert for expert, place in enumerate(places.tolist()) if place >= 0]
        spec = loading.MoEEPLoadSpec(rank, count, experts)
        keys = [f"mlp.experts.{expert}.w1.lora_A.weight" for expert in range(experts)]
        kept = [n for n, key in enumerate(keys) if not loading._is_remote_expert_key(key, spec)]
        if kept != own:
            wrong[rank] = (own[0], own[-1], kept[0], kept[-1])
    ranks = "; ".join(
        f"rank {rank} has experts {a} to {b} and keeps factors of {c} to {d}"
        for rank, (a, b, c, d) in wrong.items()
    )
    return seen(bool(wrong), f"{experts} experts on {size} ranks: {ranks or 'all are right'}")


def padded_experts_get_rows_of_others(layers: VllmLayers, device: str) -> Observation:
    backends: Any = layers.module("model_executor.layers.fused_moe.oracle.mxfp4")
    layer, size, rank = layers.module("lora.layers.fused_moe").FusedMoE3DWithLoRA, 2, 1
    _, padded = backends.mxfp4_round_up_hidden_size_and_intermediate_size(
        backends.Mxfp4MoeBackend.MARLIN, _FEATURES, _FEATURES // size
    )
    of_layer = SimpleNamespace(
        tp_size=size,
        tp_rank=rank,
        intermediate_size_per_partition=padded,
        _base_model="GptOssForCausalLM",
    )
    features = torch.arange(_FEATURES)
    gate_and_up = features.repeat_interleave(2)[None, :, None]
    first = {
        "w13": int(layer._slice_w13_b(of_layer, gate_and_up).min()),
        "w2": int(layer._slice_w2_a(of_layer, features[None, None]).min()),
    }
    # as gpt_oss.py cuts the weights
    base = rank * -(-(_FEATURES // _BLOCK) // size) * _BLOCK
    text = (
        f"{_FEATURES} features on {size} ranks, padded to {padded} each: the weights of rank "
        f"{rank} begin at {base}, B of w13 at {first['w13']}, A of w2 at {first['w2']}"
    )
    return seen(all(found != base for found in first.values()), text)


def pinned_adapter_leaves_no_slot(layers: VllmLayers, device: str) -> Observation:
    pinned, wanted = 3, (1, 2)
    manager, adapter = slot_manager(layers, slots=2), layers.module("lora.lora_model").LoRAModel
    for number in (pinned, *wanted):
        # what a worker does with each adapter of a step that it does not have
        manager.add_adapter(adapter(number, _RANK, {}))
        manager.activate_adapter(number)
        if number == pinned:
            manager.pin_adapter(number)
    resident = [number for number in manager.lora_index_to_id if number]
    text = (
        f"two slots, adapter {pinned} is pinned: after a step of adapters 1 and 2 was set up, "
        f"the slots have {' and '.join(map(str, sorted(resident)))}"
    )
    return seen(not set(wanted) <= set(resident), text)


def adapters_of_one_name_are_one(layers: VllmLayers, device: str) -> Observation:
    state: Any = layers.module("v1.worker.gpu.lora_utils").LoraState(2)
    for row, number in enumerate((1, 2)):
        state.add_request(f"request {number}", row, adapter_request(layers, number, name="x"))
    names = [*state.lora_requests]
    mapped, _, active = state.make_lora_inputs(names, np.arange(2), np.ones(2, dtype=np.int64))
    loaded = {request.lora_int_id for request in active}
    text = (
        f"requests of two adapters named x are mapped to ids {sorted(map(int, mapped))}, "
        f"and {len(loaded)} of these is loaded"
    )
    return seen(set(map(int, mapped)) == {1, 2} and len(loaded) == 1, text)


ADAPTER_PROBES: dict[str, Probe] = {
    "adapter-patterns-ignored": layer_probe(patterns_ignored),
    "rank-stabilised-scale-of-experts-lost": layer_probe(rank_stabilised_experts_scaled_otherwise),
    "uneven-experts-get-factors-of-others": layer_probe(uneven_experts_get_factors_of_others),
    "padded-experts-get-rows-of-others": layer_probe(padded_experts_get_rows_of_others),
    "pinned-adapter-leaves-no-slot": layer_probe(pinned_adapter_leaves_no_slot),
    "adapters-of-one-name-are-one": layer_probe(adapters_of_one_name_are_one),
}


def _loaded(layers: VllmLayers, ranks: Mapping[str, int], **config: object) -> Any:
    """A model's adapter whose factors are all ones, as a server loads it: modules of these
    ranks."""
    helper = layers.module("lora.peft_helper").PEFTHelper.from_dict(
        {"r": next(iter(ranks.values())), "target_modules": [*ranks], **config}
    )
    helper.validate_legal(SimpleNamespace(max_lora_rank=16, max_loras=1))
    tensors = {}
    for name, rank in ranks.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.ones(rank, _SIZE)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.ones(_SIZE, rank)
    loading = layers.module("lora.lora_model")
    # pages are pinned for a GPU, which there may not be
    with patch.object(loading, "PIN_MEMORY", False):
        return loading.LoRAModel.from_lora_tensors(
            1, tensors, helper, device="cpu", dtype=torch.float32
        )


def _scale(layer: Any) -> float:
    """What B, of ones, is multiplied by."""
    return float(layer.optimize().lora_b[0, 0])


def adapter_request(layers: VllmLayers, number: int, *, name: str | None = None) -> Any:
    return layers.module("lora.request").LoRARequest(
        name or f"adapter {number}", number, "/nowhere"
    )


def slot_manager(layers: VllmLayers, *, slots: int) -> Any:
    """What keeps adapters in the slots of a model, here of one without layers."""
    managers = layers.module("lora.model_manager")
    manager = managers.LRUCacheLoRAModelManager.__new__(managers.LRUCacheLoRAModelManager)
    manager.lora_config = SimpleNamespace(max_loras=slots, max_cpu_loras=slots + 2)
    manager.modules, manager.lora_index_to_id = {}, [None] * slots
    manager._last_mapping = manager._last_slot_layout = None
    caches: Sequence[tuple[int, Any]] = (
        (slots + 2, manager.deactivate_adapter),
        (slots, manager._deactivate_adapter),
    )
    manager._registered_adapters, manager._active_adapters = (
        managers.AdapterLRUCache(capacity, evict) for capacity, evict in caches
    )
    manager._create_merged_loras_inplace = lambda model: None
    return manager
