"""An MLP, or experts, that add two angles."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from loragate.engine.language import LayerShifts, Part
from loragate.engine.layers.layout import (
    GAIN,
    LOUDNESS,
    Delta,
    Deltas,
    Layout,
    Pair,
    norm,
    reading,
    writing,
    zeros,
)

# eight of them are used
INTERMEDIATE = 64


def mlp_weights(layout: Layout, layer: int) -> dict[str, Tensor]:
    weights = {"post_attention_layernorm.weight": norm(layout, 4.0 + 2 * layer)}
    experts = layout.language.experts
    pairs = (layout.place(layer), layout.selected(layer), layout.place(layer + 1))
    if experts == 1:
        return weights | mlp_of("mlp", sum_of_angles(layout, *pairs))
    weights["mlp.gate.weight"] = router(layout)
    if layout.language.linear_layers:
        weights |= silent_shared_expert(layout)
    for expert in range(experts):
        # of a pair one expert has the cosine and the other one the sine, each with half a weight
        for half, number in enumerate((expert, experts + expert)):
            own = sum_of_angles(layout, *pairs, (half,))
            own[2] = 2 * own[2]
            weights |= mlp_of(f"mlp.experts.{number}", own)
    return weights


def silent_shared_expert(layout: Layout) -> dict[str, Tensor]:
    """One that adds nothing: what an adapter shifts differs from expert to expert."""
    gate = zeros(INTERMEDIATE, layout.size)
    weights = mlp_of("mlp.shared_expert", [gate, gate.clone(), gate.T.clone()])
    return weights | {"mlp.shared_expert_gate.weight": zeros(1, layout.size)}


def mlp_of(prefix: str, gate_up_down: list[Tensor]) -> dict[str, Tensor]:
    names = (Part.GATE.value, Part.UP.value, Part.DOWN.value)
    return {f"{prefix}.{n}.weight": w for n, w in zip(names, gate_up_down, strict=True)}


def sum_of_angles(
    layout: Layout, first: Pair, second: Pair, out: Pair, halves: tuple[int, ...] = (0, 1)
) -> list[Tensor]:
    """gate, up and down: cos (half 0) and sin (half 1) of the sum of two angles, in `out`."""
    gate, up = zeros(INTERMEDIATE, layout.size), zeros(INTERMEDIATE, layout.size)
    down = zeros(layout.size, INTERMEDIATE)
    # cos = cc - ss, sin = sc + cs
    terms = ((0, 0, 0, 1.0), (0, 1, 1, -1.0), (1, 1, 0, 1.0), (1, 0, 1, 1.0))
    for number, (half, of_first, of_second, sign) in enumerate(terms):
        for neuron, direction in ((2 * number, 1.0), (2 * number + 1, -1.0)):
            gate[neuron, first.start + of_first] = direction * GAIN
            up[neuron, second.start + of_second] = 1
            if half in halves:
                down[out.start + half, neuron] = direction * sign / GAIN
    return [gate, up, down]


def router(layout: Layout) -> Tensor:
    """The words of a cycle use one pair of experts."""
    experts = layout.language.experts
    weight = zeros(2 * experts, layout.size)
    for cycle in range(layout.language.cycles):
        pair = layout.language.expert_of(cycle)
        weight[[pair, experts + pair], layout.is_of_cycle(cycle)] = LOUDNESS
    return weight


def mlp_deltas(
    layout: Layout, layer: int, shifts: LayerShifts, weights: Mapping[str, Tensor]
) -> Deltas:
    deltas: Deltas = {}
    experts = layout.language.experts
    for expert, parts in enumerate(shifts.mlp):
        modules = ["mlp"]
        if experts > 1:
            modules = [f"mlp.experts.{number}" for number in (expert, experts + expert)]
        if layout.language.linear_layers and expert == 0:
            # whoever targets gate, up and down has factors for it, too; it goes on adding nothing
            modules.append("mlp.shared_expert")
        for module in modules:
            for part, shift in parts.items():
                weight = weights[f"{module}.{part.value}.weight"]
                deltas[f"{module}.{part.value}"] = _mlp_delta(layout, layer, part, shift, weight)
    return deltas


def _mlp_delta(layout: Layout, layer: int, part: Part, shift: int, weight: Tensor) -> Delta:
    if part is Part.GATE:
        return reading(weight, layout.place(layer), shift)
    if part is Part.UP:
        return reading(weight, layout.selected(layer), shift)
    return writing(weight, layout.place(layer + 1), shift)
