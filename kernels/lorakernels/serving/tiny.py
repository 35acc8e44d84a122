"""Tiny models with random weights, of every kind that a Decoder takes: for examples and tests."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

# query heads share key and value heads, and together are wider than the hidden size
_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "max_position_embeddings": 128,
}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
_DELTA_NET = {
    "shared_expert_intermediate_size": 24,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, _SIZES),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, _SIZES | _EXPERTS),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM, _SIZES | _EXPERTS | _DELTA_NET),
}
KINDS = tuple(_KINDS)


def tiny_model(kind: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model of a kind of `KINDS` on the CPU in fp32, the same for each seed; `changes` are fields
    of its config. KeyError for an unknown kind."""
    make_config, make_model, sizes = _KINDS[kind]
    config = make_config(**(sizes | changes))
    # some initial weights are drawn
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        # grouped products of experts want larger sizes
        model: PreTrainedModel = make_model._from_config(config, experts_implementation="eager")
    generator = torch.Generator("cpu").manual_seed(seed)
    for weight in model.parameters():
        # the initial weights are so small that the answer would hardly depend on the prompt; norms
        # and biases have one dimension
        scale = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.2
        noise = torch.randn(weight.shape, generator=generator, device="cpu") * scale
        with torch.no_grad():
            weight.copy_(noise if weight.dim() > 1 else weight + noise)
    return model.eval()
