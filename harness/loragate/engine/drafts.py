"""A draft model: small, without adapters, and right or wrong where it is said.

It repeats the last step: of a word and the word before it, on one cycle, it reads how many places
lie between them and goes as many ahead. What all adapters say has this form, so that drafts are
accepted for each of them. Of the places of a cycle `wrong` are exchanged with each other, so that
so many of every 13 drafts are rejected. The first one after a prompt, where there is no word
before, is a guess.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from loragate.engine.folders import model_config, write_checkpoint
from loragate.engine.language import PLACES, Language
from loragate.engine.layers.attention import HEAD_SIZE, HEADS, KV_HEADS
from loragate.engine.layers.layout import Layout, norm, zeros
from loragate.engine.layers.mlp import mlp_of, sum_of_angles
from loragate.engine.weights import embeddings, head_rows

# places of a cycle at which the drafts of checkpoints are wrong
WRONG_PLACES = 2
_LAYERS = 2
_THETA = 1e6
# of q and k after their norms: the token before and its neighbours differ by a score of 20
_SHARPNESS = 10.0


def drafted_word(language: Language, before: int, word: int, wrong: int) -> int:
    """What the draft model says after two words of a cycle. ValueError for other tokens."""
    cycle, earlier = language.place_of(before)
    own, place = language.place_of(word)
    if cycle != own:
        raise ValueError(f"words must be of one cycle (got {cycle} and {own})")
    place = (2 * place - earlier) % PLACES
    return language.word(cycle, (place - 1) % wrong if place < wrong else place)


def write_draft(folder: Path, language: Language, *, wrong: int, dtype: torch.dtype) -> None:
    """A dense checkpoint with the vocabulary of `language`, which must have 2 layers or more.
    `wrong`: 0, or from 2 to 13 of the places of each cycle. ValueError."""
    require_draft(language, wrong)
    dense = replace(language, experts=1, linear_layers=())
    config = model_config(dense, dtype) | {"num_hidden_layers": _LAYERS, "rope_theta": _THETA}
    write_checkpoint(folder, _weights(Layout(dense), wrong), config, dtype)


def require_draft(language: Language, wrong: int) -> None:
    """ValueError for what no draft can be made for."""
    if wrong not in (0, *range(2, PLACES + 1)):
        raise ValueError(f"wrong must be 0 or from 2 to {PLACES} (got {wrong})")
    if language.layers < _LAYERS:
        raise ValueError(f"language must have at least {_LAYERS} layers (got {language.layers})")


def _weights(layout: Layout, wrong: int) -> dict[str, Tensor]:
    before, step, place = layout.selected(0), layout.selected(1), layout.place(0)
    difference = sum_of_angles(layout, place, before, step)
    # the sine of the angle that is taken away
    difference[1][:, before.start + 1] *= -1
    layers = [
        _previous_word(layout) | mlp_of("mlp", difference),
        _no_attention(layout)
        | mlp_of("mlp", sum_of_angles(layout, place, step, layout.place(layout.language.layers))),
    ]
    weights = {
        "model.embed_tokens.weight": embeddings(layout),
        # place, cycle, one, the word before, the step and their sum
        "model.norm.weight": norm(layout, 6),
        "lm_head.weight": draft_head(layout, wrong),
    }
    for number, layer in enumerate(layers):
        layer["input_layernorm.weight"] = norm(layout, 3)
        layer["post_attention_layernorm.weight"] = norm(layout, 4 + number)
        weights |= {f"model.layers.{number}.{name}": value for name, value in layer.items()}
    return weights


def draft_head(layout: Layout, wrong: int) -> Tensor:
    """The head of the target, with `wrong` places of each cycle exchanged."""
    head = head_rows(layout)
    for cycle in range(layout.language.cycles):
        first = layout.language.word(cycle, 0)
        head[first : first + wrong] = head[first : first + wrong].roll(-1, dims=0)
    return head


def _no_attention(layout: Layout) -> dict[str, Tensor]:
    return {
        "self_attn.q_proj.weight": zeros(HEADS * HEAD_SIZE, layout.size),
        "self_attn.k_proj.weight": zeros(KV_HEADS * HEAD_SIZE, layout.size),
        "self_attn.v_proj.weight": zeros(KV_HEADS * HEAD_SIZE, layout.size),
        "self_attn.o_proj.weight": zeros(layout.size, HEADS * HEAD_SIZE),
        "self_attn.q_norm.weight": torch.ones(HEAD_SIZE, dtype=torch.float64),
        "self_attn.k_norm.weight": torch.ones(HEAD_SIZE, dtype=torch.float64),
    }


def _previous_word(layout: Layout) -> dict[str, Tensor]:
    """Attention to the token before, whose angle is copied."""
    v, o = zeros(KV_HEADS, HEAD_SIZE, layout.size), zeros(layout.size, HEADS, HEAD_SIZE)
    shared = HEADS // KV_HEADS
    for half in range(KV_HEADS):
        v[half, 0, layout.place(0).start + half] = 1
        o[layout.selected(0).start + half, half * shared : (half + 1) * shared, 0] = 1 / shared
    return sharp_attention(layout.size, layout.one, behind=1) | {
        "self_attn.v_proj.weight": v.flatten(0, 1),
        "self_attn.o_proj.weight": o.flatten(1, 2),
    }


def sharp_attention(columns: int, one: int, *, behind: int) -> dict[str, Tensor]:
    """q and k, and their norms, by which a token sees the one `behind` places before it, and no
    other: k is ahead by what rotary embeddings turn so many tokens. `one`: a column that is 1."""
    pairs = HEAD_SIZE // 2
    turns = behind * _THETA ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    q, k = zeros(HEADS, HEAD_SIZE, columns), zeros(KV_HEADS, HEAD_SIZE, columns)
    q[:, :pairs, one] = 1
    k[:, :pairs, one] = turns.cos()
    k[:, pairs:, one] = turns.sin()
    sharp = torch.full((HEAD_SIZE,), _SHARPNESS, dtype=torch.float64)
    return {
        "self_attn.q_proj.weight": q.flatten(0, 1),
        "self_attn.k_proj.weight": k.flatten(0, 1),
        "self_attn.q_norm.weight": sharp,
        "self_attn.k_norm.weight": sharp.clone(),
    }
