"""Slots of a MoE projection whose adapters are cut over tensor-parallel ranks by their rank, too.

Ranks that share experts hold a layer. Of gate and up each has a part of the ranks of A and all
ranks of its columns of B; of down all ranks of its inputs of A and a part of the columns of B.
Either way the shrink output of the pairs is exchanged; see dense/rank_shards.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lorakernels.common.stacked_weights import (
    StackedWeights,
    check_geometry,
    empty_slots,
    require_positive,
)
from lorakernels.dense.rank_shards import check_shared_rank
from lorakernels.moe.weights import ExpertWeights


class RankShardedExperts(ExpertWeights):
    """A [slots, experts, slices, held ranks, in_features], B [slots, experts, sum(slice_widths),
    rank]. `held` are the ranks of A that are here: all of them, or one of equal parts. The columns
    of B begin at `first_column` of the base, whose slices are `base_widths` wide.

    What is held of A follows from the rank of the buffers and never from that of an adapter
    (vllm #31994). A must be zero behind the live ranks, which are computed where another rank has
    live ones.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_experts: int,
        slice_widths: Sequence[int],
        base_widths: Sequence[int],
        in_features: int,
        rank: int,
        held: range,
        first_column: int,
        dtype: torch.dtype,
        device: torch.device | str,
        shared_a: bool = False,
        shared_b: bool = False,
    ) -> None:
        require_positive("num_experts", num_experts)
        check_shared_rank(rank, held)
        check_geometry(num_slots, slice_widths, in_features, rank, dtype)
        self.num_experts = num_experts
        copies_a, copies_b = (1 if shared else num_experts for shared in (shared_a, shared_b))
        slices = len(slice_widths)
        a_shape = (num_slots, copies_a, slices, len(held), in_features)
        b_shape = (num_slots, copies_b, sum(slice_widths), rank)
        tensors = empty_slots(a_shape, b_shape, slices, dtype, device)
        StackedWeights.__init__(self, tensors, slice_widths)
        self.held, self.first_column = held, first_column
        self._base_widths = tuple(base_widths)

    @property
    def rank(self) -> int:
        return self.b.shape[-1]

    @property
    def base_widths(self) -> tuple[int, ...]:
        return self._base_widths

    @property
    def exchanged_copies(self) -> int:
        parts = self.rank // len(self.held)
        # what is gathered, as it comes and in order; what is added up stays where it is
        return 0 if parts == 1 else 2 * parts

    def _write_a(self, slot: int, index: int | slice, a: Tensor) -> None:
        super()._write_a(slot, index, a[..., self.held.start : self.held.stop, :])
