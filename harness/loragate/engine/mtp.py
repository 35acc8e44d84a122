"""A checkpoint of Qwen3-Next with the layer that predicts the token after the next one, in the form
that vLLM 0.26 loads as method `mtp` (qwen3_next_mtp.py): names `mtp.*` beside those of the model.
The config has no key for it: without `num_nextn_predict_layers` vLLM takes one such layer.

Of each token it reads the embedding of the token that follows and the model's last hidden state,
behind the norm; in later steps its own. Embeddings and head are the model's. The layer drafts what
the draft model of `loragate.engine.drafts` drafts: as many places ahead as lie between two words.

    fc         takes place and cycle of the last word, from the state the place of the one before
    attention  sees the token itself and adds twice the last place, less the one before. Its output
               gate opens that of 13 rotations which belongs to the last place
    experts    turn a draft at a wrong place into what is said there
    norm       makes the state as long as that of the model
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from loragate.engine.drafts import require_draft, sharp_attention
from loragate.engine.folders import write_model
from loragate.engine.language import PLACES, Language
from loragate.engine.layers.attention import HEAD_SIZE, HEADS, KV_HEADS
from loragate.engine.layers.layout import Layout, Pair, angle, norm, zeros
from loragate.engine.layers.mlp import INTERMEDIATE, mlp_of, router, silent_shared_expert

# 400 times the cosine to a place exceeds 376 by 24 at that place, and falls short by 22 or more at
# any other one
_STEEPNESS, _THRESHOLD = 400.0, 376.0
# silu(x + 4) - silu(x - 4) is 0 or 8, whatever rounding makes of x; bf16 has 376 + 4 and 376 - 4
_HALF_STEP = 4.0
# sums of squares of an embedding, of a state behind `fc` and behind attention
_EMBEDDED, _JOINED, _ATTENDED = 3.0, 5.0, 6.0


def write_model_with_mtp(
    folder: Path, language: Language, *, wrong: int, dtype: torch.dtype
) -> None:
    """The model of `language`, which must have layers of linear attention, and its layer for
    drafts. `wrong` as `write_draft` has it. ValueError."""
    require_draft(language, wrong)
    if not language.linear_layers:
        raise ValueError("language must have linear_layers: no other model has an MTP layer")
    write_model(folder, language, dtype=dtype, beside=_weights(Layout(language), wrong))


def _weights(layout: Layout, wrong: int) -> dict[str, Tensor]:
    of_model = 3.0 + 2 * layout.language.layers
    layer = _attention(layout) | _experts(layout, wrong)
    layer["input_layernorm.weight"] = norm(layout, _JOINED)
    layer["post_attention_layernorm.weight"] = norm(layout, _ATTENDED)
    last = norm(layout, _ATTENDED)
    # a value that nothing reads any more fills the length up
    last[_before(layout)] *= math.sqrt(1 + of_model - _ATTENDED)
    weights = {
        "pre_fc_norm_embedding.weight": norm(layout, _EMBEDDED),
        "pre_fc_norm_hidden.weight": norm(layout, of_model),
        "fc.weight": _joined(layout),
        "norm.weight": last,
    }
    weights |= {f"layers.0.{name}": value for name, value in layer.items()}
    return {f"mtp.{name}": value for name, value in weights.items()}


def _before(layout: Layout) -> Pair:
    """The place of the word before; in states of the model the number that its first layer read."""
    return layout.selected(0)


def _result(layout: Layout) -> Pair:
    return layout.place(layout.language.layers)


def _one_of_state(layout: Layout) -> int:
    """What a state has for 1: it is longer than it should be where the model's layers add less than
    they should, and the place of the word before is as much longer."""
    return layout.bos


def _joined(layout: Layout) -> Tensor:
    """[hidden size, embedding and state]"""
    size, last, before = layout.size, layout.place(0), _before(layout)
    weight = zeros(size, 2 * size)
    cycles = range(layout.is_of_cycle(0), layout.is_of_cycle(layout.language.cycles))
    for value in (last.start, last.start + 1, layout.one, *cycles):
        weight[value, value] = 1
    weight[before, size + last.start : size + last.stop] = torch.eye(2, dtype=torch.float64)
    weight[_one_of_state(layout), size + layout.one] = 1
    return weight


def _is_at(layout: Layout, pair: Pair, one: int, place: int, more: float = 0.0) -> Tensor:
    """[hidden size]: a row whose product is 24 for an angle at this place, -22 or less for others,
    and `more`. `one`: where 1 stands, as long as the angle."""
    row = zeros(layout.size)
    row[pair] = _STEEPNESS * angle(place)
    row[one] = more - _THRESHOLD
    return row


def _attention(layout: Layout) -> dict[str, Tensor]:
    """Adds the angle of the draft."""
    size, before = layout.size, _before(layout)
    gates, v = zeros(HEADS, HEAD_SIZE, size), zeros(KV_HEADS, HEAD_SIZE, size)
    o = zeros(size, HEADS, HEAD_SIZE)
    for place in range(PLACES):
        rows = slice(2 * place, 2 * place + 2)
        gates[:, rows] = _is_at(layout, layout.place(0), layout.one, place)
        v[:, rows, before] = torch.eye(2, dtype=torch.float64)
        cos, sin = angle(2 * place).tolist()
        # the angle of 2 * place - before, of that of `before`
        turned = torch.tensor([[cos, sin], [sin, -cos]], dtype=torch.float64) / HEADS
        o[_result(layout), :, rows] = turned[:, None]
    # such a model turns a quarter of each head by the place, which tells a token from all others
    own = sharp_attention(size, layout.one, behind=0)
    q = own["self_attn.q_proj.weight"].view(HEADS, HEAD_SIZE, size)
    return own | {
        "self_attn.q_proj.weight": torch.cat([q, gates], dim=1).flatten(0, 1),
        "self_attn.v_proj.weight": v.flatten(0, 1),
        "self_attn.o_proj.weight": o.flatten(1, 2),
    }


def _experts(layout: Layout, wrong: int) -> dict[str, Tensor]:
    """Equal experts, of which each cycle uses those of the model: a draft at a place below `wrong`
    becomes the one that the head of a draft model says there."""
    gate, up = zeros(INTERMEDIATE, layout.size), zeros(INTERMEDIATE, layout.size)
    down = zeros(layout.size, INTERMEDIATE)
    result, one = _result(layout), _one_of_state(layout)
    for place in range(wrong):
        for neuron, direction in ((2 * place, 1), (2 * place + 1, -1)):
            gate[neuron] = _is_at(layout, result, one, place, direction * _HALF_STEP)
            up[neuron, layout.one] = direction / (2 * _HALF_STEP)
            down[result, neuron] = angle((place - 1) % wrong) - angle(place)
    weights = {"mlp.gate.weight": router(layout)} | silent_shared_expert(layout)
    for expert in range(2 * layout.language.experts):
        equal = [gate.clone(), up.clone(), down.clone()]
        weights |= mlp_of(f"mlp.experts.{expert}", equal)
    return weights
