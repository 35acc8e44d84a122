"""A rank's part of the base weights of a MoE layer, of 16 or 8 bits.

Invariant: the whole tensors are checked against each other before anything is cut, and gate and up
are cut separately.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.common.quantised import Quantised
from lorakernels.layers.expert_packing import ExpertPacking
from lorakernels.layers.moe_partition import MoECut
from lorakernels.layers.packing import owned, take
from lorakernels.layers.partition import Shard, whole

Weight = Tensor | Quantised


def expert_packing(w13: Weight, w2: Weight, projections: tuple[str, ...]) -> ExpertPacking:
    """The sizes of a layer, from its whole weights. ValueError that names the field."""
    if len(projections) not in (2, 3) or len(set(projections)) != len(projections):
        raise ValueError(
            "projections must be different names of gate, up and down, or of up and down "
            f"(got {', '.join(projections)})"
        )
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
        if isinstance(weight, Quantised) and weight.scales.shape != weight.values.shape[:2]:
            raise ValueError(
                f"scales of {name} must be {list(weight.values.shape[:2])} "
                f"(got {list(weight.scales.shape)})"
            )
    return ExpertPacking(projections, num_experts, hidden, intermediate)


def take_w13(packing: ExpertPacking, cut: MoECut, weight: Weight) -> tuple[Tensor, Tensor | None]:
    """The rows of gate and up that a rank holds, and their scales."""
    values = _take_rows(packing, cut, values_of(weight))
    if isinstance(weight, Quantised):
        return values, _take_rows(packing, cut, weight.scales)
    return values, None


def take_w2(packing: ExpertPacking, cut: MoECut, weight: Weight) -> tuple[Tensor, Tensor | None]:
    """The inputs of down that a rank holds, and the scales of its rows."""
    values = _held(values_of(weight), cut.experts)
    if cut.intermediate != whole(packing.intermediate):
        values = _take(values, cut.intermediate, dim=2)
    if isinstance(weight, Quantised):
        scales = weight.scales.detach()
        return owned(values, weight.values), owned(_held(scales, cut.experts), scales)
    return owned(values, weight), None


def values_of(weight: Weight) -> Tensor:
    return (weight.values if isinstance(weight, Quantised) else weight).detach()


def _take_rows(packing: ExpertPacking, cut: MoECut, tensor: Tensor) -> Tensor:
    held = _held(tensor.detach(), cut.experts)
    if cut.intermediate == whole(packing.intermediate):
        return owned(held, tensor)
    # a cut of both halves at once would leave a rank without a gate
    halves = torch.split(held, packing.intermediate, dim=1)
    return torch.cat([_take(half, cut.intermediate, dim=1) for half in halves], dim=1)


def _held(tensor: Tensor, experts: Shard) -> Tensor:
    return tensor.narrow(0, experts.start, experts.live)


def _take(tensor: Tensor, shard: Shard, *, dim: int) -> Tensor:
    if tensor.itemsize > 1:
        return take(tensor, shard, dim=dim)
    # padding has no kernel for 8-bit floats; a byte of zero is their zero
    return take(tensor.view(torch.uint8), shard, dim=dim).view(tensor.dtype)
