"""The tables of routed pairs as the operators pass them on. Data and sizes; nothing is launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lorakernels.moe.align.kernels.arguments import Layout, Tables
from lorakernels.moe.tiles import (
    Alignment,
    base_tile_height,
    max_tiles,
    num_bins,
    plan_alignment,
    slot_bins,
    tile_height,
)
from lorakernels.runtime.options import check_batch_invariant
from lorakernels.runtime.prepared import FixedTensors
from lorakernels.runtime.tuning import Tuning, tuning_of


@dataclass(frozen=True, slots=True)
class PairTables:
    """The buffers of PairMetadata, and the sizes of one step.

    An operator takes only lists of tensors and of integers. `of` makes the tables from two such
    lists, which PairMetadata gives as `buffers` and `sizes`, and from the rows of the step. These
    are no argument of an operator: a traced graph would hold for batches of one size alone.
    `of` raises ValueError under another value of LORAKERNELS_BATCH_INVARIANT than that of the
    tables.
    """

    # the fields of Tables, then scratch memory
    buffers: FixedTensors
    num_rows: int
    top_k: int
    num_experts: int
    max_slots: int
    # 1 where the pairs of the base layer are tiled as well, else 0
    with_base: int
    # 1 where the tables are laid out for LORAKERNELS_BATCH_INVARIANT=1, else 0
    is_invariant: int
    tuning: Tuning

    @classmethod
    def of(cls, buffers: Sequence[Tensor], num_rows: int, sizes: Sequence[int]) -> PairTables:
        return cls.of_fixed(FixedTensors(buffers), num_rows, sizes)

    @classmethod
    def of_fixed(cls, buffers: FixedTensors, num_rows: int, sizes: Sequence[int]) -> PairTables:
        """`of`, from buffers that are the same ones in many steps."""
        top_k, num_experts, max_slots, with_base, is_invariant = sizes
        tuning = tuning_of(buffers.tensors[0].device)
        check_batch_invariant(bool(is_invariant), tuning.is_invariant)
        return cls(
            *(buffers, num_rows, top_k, num_experts, max_slots, with_base, is_invariant), tuning
        )

    @property
    def tables(self) -> Tables:
        return Tables(*self.buffers.tensors[:-1])

    @property
    def scratch(self) -> Tensor:
        """Keys, or counters, depending on the way that the pairs are sorted."""
        return self.buffers.tensors[-1]

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """As `of` takes them."""
        return self.top_k, self.num_experts, self.max_slots, self.with_base, self.is_invariant

    @property
    def num_pairs(self) -> int:
        return self.num_rows * self.top_k

    def step_sizes(self, num_ids: int) -> tuple[int, int, int, int]:
        """The fields of Sizes, as kernels take them. `num_ids` is the length of the expert map."""
        return self.num_pairs, num_ids, self.num_experts, self.max_slots

    @property
    def slot_bins(self) -> int:
        return slot_bins(self.max_slots, bool(self.with_base))

    @property
    def num_bins(self) -> int:
        return num_bins(self.num_experts, self.max_slots, bool(self.with_base))

    @property
    def alignment(self) -> Alignment:
        sizes = (self.num_experts, self.max_slots, bool(self.with_base))
        return plan_alignment(self.num_pairs, *sizes, self.tuning)

    def layout(self, *, is_mapped: bool) -> Layout:
        """What the kernels of the alignment are compiled for."""
        return Layout(
            TOP_K=self.top_k,
            SLOT_BINS=self.slot_bins,
            MAPPED=is_mapped,
            WITH_BASE=self.with_base,
        )

    @property
    def reset_programs(self) -> int:
        """Programs that are enough to reset tables which are far larger than a small step."""
        tuning, tables = self.tuning.align, self.tables
        size = tables.tile_pairs.shape[0] + tables.base_pairs.shape[0] + tables.pair_slots.shape[0]
        return max(1, min(tuning.most_reset_programs, size // tuning.reset_size))

    @property
    def height(self) -> int:
        return tile_height(self.num_pairs, self.num_experts, self.tuning)

    @property
    def base_height(self) -> int:
        # without base tiles it means nothing, and kernels would be compiled anew for each
        num_pairs = self.num_pairs if self.with_base else 0
        return base_tile_height(num_pairs, self.num_experts, self.tuning)

    @property
    def base_tile_programs(self) -> int:
        """Most base tiles that the step can have."""
        return max(1, max_tiles(self.num_pairs, self.num_experts, self.base_height))
