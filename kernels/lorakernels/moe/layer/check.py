"""What a MoE layer refuses, before anything is launched: ValueError that names the operand."""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.layer.types import Activation, ExpertBuffers, ExpertLoRA, Quantised


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
    if second.dim() != 3:
        raise ValueError(f"w2 must have three dimensions (got {list(second.shape)})")
    _, hidden, inter = second.shape
    halves = 2 if activation is Activation.SILU_GATED else 1
    dtype, rows, experts = x.dtype, pairs.num_rows, pairs.num_experts
    packed = dtype if quantised_x is None else first.dtype
    operands: list[tuple[str, Tensor, tuple[int, ...], torch.dtype]] = [
        ("x", x, (rows, hidden), dtype),
        ("w13", first, (experts, halves * inter, hidden), packed),
        ("w2", second, (experts, hidden, inter), packed),
        ("router_weights", router_weights, (rows, pairs.top_k), torch.float32),
        ("out", out, (rows, hidden), dtype),
        # buffers are as large as the largest batch
        ("act of buffers", buffers.act[: pairs.num_pairs], (pairs.num_pairs, inter), dtype),
        ("y of buffers", buffers.y[: pairs.num_pairs], (pairs.num_pairs, hidden), dtype),
    ]
    for name, w in (("x", quantised_x), ("w13", w13), ("w2", w2)):
        if isinstance(w, Quantised):
            scales = tuple(w.values.shape[:-1])
            operands.append((f"scales of {name}", w.scales, scales, torch.float32))
    if quantised_x is not None:
        operands.append(("quantised_x", quantised_x.values, (rows, hidden), packed))
    for operand in operands:
        _check_operand(*operand, like=x)
    if lora is not None:
        _check_lora(lora, x, inter, halves, pairs)


def _check_operand(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, *, like: Tensor
) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be {list(shape)} (got {list(tensor.shape)})")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous (got strides {tensor.stride()})")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} (got {tensor.dtype})")
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on {like.device} like x (got {tensor.device})")


def _check_lora(lora: ExpertLoRA, x: Tensor, inter: int, halves: int, pairs: PairMetadata) -> None:
    hidden = x.shape[1]
    for name, weights, depth, widths in (
        ("w13", lora.w13, hidden, (inter,) * halves),
        ("w2", lora.w2, inter, (hidden,)),
    ):
        if weights.a.dtype != x.dtype or weights.a.device != x.device:
            raise ValueError(
                f"adapters of {name} must be {x.dtype} on {x.device} like x "
                f"(got {weights.a.dtype} on {weights.a.device})"
            )
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
