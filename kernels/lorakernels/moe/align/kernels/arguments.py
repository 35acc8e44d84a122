"""Arguments that the kernels of the alignment share, by name.

Sizes of a step reach a kernel one by one and are grouped inside it: Triton specialises the
integers of a tuple argument by their values, whatever `do_not_specialize` says, and would compile
anew for every batch size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Routes(NamedTuple):
    """The routing of a step; a kernel gets pointers. See PairMetadata.prepare."""

    topk_ids: Tensor
    token_slots: Tensor
    expert_map: Tensor


class Tables(NamedTuple):
    """The tables of PairMetadata; a kernel gets pointers."""

    pair_slots: Tensor
    pair_experts: Tensor
    tile_slots: Tensor
    tile_experts: Tensor
    tile_pairs: Tensor
    num_tiles: Tensor
    base_experts: Tensor
    base_pairs: Tensor
    num_base_tiles: Tensor

    @property
    def of_pairs(self) -> tuple[Tensor, Tensor]:
        return self.pair_slots, self.pair_experts

    @property
    def resettable(self) -> tuple[int, ...]:
        """Elements of what a step resets, in the order in which kernels take them."""
        ends = (
            self.pair_slots,
            self.tile_slots,
            self.tile_pairs,
            self.base_experts,
            self.base_pairs,
        )
        return tuple(table.numel() for table in ends)

    @property
    def of_tiles(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.tile_slots, self.tile_experts, self.tile_pairs, self.num_tiles


class Sizes(NamedTuple):
    """The sizes of a step inside a kernel; num_ids is the length of the expert map."""

    num_pairs: Any
    num_ids: Any
    num_experts: Any
    max_slots: Any


class Layout(NamedTuple):
    """What is compiled into a kernel: how buckets are numbered. Heights of tiles are not part of
    it, since they change with the batch size and counting would be compiled anew for each; nor is
    the number of buckets, since sorting would be compiled anew for each number of experts.
    """

    TOP_K: int
    SLOT_BINS: int
    # whether ids are looked up in the expert map
    MAPPED: bool
    # whether the pairs of the base layer are tiled as well; added to slots, so an integer
    WITH_BASE: int
