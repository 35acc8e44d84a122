"""Slots in the stacks of another server: a tensor for each slice, as vLLM has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorakernels.common.slice_stacks import Slices, pack, whole
from lorakernels.common.stacked_weights import check_tensor
from lorakernels.dense.weights import SlotWeights


@dataclass(frozen=True, slots=True)
class AdoptedStacks:
    """`weights` are the slots. `a` and `b` are views of them in the shapes of the stacks, which the
    server must write to from now on; the stacks themselves are no longer read."""

    weights: SlotWeights
    a: Slices
    b: Slices


# as in empty_slots
@torch.inference_mode(mode=False)
def adopt_stacks(a: Sequence[Tensor], b: Sequence[Tensor]) -> AdoptedStacks:
    """Slots with the adapters that the stacks of a linear layer hold.

    a: for each slice [slots, 1, rank, in_features]; b: [slots, 1, slice width, rank]; all of one
    dtype and device. A layer of one slice is adopted where it lies; several are packed into new
    buffers. Each slot begins with all ranks and a scale of 1, for a server that keeps zeros behind
    an adapter's ranks and multiplies its scale into B; others write `weights.ranks` and
    `weights.scales`, in place. Raises ValueError with nothing changed.
    """
    _check(a, b)
    views_a, views_b = (tuple(a), tuple(b)) if _lies_as_packed(a, b) else pack(a, b)
    widths = [part.shape[2] for part in b]
    factors = whole(views_a[0], views_b[0], widths)
    packed_a, packed_b = factors.a[:, 0], factors.b[:, 0]
    slots, slices, rank, _ = packed_a.shape
    device = packed_a.device
    ranks = torch.full((slots, slices), rank, dtype=torch.int32, device=device)
    scales = torch.ones(slots, slices, dtype=torch.float32, device=device)
    weights = SlotWeights.over(packed_a, packed_b, ranks, scales, slice_widths=widths)
    return AdoptedStacks(weights, views_a, views_b)


def _lies_as_packed(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == 1 and a[0].is_contiguous() and b[0].is_contiguous()


def _check(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    if not a or len(a) != len(b):
        raise ValueError(f"a and b must have a stack for each slice (got {len(a)} and {len(b)})")
    for name, stack in (*(("a", part) for part in a), *(("b", part) for part in b)):
        if stack.dim() != 4:
            raise ValueError(f"{name} must be [slots, 1, .., ..] (got {list(stack.shape)})")
    slots, _, rank, in_features = a[0].shape
    for index, (of_a, of_b) in enumerate(zip(a, b, strict=True)):
        wanted_a, wanted_b = (slots, 1, rank, in_features), (slots, 1, of_b.shape[2], rank)
        check_tensor(f"a of slice {index}", of_a, wanted_a, a[0].dtype, a[0].device)
        check_tensor(f"b of slice {index}", of_b, wanted_b, a[0].dtype, a[0].device)
