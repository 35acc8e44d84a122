"""A rank's part of the base weights and biases of a MoE layer; weights of 16 or 8 bits.

Invariant: the whole tensors are checked against each other before anything is cut, and gate and up
are cut separately. Whatever their order was, a rank holds its gate above its up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lorakernels.common.choices import check_choice
from lorakernels.common.quantised import Quantised, check_8_bit
from lorakernels.common.stacked_weights import check_tensor
from lorakernels.layers.expert_packing import ExpertPacking
from lorakernels.layers.gate_up import GateUp
from lorakernels.layers.moe_partition import MoECut
from lorakernels.layers.packing import owned, take, take_experts
from lorakernels.layers.partition import Shard, whole
from lorakernels.moe.layer.types import Activation

Weight = Tensor | Quantised


def expert_packing(
    w13: Weight,
    w2: Weight,
    projections: tuple[str, ...],
    gate_up: GateUp | None,
    *,
    is_usual: bool,
) -> ExpertPacking:
    """The sizes of a layer, from its whole weights; `is_usual` allows not to say how gate and up
    lie. ValueError that names the field."""
    if len(projections) not in (2, 3) or len(set(projections)) != len(projections):
        raise ValueError(
            "projections must be different names of gate, up and down, or of up and down "
            f"(got {', '.join(projections)})"
        )
    gate_up = _order_of(projections, gate_up, is_usual=is_usual)
    first, second = values_of(w13), values_of(w2)
    if second.dim() != 3:
        raise ValueError(f"w2 must be [experts, hidden, intermediate] (got {list(second.shape)})")
    num_experts, hidden, intermediate = second.shape
    rows = intermediate * (len(projections) - 1)
    if first.shape != (num_experts, rows, hidden):
        raise ValueError(
            f"w13 must be [{num_experts}, {rows}, {hidden}], as w2 and the projections "
            f"{', '.join(projections)} say (got {list(first.shape)})"
        )
    if first.dtype != second.dtype or first.device != second.device:
        raise ValueError(
            f"w13 and w2 must have one dtype and one device (got {first.dtype} on {first.device} "
            f"and {second.dtype} on {second.device})"
        )
    if isinstance(w13, Quantised) != isinstance(w2, Quantised):
        raise ValueError("w13 and w2 must both be quantised or both not")
    for name, weight in (("w13", w13), ("w2", w2)):
        if isinstance(weight, Quantised):
            check_8_bit(name, weight)
            shape, device = weight.values.shape[:2], weight.values.device
            # others would be refused in the first step, when a server has started
            check_tensor(f"scales of {name}", weight.scales, shape, torch.float32, device)
    return ExpertPacking(projections, num_experts, hidden, intermediate, gate_up)


def layer_dtype(w13: Weight, dtype: torch.dtype | None) -> torch.dtype:
    """That of activations and adapters. ValueError."""
    own = values_of(w13).dtype
    if isinstance(w13, Quantised):
        if dtype is None:
            raise ValueError(f"dtype must be given with weights of {own}")
        return dtype
    if dtype not in (None, own):
        raise ValueError(f"dtype must be {own} like the weights (got {dtype})")
    return own


def layer_activation(activation: Activation | None, *, is_gated: bool) -> Activation:
    """The given one, which must fit the projections, or SiLU. ValueError."""
    if activation is None:
        return Activation.SILU_GATED if is_gated else Activation.SILU
    if not isinstance(activation, Activation):
        raise ValueError(f"activation must be an Activation, or None (got {activation!r})")
    if activation.is_gated != is_gated:
        raise ValueError(
            f"activation must be one {'with' if is_gated else 'without'} a gate, like projections "
            f"(got {activation})"
        )
    return activation


def check_bias(name: str, bias: Tensor | None, weight: Weight, dtype: torch.dtype) -> None:
    """A bias has a number for each row of its weight. ValueError that names it."""
    values = values_of(weight)
    shape = list(values.shape[:2])
    if bias is None or (list(bias.shape), bias.dtype, bias.device) == (shape, dtype, values.device):
        return
    raise ValueError(
        f"{name} must be {shape} in {dtype} on {values.device} "
        f"(got {list(bias.shape)} in {bias.dtype} on {bias.device})"
    )


def take_w13(packing: ExpertPacking, cut: MoECut, weight: Weight) -> tuple[Tensor, Tensor | None]:
    """The rows of gate and up that a rank holds, and their scales."""
    values = _take_rows(packing, cut, values_of(weight))
    if isinstance(weight, Quantised):
        return values, _take_rows(packing, cut, weight.scales)
    return values, None


def take_w2(packing: ExpertPacking, cut: MoECut, weight: Weight) -> tuple[Tensor, Tensor | None]:
    """The inputs of down that a rank holds, and the scales of its rows."""
    values = take_experts(values_of(weight), cut.experts)
    if cut.intermediate != whole(packing.intermediate):
        values = _take(values, cut.intermediate, dim=2)
    if isinstance(weight, Quantised):
        scales = weight.scales.detach()
        return owned(values, weight.values), owned(take_experts(scales, cut.experts), scales)
    return owned(values, weight), None


def take_biases(
    packing: ExpertPacking, cut: MoECut, w13_bias: Tensor | None, w2_bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The rows of gate and up that a rank holds, and those of down, of which the first
    tensor-parallel rank has all and the others have none."""
    first = None if w13_bias is None else _take_rows(packing, cut, w13_bias)
    if w2_bias is None or not cut.owns_bias:
        return first, None
    whole_bias = w2_bias.detach()
    return first, owned(take_experts(whole_bias, cut.experts), whole_bias)


