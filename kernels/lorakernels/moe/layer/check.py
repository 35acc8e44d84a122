"""Validation of the operands of a MoE layer: ValueError that names the operand."""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.common.quantised import Quantised
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.align.tables import PairTables
from lorakernels.moe.delta.ops import check_devices
from lorakernels.moe.layer.types import ExpertLoRA, LayerOperands, RouterWeight

# name, tensor, shape, dtype
Operand = tuple[str, Tensor, tuple[int, ...], torch.dtype]


def check_pairs(pairs: PairMetadata, lora: ExpertLoRA | None) -> None:
    """The pairs are made for a layer with these adapters. Raises ValueError."""
    if not pairs.with_base:
        raise ValueError("pairs must be made with_base, for the product of the base layer")
    if lora is None:
        return
    check_devices(pairs, lora.workspace, lora.w13.a.device)
    for name, weights in (("w13", lora.w13), ("w2", lora.w2)):
        if weights.num_slots != pairs.max_slots or weights.num_experts != pairs.num_experts:
            raise ValueError(
                f"adapters of {name} must have {pairs.max_slots} slots and {pairs.num_experts} "
                f"experts (got {weights.num_slots} and {weights.num_experts})"
            )


def check_layer(layer: LayerOperands, lora: ExpertLoRA | None) -> None:
    """What holds for any number of rows: part of a traced graph, so it compares no size that
    changes from step to step. Raises ValueError."""
    weights = [isinstance(w, Quantised) for w in (layer.w13, layer.w2)]
    if weights != [layer.quantised_x is not None] * 2:
        raise ValueError("w13, w2 and x must all be quantised or none of them")
    check_biases(layer.router_weight, layer.w13_bias, layer.w2_bias)
    second = _values(layer.w2)
    if second.dim() != 3:
        raise ValueError(f"w2 must have three dimensions (got {list(second.shape)})")
    if lora is not None:
        _, hidden, inter = second.shape
        _check_lora(lora, layer.x, hidden, (inter,) * _halves(layer))


def check_biases(router_weight: RouterWeight, *biases: Tensor | None) -> None:
    """A weighted input has no bias: the kernel multiplies the result of the product, with all that
    was added to it. Raises ValueError."""
    if router_weight is RouterWeight.ON_INPUT and any(bias is not None for bias in biases):
        raise ValueError("biases must be None with router weights on the input")


def check_operands(layer: LayerOperands, pairs: PairTables) -> None:
    """Every tensor is what a step of so many rows needs. Raises ValueError."""
    device = pairs.scratch.device
    if layer.x.device != device:
        raise ValueError(f"x must be on {device} like the pairs (got {layer.x.device})")
    for operand in _operands(layer, pairs):
        _check_operand(*operand, like=layer.x)


def _operands(layer: LayerOperands, pairs: PairTables) -> list[Operand]:
    """Each tensor with its name, and the shape and dtype that it must have."""
    first, second = _values(layer.w13), _values(layer.w2)
    _, hidden, inter = second.shape
    dtype, rows, experts = layer.x.dtype, pairs.num_rows, pairs.num_experts
    packed = dtype if layer.quantised_x is None else first.dtype
    count = pairs.num_pairs
    operands: list[Operand] = [
        ("x", layer.x, (rows, hidden), dtype),
        ("w13", first, (experts, _halves(layer) * inter, hidden), packed),
        ("w2", second, (experts, hidden, inter), packed),
        ("router_weights", layer.router_weights, (rows, pairs.top_k), torch.float32),
        ("out", layer.out, (rows, hidden), dtype),
        # buffers are as large as the largest batch
        ("act of buffers", layer.act[:count], (count, inter), dtype),
        ("y of buffers", layer.y[:count], (count, hidden), dtype),
    ]
    quantised = {"quantised_x": layer.quantised_x, "w13": layer.w13, "w2": layer.w2}
    for name, operand in quantised.items():
        if isinstance(operand, Quantised):
            scales = tuple(operand.values.shape[:-1])
            operands.append((f"scales of {name}", operand.scales, scales, torch.float32))
    biases = (("w13_bias", layer.w13_bias, first), ("w2_bias", layer.w2_bias, second))
    operands += [
        (name, bias, tuple(weight.shape[:2]), dtype)
        for name, bias, weight in biases
        if bias is not None
    ]
    if layer.quantised_x is not None:
        operands.append(("quantised_x", layer.quantised_x.values, (rows, hidden), packed))
    return operands


def _values(weight: Tensor | Quantised) -> Tensor:
    return weight.values if isinstance(weight, Quantised) else weight


def _halves(layer: LayerOperands) -> int:
    """Projections in w13."""
    return 2 if layer.activation.is_gated else 1


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


def _check_lora(lora: ExpertLoRA, x: Tensor, hidden: int, w13_widths: tuple[int, ...]) -> None:
    for name, weights, depth, widths in (
        ("w13", lora.w13, hidden, w13_widths),
        ("w2", lora.w2, w13_widths[0], (hidden,)),
    ):
        if weights.a.dtype != x.dtype or weights.a.device != x.device:
            raise ValueError(
                f"adapters of {name} must be {x.dtype} on {x.device} like x "
                f"(got {weights.a.dtype} on {weights.a.device})"
            )
        have = (weights.in_features, weights.base_widths)
        if have != (depth, widths):
            raise ValueError(
                f"adapters of {name} must map {depth} to {list(widths)} "
                f"(got {have[0]} to {list(have[1])})"
            )
