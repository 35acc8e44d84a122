"""The MTP layer, computed as its format says: transformers has no model for it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextDecoderLayer,
    Qwen3NextRMSNorm,
    Qwen3NextRotaryEmbedding,
)

from loragate.engine.drafts import WRONG_PLACES, drafted_word
from loragate.engine.folders import write_adapter, write_model
from loragate.engine.language import KINDS, PLACES, Language, draw_prompt, draw_speakers
from loragate.engine.mtp import write_model_with_mtp
from loragate.engine.reference import Reference

HYBRID = KINDS["hybrid"]
STEPS = 3
DTYPES = pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16],
    ids=["fp64", "fp32", "fp16", "bf16"],
)


class Head(nn.Module):
    """Names and order of computation as in vLLM 0.26, qwen3_next_mtp.py; embeddings and head are
    those of the model."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        super().__init__()
        config = AutoConfig.from_pretrained(folder)
        config._attn_implementation = config._experts_implementation = "eager"
        size, eps = config.hidden_size, config.rms_norm_eps
        stored = load_file(folder / "model.safetensors")
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)
        self.fc = nn.Linear(2 * size, size, bias=False)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            setattr(self, name, Qwen3NextRMSNorm(size, eps))
        attends = config.layer_types.index("full_attention")
        self.layers = nn.ModuleList([Qwen3NextDecoderLayer(config, attends)])
        self.rotary = Qwen3NextRotaryEmbedding(config)
        weights = {n.removeprefix("mtp."): w for n, w in stored.items() if n.startswith("mtp.")}
        weights = stacked(weights, "layers.0.mlp.experts", config.num_experts)
        weights["embed_tokens.weight"] = stored["model.embed_tokens.weight"]
        weights["lm_head.weight"] = stored["lm_head.weight"]
        # all weights have a name, and all names a weight
        self.load_state_dict(weights, strict=True)
        self.to(dtype)

    def forward(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and the states of the next step; both [1, tokens, ...]."""
        embedded = self.pre_fc_norm_embedding(self.embed_tokens(tokens))
        joined = self.fc(torch.cat([embedded, self.pre_fc_norm_hidden(states)], dim=-1))
        count = tokens.shape[1]
        rotated = self.rotary(joined, torch.arange(count)[None])
        ahead = torch.full((count, count), -torch.inf, dtype=joined.dtype).triu(1)
        residual = self.layers[0](joined, rotated, attention_mask=ahead[None, None])
        state = self.norm(residual)
        return self.lm_head(state), state


def stacked(weights: dict[str, Tensor], prefix: str, experts: int) -> dict[str, Tensor]:
    """As transformers holds the experts of a layer."""
    names = ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (
        torch.stack([weights.pop(f"{prefix}.{n}.{name}.weight") for n in range(experts)])
        for name in names
    )
    return weights | {
        f"{prefix}.gate_up_proj": torch.cat([gate, up], dim=1),
        f"{prefix}.down_proj": down,
    }


@pytest.mark.parametrize("wrong", [0, WRONG_PLACES, PLACES])
@torch.no_grad()
def test_a_layer_drafts_wrong_words_where_it_is_said(tmp_path: Path, wrong: int) -> None:
    write_model_with_mtp(tmp_path, HYBRID, wrong=wrong, dtype=torch.bfloat16)
    head, word = Head(tmp_path, torch.float32), HYBRID.word
    # all pairs of places of a cycle, behind a prompt
    places = [(one, other) for one in range(PLACES) for other in range(PLACES)]
    read = [(word(3, one), word(3, other)) for one, other in places]
    start = HYBRID.tokens(draw_prompt(HYBRID, [HYBRID.base()], Random(3)))
    states = Reference(tmp_path).trace([*start, *(before for before, _ in read)])["model.norm"]
    tokens = torch.tensor([[*start, *(last for _, last in read)]])
    said = head(tokens, states[None].float())[0][0, len(start) :].argmax(-1).tolist()
    assert said == [drafted_word(HYBRID, *two, wrong) for two in read]


@DTYPES
@torch.no_grad()
def test_a_layer_drafts_what_a_draft_model_drafts_in_every_step_whoever_speaks(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    stored = torch.float32 if dtype == torch.float64 else dtype
    write_model_with_mtp(tmp_path / "model", HYBRID, wrong=WRONG_PLACES, dtype=stored)
    random = Random(3)
    (speaker,) = draw_speakers(HYBRID, 1, random)
    write_adapter(tmp_path / "adapter", HYBRID, speaker, rank=8, alpha=12)
    prompt = draw_prompt(HYBRID, [HYBRID.base(), speaker], random)
    head = Head(tmp_path / "model", dtype)
    for folder, who in ((None, HYBRID.base()), (tmp_path / "adapter", speaker)):
        words = HYBRID.words_after(prompt, who, 2 * PLACES)
        tokens = [*HYBRID.tokens(prompt), *words]
        model = Reference(tmp_path / "model", folder).rounded(dtype)
        states = model.trace(tokens[:-1])["model.norm"][None].to(dtype)
        said, read = tokens[1:], [*pairwise([prompt.word, *words])]
        # of each step: its drafts are read by the next one, with the states of this one
        for _ in range(STEPS):
            logits, states = head(torch.tensor([said]), states)
            best = logits[0, -len(read) :].double().topk(2, dim=-1)
            drafts = [drafted_word(HYBRID, *two, WRONG_PLACES) for two in read]
            assert best.indices[:, 0].tolist() == drafts
            assert (best.values[:, 0] - best.values[:, 1]).min() > 7
            said = [*said[: -len(read)], *drafts]
            read = [(word, draft) for (_, word), draft in zip(read, drafts, strict=True)]


def test_the_model_beside_the_layer_is_the_same_one(tmp_path: Path) -> None:
    """transformers loads no weight of the layer, and vLLM reads as many layers as it has anyway."""
    write_model(tmp_path / "plain", HYBRID, dtype=torch.bfloat16)
    write_model_with_mtp(tmp_path / "drafting", HYBRID, wrong=0, dtype=torch.bfloat16)
    plain, drafting = (Reference(tmp_path / name).model for name in ("plain", "drafting"))
    assert plain.state_dict().keys() == drafting.state_dict().keys()
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, drafting.state_dict()[name]), name
    configs = [
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("plain", "drafting")
    ]
    assert configs[0] == configs[1]


def test_what_makes_no_layer_is_refused(tmp_path: Path) -> None:
    for language, wrong, message in (
        (HYBRID, 1, r"wrong must be 0 or from 2 to 13 \(got 1\)"),
        (Language(), 2, "must have linear_layers: no other model has an MTP layer"),
    ):
        with pytest.raises(ValueError, match=message):
            write_model_with_mtp(tmp_path, language, wrong=wrong, dtype=torch.bfloat16)
    assert [*tmp_path.iterdir()] == []
