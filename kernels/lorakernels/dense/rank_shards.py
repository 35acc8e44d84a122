"""Slots of a layer whose adapters are cut over tensor-parallel ranks by their rank, too.

A group of ranks holds a linear layer. Where its base is cut by columns, each rank has a part of the
ranks of A and all ranks of its columns of B. Where it is cut by inputs, each has all ranks of its
inputs of A and a part of the columns of B. Either way the shrink output is exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lorakernels.common.stacked_weights import MAX_RANK, StackedWeights, check_geometry, empty_slots
from lorakernels.dense.weights import SlotWeights


class RankShardedSlots(SlotWeights):
    """A [slots, slices, held ranks, in_features], B [slots, sum(slice_widths), rank], and for each
    (slot, slice) the live rank of the whole adapter (int32) and the scale (fp32). `held` are the
    ranks of A that are here: all of them, or one of equal parts. `first_column`: where the columns
    of B begin in the output of the base.

    What is held of A follows from the rank of the buffers and never from that of an adapter, whose
    ranks then lie without gaps when they have been gathered (vllm #31994). Unlike in other slots,
    A must be zero behind the live ranks: they are computed where another rank has live ones.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        slice_widths: Sequence[int],
        in_features: int,
        rank: int,
        held: range,
        first_column: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        check_shared_rank(rank, held)
        check_geometry(num_slots, slice_widths, in_features, rank, dtype)
        slices = len(slice_widths)
        a_shape = (num_slots, slices, len(held), in_features)
        b_shape = (num_slots, sum(slice_widths), rank)
        tensors = empty_slots(a_shape, b_shape, slices, dtype, device)
        StackedWeights.__init__(self, tensors, slice_widths)
        self.held, self.first_column = held, first_column

    @classmethod
    def over(
        cls, a: Tensor, b: Tensor, ranks: Tensor, scales: Tensor, *, slice_widths: Sequence[int]
    ) -> SlotWeights:
        raise ValueError("slots that are sharded by rank cannot be in tensors of a server")

    @property
    def rank(self) -> int:
        return self.b.shape[-1]

    @property
    def parts(self) -> int:
        """The parts that the ranks of A are cut into."""
        return self.rank // len(self.held)

    @property
    def exchanged_copies(self) -> int:
        return exchanged_copies(self.parts)

    def _write_a(self, slot: int, index: int | slice, a: Tensor) -> None:
        super()._write_a(slot, index, a[..., self.held.start : self.held.stop, :])


def check_shared_rank(rank: int, held: range) -> None:
    """The rank of buffers that are cut by it is within what buffers may have. Raises ValueError."""
    parts = rank // len(held) if held else 1
    if parts > 1 and rank > MAX_RANK:
        raise ValueError(
            f"rank must be at most {MAX_RANK // parts * parts} where {parts} ranks hold equal "
            f"parts of it (got {rank}, rounded up)"
        )


def exchanged_copies(parts: int) -> int:
    """The memory of an exchange, in copies of what a rank brings: the sum of its split-K partials,
    and what is gathered from so many parts, as it comes and in order."""
    return 1 if parts == 1 else 1 + 2 * parts
