"""What a MoE layer refuses, before anything is launched: ValueError that names the operand."""

from __future__ import annotations

from torch import Tensor

from lorakernels.moe.align import PairMetadata
from lorakernels.moe.experts_types import Activation, ExpertBuffers, ExpertLoRA, Quantised


def check_experts(
    x: Tensor,
    w13: Tensor | Quantised,
    w2: Tensor | Quantised,
    router_weights: Tensor,
    pairs: PairMetadata,
    buffers: ExpertBuffers,
    out: Tensor,
    activation: Activation,
    lora: ExpertLoRA | None,
    quantised_x: Quantised | None,
) -> None:
    if not pairs.with_base:
        raise ValueError("pairs must be made with_base, for the product of the base layer")
    weights = [isinstance(w, Quantised) for w in (w13, w2)]
    if weights != [quantised_x is not None] * 2:
        raise ValueError("w13, w2 and x must all be quantised or none of them")
    first, second = (w.values if isinstance(w, Quantised) else w for w in (w13, w2))
    _, hidden, inter = second.shape
    halves = 2 if activation is Activation.SILU_GATED else 1
    wanted = {
        "x": (x, (pairs.num_rows, hidden)),
        "w13": (first, (pairs.num_experts, halves * inter, hidden)),
        "w2": (second, (pairs.num_experts, hidden, inter)),
        "router_weights": (router_weights, (pairs.num_rows, pairs.top_k)),
        "out": (out, (pairs.num_rows, hidden)),
    }
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {list(shape)} (got {list(tensor.shape)})")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous (got strides {tensor.stride()})")
    if buffers.act.shape[0] < pairs.num_pairs or buffers.act.shape[1] != inter:
        raise ValueError(
            f"buffers must hold {pairs.num_pairs} pairs of {inter} (got {list(buffers.act.shape)})"
        )
    if buffers.y.shape[1] != hidden:
        raise ValueError(f"buffers must hold rows of {hidden} (got {buffers.y.shape[1]})")
    if lora is not None:
        _check_lora(lora, hidden, inter, halves, pairs)


def _check_lora(
    lora: ExpertLoRA, hidden: int, inter: int, halves: int, pairs: PairMetadata
) -> None:
    for name, weights, depth, widths in (
        ("w13", lora.w13, hidden, (inter,) * halves),
        ("w2", lora.w2, inter, (hidden,)),
    ):
        have = (weights.in_features, weights.slice_widths)
        if have != (depth, widths):
            raise ValueError(
                f"adapters of {name} must map {depth} to {list(widths)} "
                f"(got {have[0]} to {list(have[1])})"
            )
        if weights.num_slots != pairs.max_slots or weights.num_experts != pairs.num_experts:
            raise ValueError(
                f"adapters of {name} must have {pairs.max_slots} slots and {pairs.num_experts} "
                f"experts (got {weights.num_slots} and {weights.num_experts})"
            )
