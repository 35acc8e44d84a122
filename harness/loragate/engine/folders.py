"""Models and adapters of the language as folders that transformers, PEFT and engines load."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from loragate.engine.language import BOS, Language, Speaker
from loragate.engine.layers import delta_rule
from loragate.engine.layers.attention import HEAD_SIZE, HEADS, KV_HEADS
from loragate.engine.layers.layout import Delta, Layout
from loragate.engine.layers.mlp import INTERMEDIATE
from loragate.engine.weights import adapter_deltas, base_weights

# engines cut a vocabulary over ranks
_MULTIPLE = 64
MAX_TOKENS = 2048


def write_model(
    folder: Path,
    language: Language,
    *,
    dtype: torch.dtype,
    beside: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """A checkpoint in safetensors: Qwen3, Qwen3-MoE where the language has several experts, and
    Qwen3-Next where it has layers of linear attention. `beside`: weights that are no part of the
    model and are stored with it."""
    weights = as_stored(language, base_weights(language) | dict(beside))
    write_checkpoint(folder, weights, model_config(language, dtype), dtype)


def as_stored(language: Language, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What files of the language's model have for weights that it multiplies by."""
    less_one = bool(language.linear_layers)
    return {
        name: value - float(less_one and _is_stored_less_one(name))
        for name, value in weights.items()
    }


def write_checkpoint(
    folder: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any], dtype: torch.dtype
) -> None:
    """Tables of tokens are padded to the size that `config` has."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = ("embed_tokens.weight", "lm_head.weight")
    stored = {
        name: (_padded(value) if name.endswith(tables) else value).to(dtype).contiguous()
        for name, value in weights.items()
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    tokens = {"bos_token_id": BOS, "eos_token_id": None, "pad_token_id": BOS}
    _write_json(folder / "generation_config.json", {**tokens, "do_sample": False})


def digests(folder: Path, *, without: str = "") -> dict[str, str]:
    """SHA-256 of each file but `without`, by its path in the folder."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
        if path != folder / without
    }


def model_config(language: Language, dtype: torch.dtype) -> dict[str, Any]:
    """What config.json says."""
    has_experts = language.experts > 1
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if has_experts else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if has_experts else "qwen3",
        "vocab_size": _rounded(language.num_tokens),
        "hidden_size": Layout(language).size,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": language.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if has_experts:
        config |= {
            "num_experts": 2 * language.experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": INTERMEDIATE,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if language.linear_layers:
        config |= _hybrid_config(language)
    return config


def _hybrid_config(language: Language) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "layer_types": [
            "linear_attention" if layer in language.linear_layers else "full_attention"
            for layer in range(language.layers)
        ],
        "linear_num_key_heads": delta_rule.KEY_HEADS,
        "linear_num_value_heads": delta_rule.VALUE_HEADS,
        "linear_key_head_dim": delta_rule.KEY_SIZE,
        "linear_value_head_dim": delta_rule.VALUE_SIZE,
        "linear_conv_kernel_dim": delta_rule.TAPS,
        "partial_rotary_factor": 0.25,
        "shared_expert_intermediate_size": INTERMEDIATE,
    }


def write_adapter(
    folder: Path,
    language: Language,
    speaker: Speaker,
    *,
    rank: int,
    alpha: float,
    seed: int = 0,
    targets: Collection[str] | None = None,
) -> None:
    """An adapter as PEFT saves it, in which all of `rank`, at least 2, ranks are used; the scale is
    alpha / rank. targets: names of projections, all where it is None; the others are left out."""
    generator = torch.Generator().manual_seed(seed)
    factors: dict[str, Delta] = {}
    for module, (b, a) in adapter_deltas(language, speaker).items():
        if targets is None or module.rpartition(".")[2] in targets:
            factors[module] = _spread(b * (rank / alpha), a, rank, generator)
    save_adapter(folder, factors, rank=rank, alpha=alpha)


def save_adapter(folder: Path, factors: Mapping[str, Delta], *, rank: int, alpha: float) -> None:
    """B and A of `rank` ranks, by their modules; the head is padded as that of a model is."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for module, (b, a) in factors.items():
        prefix = f"base_model.model.{module}"
        tensors[f"{prefix}.lora_A.weight"] = a.float().contiguous()
        tensors[f"{prefix}.lora_B.weight"] = (
            (_padded(b) if module == "lm_head" else b).float().contiguous()
        )
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted({module.rpartition(".")[2] for module in factors}),
    }
    _write_json(folder / "adapter_config.json", config)


def _spread(b: Tensor, a: Tensor, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Factors of `rank` with the same product."""
    if rank < a.shape[0]:
        raise ValueError(f"rank must be at least {a.shape[0]} (got {rank})")
    noise = torch.randn(rank, a.shape[0], dtype=a.dtype, generator=generator)
    columns, _ = torch.linalg.qr(noise)
    return b @ columns.T, columns @ a


def _rounded(size: int) -> int:
    return -(-size // _MULTIPLE) * _MULTIPLE


def _padded(table: Tensor) -> Tensor:
    rows = table.new_zeros(_rounded(len(table)) - len(table), table.shape[1])
    return torch.cat([table, rows])


def _is_stored_less_one(name: str) -> bool:
    """Whether the model adds 1 to this weight: to those of all norms but linear attention's."""
    return "norm" in name and ".linear_attn." not in name


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
