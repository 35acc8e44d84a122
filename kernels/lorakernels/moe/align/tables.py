"""The tables of routed pairs as the operators pass them on. Data and sizes; nothing is launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lorakernels.moe.align.kernels.arguments import Tables
from lorakernels.moe.tiles import base_tile_height, max_tiles, num_bins, slot_bins, tile_height
from lorakernels.runtime.tuning import Tuning, tuning_of


@dataclass(frozen=True, slots=True)
class PairTables:
    """The buffers of PairMetadata, and the sizes of one step.

    An operator takes only lists of tensors and of integers. `of` makes the tables from two such
    lists, which PairMetadata gives as `buffers` and `sizes`.
    """

    tables: Tables
    counts: Tensor
    num_rows: int
    top_k: int
    num_experts: int
    max_slots: int
    # 1 where the pairs of the base layer are tiled as well, else 0
    with_base: int

    @classmethod
    def of(cls, buffers: Sequence[Tensor], sizes: Sequence[int]) -> PairTables:
        *tables, counts = buffers
        return cls(Tables(*tables), counts, *sizes)

    @property
    def tuning(self) -> Tuning:
        return tuning_of(self.counts.device)

    @property
    def num_pairs(self) -> int:
        return self.num_rows * self.top_k

    @property
    def num_buckets(self) -> int:
        return self.num_experts * self.max_slots

    @property
    def slot_bins(self) -> int:
        return slot_bins(self.max_slots, bool(self.with_base))

    @property
    def num_bins(self) -> int:
        return num_bins(self.num_experts, self.max_slots, bool(self.with_base))

    @property
    def height(self) -> int:
        return tile_height(self.num_pairs, self.num_experts, self.tuning)

    @property
    def base_height(self) -> int:
        return base_tile_height(self.num_pairs, self.num_experts)

    @property
    def base_tile_programs(self) -> int:
        """Most base tiles that the step can have."""
        return max(1, max_tiles(self.num_pairs, self.num_experts, self.base_height))


def counts_size(max_pairs: int, bins: int, tuning: Tuning) -> int:
    """Elements of the buffer in which the kernels count batches of up to `max_pairs` pairs: one
    row for each span, one of totals and three of offsets."""
    align = tuning.align
    is_counted = max_pairs > align.single_launch_pairs and bins <= align.most_bins
    return (-(-max_pairs // align.span) + 4) * bins if is_counted else 1
