"""Launches of the alignment: one opaque operator, so that a traced graph takes it as it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lorakernels.moe.align.kernels import (
    count_pairs_kernel,
    find_offsets_kernel,
    place_pairs_kernel,
    sum_counts_kernel,
)
from lorakernels.moe.align.torch_sort import place_pairs
from lorakernels.moe.tiles import base_tile_height, max_tiles, num_bins, slot_bins, tile_height
from lorakernels.runtime.device import launch_options, supports_pdl

# buckets beyond which a program cannot hold a count of each
MOST_BINS = 8192
# pairs up to which every program counts the whole batch, which saves a launch
SMALL = 1024
_SMALL_SPAN = 64
SPAN = 128
# values that a program may reset by itself, and programs beyond which more do not help
_RESET_SIZE = 1024
_MOST_RESET_PROGRAMS = 64
_COUNT_BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTables:
    """The buffers of PairMetadata with the sizes of one step, as the operator gets them."""

    pair_slots: Tensor
    pair_experts: Tensor
    tile_slots: Tensor
    tile_experts: Tensor
    tile_pairs: Tensor
    num_tiles: Tensor
    base_experts: Tensor
    base_pairs: Tensor
    num_base_tiles: Tensor
    counts: Tensor
    num_rows: int
    top_k: int
    num_experts: int
    max_slots: int
    with_base: bool

    @property
    def num_buckets(self) -> int:
        return self.num_experts * self.max_slots

    @property
    def num_pairs(self) -> int:
        return self.num_rows * self.top_k

    @property
    def height(self) -> int:
        return tile_height(self.num_pairs, self.num_experts)

    @property
    def base_height(self) -> int:
        return base_tile_height(self.num_pairs, self.num_experts)

    @property
    def base_tile_programs(self) -> int:
        """Most base tiles that the step can have."""
        return max(1, max_tiles(self.num_pairs, self.num_experts, self.base_height))

    def fill(
        self, topk_ids: Tensor, token_slots: Tensor, expert_map: Tensor | None, *, pdl: bool
    ) -> None:
        if num_bins(self.num_experts, self.max_slots, self.with_base) > MOST_BINS:
            place_pairs(self, topk_ids, token_slots, expert_map)
        else:
            self._launch(topk_ids, token_slots, expert_map, pdl=pdl)

    def _launch(
        self, topk_ids: Tensor, token_slots: Tensor, expert_map: Tensor | None, *, pdl: bool
    ) -> None:
        counted = self.num_pairs > SMALL
        span = SPAN if counted else _SMALL_SPAN
        spans = -(-self.num_pairs // span)
        num_ids = 0 if expert_map is None else expert_map.shape[0]
        sources = (topk_ids, token_slots, topk_ids if expert_map is None else expert_map)
        sizes = (self.num_pairs, num_ids, self.num_experts, self.max_slots)
        constants: dict[str, object] = {
            "TOP_K": self.top_k,
            "SLOT_BINS": slot_bins(self.max_slots, self.with_base),
            "NUM_BINS": num_bins(self.num_experts, self.max_slots, self.with_base),
            "MAPPED": expert_map is not None,
            "WITH_BASE": int(self.with_base),
            "SPAN": span,
            "PDL": pdl,
            **launch_options(pdl),
        }
        if counted:
            self._count(spans, (*sources, self.counts), sizes, constants)
        place_pairs_kernel[(max(spans, self._reset_programs),)](
            *sources,
            self.counts,
            self.pair_slots,
            self.pair_experts,
            self.tile_slots,
            self.tile_experts,
            self.tile_pairs,
            self.num_tiles,
            self.base_experts,
            self.base_pairs,
            self.num_base_tiles,
            *sizes,
            spans,
            self.pair_slots.shape[0],
            self.tile_slots.shape[0],
            self.tile_pairs.shape[0],
            self.base_experts.shape[0],
            self.base_pairs.shape[0],
            CHUNK=min(64, span),
            COUNT_BLOCK=_COUNT_BLOCK if self.num_pairs > _SMALL_SPAN else _SMALL_SPAN,
            COUNTED=counted,
            HEIGHT=self.height,
            BASE_HEIGHT=self.base_height,
            num_warps=4 if counted else 8,
            **constants,
        )

    @property
    def _reset_programs(self) -> int:
        """Programs that are enough to reset tables which are far larger than a small step."""
        size = self.tile_pairs.shape[0] + self.base_pairs.shape[0] + self.pair_slots.shape[0]
        return max(1, min(_MOST_RESET_PROGRAMS, size // _RESET_SIZE))

    def _count(
        self,
        spans: int,
        operands: tuple[Tensor, ...],
        sizes: tuple[int, ...],
        constants: dict[str, object],
    ) -> None:
        """The buckets of each span, then those of all spans before it, then the offsets."""
        count_pairs_kernel[(spans,)](
            *operands,
            self.tile_pairs,
            self.base_pairs,
            *sizes,
            self.tile_pairs.shape[0],
            self.base_pairs.shape[0],
            num_warps=4,
            **constants,
        )
        bins = num_bins(self.num_experts, self.max_slots, self.with_base)
        block = min(16, bins)
        pdl = bool(constants["PDL"])
        sum_counts_kernel[(bins // block,)](
            self.counts, spans, NUM_BINS=bins, BINS=block, PDL=pdl, **launch_options(pdl)
        )
        find_offsets_kernel[(1,)](
            self.counts,
            self.num_tiles,
            self.num_base_tiles,
            spans,
            HEIGHT=self.height,
            BASE_HEIGHT=self.base_height,
            SLOT_BINS=slot_bins(self.max_slots, self.with_base),
            NUM_BINS=bins,
            WITH_BASE=int(self.with_base),
            PDL=pdl,
            num_warps=8,
            **launch_options(pdl),
        )


def table_of(
    buffers: list[Tensor],
    *,
    num_rows: int,
    top_k: int,
    num_experts: int,
    max_slots: int,
    with_base: bool,
) -> PairTables:
    """The tables of a step from `PairMetadata.buffers`."""
    pair_slots, pair_experts, *of_tiles, counts = buffers
    tile_slots, tile_experts, tile_pairs, num_tiles, *of_base = of_tiles
    base_experts, base_pairs, num_base_tiles = of_base
    return PairTables(
        pair_slots=pair_slots,
        pair_experts=pair_experts,
        tile_slots=tile_slots,
        tile_experts=tile_experts,
        tile_pairs=tile_pairs,
        num_tiles=num_tiles,
        base_experts=base_experts,
        base_pairs=base_pairs,
        num_base_tiles=num_base_tiles,
        counts=counts,
        num_rows=num_rows,
        top_k=top_k,
        num_experts=num_experts,
        max_slots=max_slots,
        with_base=with_base,
    )


@torch.library.custom_op("lorakernels::align_pairs", mutates_args=("tables",))
def _align_pairs(
    topk_ids: Tensor,
    token_slots: Tensor,
    expert_map: Tensor | None,
    tables: list[Tensor],
    num_experts: int,
    max_slots: int,
    with_base: bool,
) -> None:
    table_of(
        tables,
        num_rows=topk_ids.shape[0],
        top_k=topk_ids.shape[1],
        num_experts=num_experts,
        max_slots=max_slots,
        with_base=with_base,
    ).fill(topk_ids, token_slots, expert_map, pdl=supports_pdl(topk_ids.device))
