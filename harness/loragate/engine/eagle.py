"""An EAGLE-3 head for a checkpoint, in the form that vLLM 0.26 loads: one layer that reads the last
token and, of the token before, a hidden state of the target, in later steps its own.

It drafts what the draft model of `loragate.engine.drafts` drafts: as many places ahead as lie
between the last two words. The hidden state has the place of the word before, the embedding that
of the last word and the angle of twice that place. Attention sees its own token only; it copies the
embedding into the residual stream and takes away what the step before has left there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loragate.engine.drafts import draft_head, require_draft, sharp_attention
from loragate.engine.folders import model_config, write_checkpoint
from loragate.engine.language import PLACES, Language
from loragate.engine.layers.attention import HEAD_SIZE, HEADS, KV_HEADS
from loragate.engine.layers.layout import Layout, Pair, angle, norm, zeros
from loragate.engine.layers.mlp import mlp_of, sum_of_angles

# the target's hidden state after so many layers: it has the place of its word
TARGET_LAYERS = (1,)


def write_eagle(folder: Path, language: Language, *, wrong: int, dtype: torch.dtype) -> None:
    """For targets of `language`, which must have 2 layers or more. `wrong` as `write_draft` has it.
    ValueError."""
    require_draft(language, wrong)
    dense = replace(language, experts=1, linear_layers=())
    write_checkpoint(folder, _weights(Layout(dense), wrong), _config(dense, dtype), dtype)


def _config(language: Language, dtype: torch.dtype) -> dict[str, Any]:
    return model_config(language, dtype) | {
        "architectures": ["Eagle3Qwen3ForCausalLM"],
        "num_hidden_layers": 1,
        "eagle_aux_hidden_state_layer_ids": list(TARGET_LAYERS),
    }


def _weights(layout: Layout, wrong: int) -> dict[str, Tensor]:
    before, twice, result = layout.selected(1), layout.selected(0), _result(layout)
    difference = sum_of_angles(layout, twice, before, result)
    # the sine of the angle that is taken away
    difference[1][:, before.start + 1] *= -1
    layer = _attention(layout) | mlp_of("mlp", difference)
    # an embedding has two angles and 1
    layer["input_layernorm.weight"] = norm(layout, 3)
    # three angles, 1 and the cycle; a state has the result as well, or what stands for it
    layer["post_attention_layernorm.weight"] = norm(layout, 5)
    layer["hidden_norm.weight"] = norm(layout, 6)
    return {
        "embed_tokens.weight": _embeddings(layout),
        "fc.weight": _from_target(layout),
        "norm.weight": norm(layout, 6),
        "lm_head.weight": draft_head(layout, wrong),
    } | {f"midlayer.{name}": value for name, value in layer.items()}


def _result(layout: Layout) -> Pair:
    return layout.place(layout.language.layers)


def _fillers(layout: Layout) -> Pair:
    """Values of 1 in what comes from the target, for the three angles that a state has besides."""
    start = layout.is_number(0, 0)
    return slice(start, start + 3)


def _embeddings(layout: Layout) -> Tensor:
    """[tokens, hidden size]: the place of a word, and twice that place."""
    table = zeros(layout.language.num_tokens, layout.size)
    table[:, layout.one] = 1
    for cycle in range(layout.language.cycles):
        for place in range(PLACES):
            row = table[layout.language.word(cycle, place)]
            row[layout.value] = angle(place)
            row[layout.selected(0)] = angle(2 * place)
    return table


def _from_target(layout: Layout) -> Tensor:
    """[hidden size, hidden size of the target]: its place, 1 and the cycle."""
    weight = zeros(layout.size, layout.size)
    cycles = range(layout.is_of_cycle(0), layout.is_of_cycle(layout.language.cycles))
    for value in (layout.place(0).start, layout.place(0).start + 1, layout.one, *cycles):
        weight[value, value] = 1
    weight[_fillers(layout), layout.one] = 1
    return weight


def _attention(layout: Layout) -> dict[str, Tensor]:
    """Reads an embedding and, behind it, a state; writes what is to be added to the state."""
    size = layout.size
    last, before, twice = layout.place(0), layout.selected(1), layout.selected(0)
    # what a state has there is replaced by what the embedding, or the state itself, has
    moves: list[tuple[Pair, int | None]] = [
        (last, layout.value.start),
        (before, size + last.start),
        (twice, twice.start),
        (_result(layout), None),
        (_fillers(layout), None),
    ]
    v, o = zeros(KV_HEADS, HEAD_SIZE, 2 * size), zeros(size, HEADS, HEAD_SIZE)
    row = 0
    for target, source in moves:
        for offset in range(target.stop - target.start):
            v[:, row, size + target.start + offset] -= 1
            if source is not None:
                v[:, row, source + offset] += 1
            o[target.start + offset, :, row] = 1 / HEADS
            row += 1
    return sharp_attention(2 * size, layout.one, behind=0) | {
        "self_attn.v_proj.weight": v.flatten(0, 1),
        "self_attn.o_proj.weight": o.flatten(1, 2),
    }
