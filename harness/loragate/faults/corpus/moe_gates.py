"""Faults of MoE layers with biases, with gate and up in turn, and with other activations."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_kernel = planting("lorakernels.moe.layer.kernels.gemm", Group.MOE_LAYER)
_activation = planting("lorakernels.moe.layer.jit", Group.MOE_LAYER)
_launch = planting("lorakernels.moe.layer.launch", Group.MOE_LAYER)
_weights = planting("lorakernels.layers.moe_weights", Group.MOE_LAYER)
_packing = planting("lorakernels.layers.expert_packing", Group.MOE_LAYER)

_CLAMP = "propagate_nan=tl.PropagateNan.ALL)\n"

FAULTS = (
    _packing(
        "interleaved-b-split-in-halves",
        "pieces = self.halves(b) if len(members) == 2 else (b,)",
        "pieces = b.chunk(len(members), dim=1)",
        source="own",
        why="The first half of an interleaved B, rows of both, is taken for that of the gate.",
    ),
    _weights(
        "interleaved-weights-left-as-they-are",
        "    in_order = packing.gate_up is not GateUp.INTERLEAVED\n",
        "    in_order = True\n",
        source="own",
        why="An uncut rank computes with interleaved rows as if the gate was above up.",
    ),
    _launch(
        "bias-in-both-launches-of-a-cut-product",
        "replace(product, x=sums, bias=None)",
        "replace(product, x=sums)",
        source="own",
        why="The launch of the sums adds the bias, and the launch that goes on adds it again.",
    ),
    _weights(
        "bias-of-down-on-every-rank",
        "    if w2_bias is None or not cut.owns_bias:\n",
        "    if w2_bias is None:\n",
        source="own",
        why="The sum over tensor-parallel ranks holds the bias of down once for each of them.",
    ),
    _kernel(
        "bias-of-another-expert",
        "bias_ptr + expert.to(tl.int64) * ((GATED + 1) * WIDTH) + columns",
        "bias_ptr + expert.to(tl.int64) * WIDTH + columns",
        source="own",
        why="Biases of gate and up are indexed as if there was one half.",
    ),
    _kernel(
        "up-gets-the-bias-of-the-gate",
        "            up += tl.load(bias_ptrs + WIDTH)",
        "            up += tl.load(bias_ptrs)",
        source="own",
        why="Gate and up both add the bias of the gate.",
    ),
    _activation(
        "clamp-of-the-gate-forgotten",
        f"    gate = tl.minimum(gate, LIMIT, {_CLAMP}",
        "",
        source="own",
        why="A gate beyond the limit opens further than it may.",
    ),
    _activation(
        "up-clamped-from-above-only",
        f"    up = tl.maximum(up, -LIMIT, {_CLAMP}",
        "",
        source="own",
        why="A negative up beyond the limit is not clamped.",
    ),
    _activation(
        "gate-of-silu-for-alpha",
        "tl.sigmoid(gate * ALPHA)",
        "tl.sigmoid(gate)",
        source="own",
        why="The sigmoid of GPT-OSS is computed without its factor.",
    ),
    _activation(
        "one-of-up-lost",
        ", up + 1.0\n",
        ", up\n",
        source="own",
        why="GPT-OSS multiplies by up + 1, and up is taken as it is.",
    ),
    _activation(
        "gelu-of-erf-for-tanh",
        "x * tl.sigmoid((x + x * x * x * GELU_CUBE) * GELU_SLOPE)",
        "x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))",
        source="own",
        why="The exact GELU stands for its approximation, which the model was trained with.",
    ),
)
