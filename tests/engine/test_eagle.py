"""The EAGLE-3 head, computed as its format says: there is no model of transformers for it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)

from loragate.engine.checkpoints import checkpoint
from loragate.engine.drafts import WRONG_PLACES, drafted_word
from loragate.engine.eagle import TARGET_LAYERS, write_eagle
from loragate.engine.language import PLACES, Language
from loragate.engine.reference import Reference

STEPS = 3


class Head(nn.Module):
    """Names and order of computation as in an EAGLE-3 checkpoint of Qwen3."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        super().__init__()
        config = AutoConfig.from_pretrained(folder)
        config._attn_implementation = "sdpa"
        size, eps = config.hidden_size, config.rms_norm_eps
        layer = nn.Module()
        layer.self_attn = Qwen3Attention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(layer.self_attn, name).out_features
            setattr(layer.self_attn, name, nn.Linear(2 * size, rows, bias=False))
        layer.mlp = Qwen3MLP(config)
        for name in ("input_layernorm", "post_attention_layernorm", "hidden_norm"):
            setattr(layer, name, Qwen3RMSNorm(size, eps))
        self.midlayer, self.norm = layer, Qwen3RMSNorm(size, eps)
        self.fc = nn.Linear(size * len(TARGET_LAYERS), size, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)
        self.rotary = Qwen3RotaryEmbedding(config)
        # all weights have a name, and all names a weight
        self.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
        self.to(dtype)

    def forward(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and the states of the next step; both [1, tokens, ...]."""
        layer, places = self.midlayer, torch.arange(tokens.shape[1])[None]
        read = torch.cat(
            [layer.input_layernorm(self.embed_tokens(tokens)), layer.hidden_norm(states)], dim=-1
        )
        seen, _ = layer.self_attn(read, self.rotary(read, places), None)
        residual = states + seen
        residual = residual + layer.mlp(layer.post_attention_layernorm(residual))
        return self.lm_head(self.norm(residual)), residual


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
@torch.no_grad()
def test_an_eagle_head_drafts_what_the_draft_model_drafts(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    made, _ = checkpoint(tmp_path, kind, 1)
    language, head = made.language, Head(made.eagle, dtype)
    (prompt,) = made.prompts(1, seed=0)
    (speaker,) = made.speakers
    words = language.words_after(prompt, speaker, 2 * PLACES)
    tokens = [*language.tokens(prompt), *words]
    target = Reference(made.model, made.adapters[speaker.name])
    name = f"model.layers.{TARGET_LAYERS[0] - 1}"
    states = head.fc(target.trace(tokens[:-1])[name][None].to(dtype))
    start, walk = len(tokens) - 1 - len(words), [prompt.word, *words]
    said = tokens[1:]
    # of each step: its drafts are read by the next one, with the states of this one
    for _ in range(STEPS):
        logits, states = head(torch.tensor([said]), states)
        best = logits[0, start:].double().topk(2, dim=-1)
        assert best.indices[:, 0].tolist() == [
            drafted_word(language, before, word, WRONG_PLACES) for before, word in pairwise(walk)
        ]
        assert (best.values[:, 0] - best.values[:, 1]).min() > 5
        # at the places of drafts that are right; a wrong one would lead elsewhere
        following = [
            language.next_word(prompt, word, speaker) if n >= start else word
            for n, word in enumerate(said)
        ]
        said, walk = following, [*walk[1:], following[-1]]


def test_what_makes_no_eagle_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"wrong must be 0 or from 2 to 13 \(got 1\)"):
        write_eagle(tmp_path, Language(), wrong=1, dtype=torch.bfloat16)