def values_of(weight: Weight) -> Tensor:
    return (weight.values if isinstance(weight, Quantised) else weight).detach()


def like_rows(quantised: Quantised, rows: Tensor) -> Quantised:
    """[rows, hidden] and its scales, laid out as the kernels read them. ValueError."""
    values, scales = quantised.values, quantised.scales
    hidden = rows.shape[1]
    if values.shape[-1] != hidden:
        raise ValueError(f"quantised_x must have {hidden} columns (got {values.shape[-1]})")
    # how many rows it has is checked where that of x is, since a traced graph must not ask
    return Quantised(values.reshape(-1, hidden).contiguous(), scales.reshape(-1).contiguous())


def weight_of(values: Tensor, scales: Tensor | None) -> Weight:
    """A weight as operators take it."""
    return values if scales is None else Quantised(values, scales)


def _take_rows(packing: ExpertPacking, cut: MoECut, tensor: Tensor) -> Tensor:
    held = take_experts(tensor.detach(), cut.experts)
    in_order = packing.gate_up is not GateUp.INTERLEAVED
    if in_order and cut.intermediate == whole(packing.intermediate):
        return owned(held, tensor)
    # a cut of both halves at once would leave a rank without a gate
    halves = packing.halves(held)
    return torch.cat([_take(half, cut.intermediate, dim=1) for half in halves], dim=1)


def _order_of(
    projections: Sequence[str], gate_up: GateUp | None, *, is_usual: bool
) -> GateUp | None:
    """The given order, or HALVES for a layer with a gate that `is_usual`. ValueError."""
    if gate_up is not None:
        check_choice("gate_up", gate_up, GateUp)
    if len(projections) == 2 and gate_up is not None:
        raise ValueError(f"gate_up must be None without a gate (got {gate_up.name})")
    if len(projections) == 2 or gate_up is not None:
        return gate_up
    if is_usual:
        return GateUp.HALVES
    raise ValueError(
        "gate_up must say how the rows of gate and up lie in a layer with biases or another "
        "activation than SiLU, GateUp.HALVES or GateUp.INTERLEAVED (got None)"
    )


def _take(tensor: Tensor, shard: Shard, *, dim: int) -> Tensor:
    if tensor.itemsize > 1:
        return take(tensor, shard, dim=dim)
    # padding has no kernel for 8-bit floats; a byte of zero is their zero
    return take(tensor.view(torch.uint8), shard, dim=dim).view(tensor.dtype)
