"""The model and the adapter of `bench engine` as folders that vLLM loads.

A model is its configuration alone: vLLM draws weights for it. An adapter has the modules of all
projections, one set for each expert, as PEFT saves them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from loragate.bench.graphs_rows import ModelShape

# few, so that logits cost little: adapters have no part in them
VOCABULARY = 4096
_HEAD_SIZE = 128
_MOST_POSITIONS = 8192
_ATTENTION = ("q_proj", "k_proj", "v_proj")
_SEED = 1
# adapters change little, and no value grows from layer to layer
_SIZE = 1e-2


def write_model(folder: Path, shape: ModelShape, layers: int) -> None:
    """The configuration of a Qwen3, or of a Qwen3-MoE where the shape has experts."""
    folder.mkdir(parents=True)
    config = model_config(shape, layers)
    _write_json(folder / "config.json", config)
    tokens = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    _write_json(folder / "generation_config.json", tokens)


def model_config(shape: ModelShape, layers: int) -> dict[str, Any]:
    """What config.json says."""
    queries, keys, _ = shape.qkv
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": queries // _HEAD_SIZE,
        "num_key_value_heads": keys // _HEAD_SIZE,
        "head_dim": _HEAD_SIZE,
        "hidden_act": "silu",
        "max_position_embeddings": _MOST_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": None,
        "torch_dtype": "bfloat16",
    }
    if shape.experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.top_k,
            "moe_intermediate_size": shape.intermediate,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


def adapted_modules(shape: ModelShape, layers: int) -> dict[str, tuple[int, int]]:
    """[out_features, in_features] of every module that the adapter has factors for."""
    return {
        f"model.layers.{layer}.{name}": size
        for layer in range(layers)
        for name, size in _modules_of_layer(shape)
    }


def _modules_of_layer(shape: ModelShape) -> Iterator[tuple[str, tuple[int, int]]]:
    for name, width in zip(_ATTENTION, shape.qkv, strict=True):
        yield f"self_attn.{name}", (width, shape.hidden)
    yield "self_attn.o_proj", (shape.hidden, shape.qkv[0])
    experts = [f"mlp.experts.{number}" for number in range(shape.experts)]
    for prefix in experts or ["mlp"]:
        yield f"{prefix}.gate_proj", (shape.intermediate, shape.hidden)
        yield f"{prefix}.up_proj", (shape.intermediate, shape.hidden)
        yield f"{prefix}.down_proj", (shape.hidden, shape.intermediate)


def write_adapter(folder: Path, shape: ModelShape, layers: int, *, rank: int) -> None:
    """bf16 factors, drawn, of all modules."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(_SEED)
    modules = adapted_modules(shape, layers)
    tensors: dict[str, Tensor] = {}
    for module, (out_features, in_features) in modules.items():
        prefix = f"base_model.model.{module}"
        tensors[f"{prefix}.lora_A.weight"] = _draw(rank, in_features, generator)
        tensors[f"{prefix}.lora_B.weight"] = _draw(out_features, rank, generator)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
    }
    _write_json(folder / "adapter_config.json", config)


def _draw(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    values = torch.empty(rows, columns, dtype=torch.bfloat16)
    return values.uniform_(-_SIZE, _SIZE, generator=generator)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
