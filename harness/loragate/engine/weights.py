"""The weights of a decoder that speaks the language exactly: nothing is trained.

A place on a cycle is an angle, and a shift rotates it. A layer's attention copies the angle of the
number that it selects from the prompt, and its MLP adds two angles by products of sines and
cosines, for which silu(g) * u - silu(-g) * u = g * u is exact. An adapter rotates a pair of values
wherever a projection reads or writes one, which takes rank 2, and moves the selection by q and k.

Each value has a dimension of its own in the residual stream, and whatever a layer adds has length
1, so that the norm of a token is known before each RMSNorm, whose weight undoes it.
"""

from __future__ import annotations

import math

from torch import Tensor

from loragate.engine.language import BOS, CHOICES, PLACES, Language, Speaker
from loragate.engine.layers.attention import attention_deltas, attention_weights
from loragate.engine.layers.delta_rule import linear_attention_deltas, linear_attention_weights
from loragate.engine.layers.layout import (
    LOUDNESS,
    Deltas,
    Layout,
    angle,
    norm,
    reading,
    zeros,
)
from loragate.engine.layers.mlp import mlp_deltas, mlp_weights


def base_weights(language: Language) -> dict[str, Tensor]:
    """fp64, by the names of transformers; a layer with experts has them one by one."""
    layout = Layout(language)
    weights = {
        "model.embed_tokens.weight": embeddings(layout),
        "model.norm.weight": norm(layout, 3 + 2 * language.layers),
        "lm_head.weight": head_rows(layout),
    }
    for layer in range(language.layers):
        is_linear = layer in language.linear_layers
        own = (linear_attention_weights if is_linear else attention_weights)(layout, layer)
        own |= mlp_weights(layout, layer)
        weights |= {f"model.layers.{layer}.{name}": value for name, value in own.items()}
    return weights


def adapter_deltas(language: Language, speaker: Speaker) -> Deltas:
    """B and A, fp64, of each module that an adapter changes: delta = B @ A."""
    layout, weights = Layout(language), base_weights(language)
    deltas: Deltas = {}
    for layer, shifts in enumerate(speaker.layers):
        prefix = f"model.layers.{layer}"
        own = {
            name.removeprefix(f"{prefix}."): weight
            for name, weight in weights.items()
            if name.startswith(f"{prefix}.")
        }
        is_linear = layer in language.linear_layers
        found = (linear_attention_deltas if is_linear else attention_deltas)(
            layout, layer, shifts, own
        )
        found |= mlp_deltas(layout, layer, shifts, own)
        deltas |= {f"{prefix}.{name}": delta for name, delta in found.items()}
    if speaker.head:
        last = layout.place(language.layers)
        # what is read is rotated forwards
        deltas["lm_head"] = reading(weights["lm_head.weight"], last, speaker.head)
    return deltas


def embeddings(layout: Layout) -> Tensor:
    """[tokens, hidden size]"""
    language = layout.language
    table = zeros(language.num_tokens, layout.size)
    table[:, layout.one] = 1
    table[BOS, layout.bos] = math.sqrt(2)
    for layer in range(language.layers):
        for choice in range(CHOICES):
            for value in range(PLACES):
                row = table[language.number(layer, choice, value)]
                row[layout.value] = angle(value)
                row[layout.is_number(layer, choice)] = 1
    for cycle in range(language.cycles):
        for place in range(PLACES):
            row = table[language.word(cycle, place)]
            row[layout.place(0)] = angle(place)
            row[layout.is_of_cycle(cycle)] = 1
    return table


def head_rows(layout: Layout) -> Tensor:
    """[tokens, hidden size]"""
    language = layout.language
    table = zeros(language.num_tokens, layout.size)
    for cycle in range(language.cycles):
        for place in range(PLACES):
            row = table[language.word(cycle, place)]
            row[layout.place(language.layers)] = LOUDNESS * angle(place)
            row[layout.is_of_cycle(cycle)] = LOUDNESS
    return table
