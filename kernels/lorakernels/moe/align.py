"""Which pair of a batch goes to which expert and slot, sorted and tiled on the device.

A pair is one of the top-k choices of a token: pair p belongs to token p // top_k. One result
serves both products of a layer, w13 and w2. As in metadata.py the buffers are persistent, every
prepare() resets what lies past the live part, and nothing waits for the host. The order is
(expert, slot, pair): it never depends on timing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from lorakernels.device import launch_options, supports_pdl
from lorakernels.metadata import MIN_TILE_ROWS, BatchMetadata
from lorakernels.moe.align_kernel import count_pairs_kernel, place_pairs_kernel
from lorakernels.moe.align_torch import place_pairs

# buckets beyond which a program cannot hold a count of each
_MOST_BINS = 8192
# pairs up to which every program counts the whole batch, which saves a launch
_SMALL = 2048
_SMALL_SPAN = 64
_SPAN = 512


def tile_height(num_pairs: int, num_experts: int) -> int:
    """Pairs of one (expert, slot) that one tile covers. From shapes alone, so that it is a
    constant of a captured graph."""
    pairs_per_expert = num_pairs / num_experts
    if pairs_per_expert <= 64:
        return 16
    return 32 if pairs_per_expert < 256 else 64


def base_tile_height(num_pairs: int, num_experts: int) -> int:
    """Pairs of one expert, whatever their slots, that one tile of the base product covers."""
    pairs_per_expert = num_pairs // num_experts
    return min(128, max(MIN_TILE_ROWS, _power_of_2(pairs_per_expert)))


def max_tiles(num_pairs: int, num_groups: int, height: int) -> int:
    """Most tiles a batch can need: each group of pairs adds at most one that is not full."""
    return num_pairs // height + min(num_groups, num_pairs)


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

    def fill(self, topk_ids: Tensor, token_slots: Tensor, expert_map: Tensor | None) -> None:
        if num_bins(self.num_experts, self.max_slots, self.with_base) > _MOST_BINS:
            place_pairs(self, topk_ids, token_slots, expert_map)
        else:
            self._launch(topk_ids, token_slots, expert_map)

    def _launch(self, topk_ids: Tensor, token_slots: Tensor, expert_map: Tensor | None) -> None:
        counted = self.num_pairs > _SMALL
        span = _SPAN if counted else _SMALL_SPAN
        spans = -(-self.num_pairs // span)
        sources = (topk_ids, token_slots, topk_ids if expert_map is None else expert_map)
        num_ids = 0 if expert_map is None else expert_map.shape[0]
        sizes = (self.num_pairs, num_ids, self.num_experts, self.max_slots)
        pdl = counted and supports_pdl(topk_ids.device)
        constants = {
            "TOP_K": self.top_k,
            "SLOT_BINS": _slot_bins(self.max_slots, self.with_base),
            "NUM_BINS": num_bins(self.num_experts, self.max_slots, self.with_base),
            "MAPPED": expert_map is not None,
            "WITH_BASE": int(self.with_base),
            "PDL": pdl,
            "num_warps": 8,
        }
        if counted:
            count_pairs_kernel[(spans,)](
                *sources, self.counts, *sizes, SPAN=span, **constants, **launch_options(pdl)
            )
        place_pairs_kernel[(max(1, spans),)](
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
            SPAN=span,
            CHUNK=128 if counted else _SMALL_SPAN,
            COUNTED=counted,
            HEIGHT=self.height,
            BASE_HEIGHT=self.base_height,
            **constants,
            **launch_options(pdl),
        )


class PairMetadata:
    """Device buffers, all int32; `pairs` = max_tokens * top_k:

    pair_slots, pair_experts [pairs]: slot and local expert of each pair. A pair without local
        expert has neither: -1, as behind the last.
    tile_slots, tile_experts [max tiles]: of each tile, ascending by expert, then slot; -1 behind.
    tile_pairs [max tiles * height]: the pairs of each tile, ascending; -1 in free places.
    num_tiles [1].
    base_experts, base_pairs, num_base_tiles: the same for tiles of an expert's pairs, base rows
        included, ordered by slot; only `with_base`.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        top_k: int,
        num_experts: int,
        max_slots: int,
        device: torch.device | str,
        with_base: bool = False,
    ) -> None:
        sizes = {"max_tokens": max_tokens, "top_k": top_k}
        sizes |= {"num_experts": num_experts, "max_slots": max_slots}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1 (got {size})")
        self.max_tokens, self.top_k = max_tokens, top_k
        self.num_experts, self.max_slots, self.with_base = num_experts, max_slots, with_base
        pairs = max_tokens * top_k

        def table(size: int) -> Tensor:
            return torch.full((size,), -1, dtype=torch.int32, device=device)

        def count() -> Tensor:
            return torch.zeros(1, dtype=torch.int32, device=device)

        self.pair_slots, self.pair_experts = table(pairs), table(pairs)
        tiles = max_tiles(pairs, self.num_buckets, MIN_TILE_ROWS)
        tallest = tile_height(pairs, num_experts)
        self.tile_slots, self.tile_experts = table(tiles), table(tiles)
        self.tile_pairs = table(max_tiles(pairs, self.num_buckets, tallest) * tallest)
        self.num_tiles = count()
        base_tiles = max_tiles(pairs, num_experts, MIN_TILE_ROWS) if with_base else 1
        tallest = base_tile_height(pairs, num_experts)
        capacity = max_tiles(pairs, num_experts, tallest) * tallest if with_base else 1
        self.base_experts, self.base_pairs = table(base_tiles), table(capacity)
        self.num_base_tiles = count()
        bins = num_bins(num_experts, max_slots, with_base)
        # whether the largest step is counted by a launch of its own
        counted = pairs > _SMALL and bins <= _MOST_BINS
        self._counts = table(-(-pairs // _SPAN) * bins if counted else 1)
        self.num_rows = 0

    @property
    def num_buckets(self) -> int:
        return self.num_experts * self.max_slots

    @property
    def num_pairs(self) -> int:
        return self.num_rows * self.top_k

    @property
    def height(self) -> int:
        """Pairs of a tile of the prepared step."""
        return tile_height(self.num_pairs, self.num_experts)

    @property
    def base_height(self) -> int:
        return base_tile_height(self.num_pairs, self.num_experts)

    @property
    def tile_capacity(self) -> int:
        """Tiles that the tables can hold at the height of this step."""
        return min(self.tile_slots.shape[0], self.tile_pairs.shape[0] // self.height)

    @property
    def base_tile_capacity(self) -> int:
        return min(self.base_experts.shape[0], self.base_pairs.shape[0] // self.base_height)

    @property
    def base_tile_programs(self) -> int:
        """Most base tiles that this step can have."""
        return max(1, max_tiles(self.num_pairs, self.num_experts, self.base_height))

    def prepare(
        self, topk_ids: Tensor, batch: BatchMetadata, *, expert_map: Tensor | None = None
    ) -> None:
        """Install the routing of a layer, after `batch` was prepared for the step.

        topk_ids: int32 [rows of the step, top_k] on this device, contiguous.
        expert_map: int32 [global experts] on this device, the local expert or -1; without it
            the ids are local. An id that names no local expert makes a pair without expert.
        Raises ValueError with nothing changed.
        """
        self._check(topk_ids, batch, expert_map)
        self.num_rows = topk_ids.shape[0]
        torch.ops.lorakernels.align_pairs(
            topk_ids,
            batch.token_slots,
            expert_map,
            [
                self.pair_slots,
                self.pair_experts,
                self.tile_slots,
                self.tile_experts,
                self.tile_pairs,
                self.num_tiles,
                self.base_experts,
                self.base_pairs,
                self.num_base_tiles,
                self._counts,
            ],
            self.num_experts,
            self.max_slots,
            self.with_base,
        )

    def _check(self, topk_ids: Tensor, batch: BatchMetadata, expert_map: Tensor | None) -> None:
        device = self.pair_slots.device
        for name, tensor, dims in (("topk_ids", topk_ids, 2), ("expert_map", expert_map, 1)):
            if tensor is None:
                continue
            if tensor.dtype != torch.int32 or tensor.dim() != dims:
                raise ValueError(
                    f"{name} must be int32 with {dims} dimension{'s' * (dims > 1)} "
                    f"(got {tensor.dtype} with shape {list(tensor.shape)})"
                )
            if not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous (got strides {tensor.stride()})")
            if tensor.device != device:
                raise ValueError(f"{name} must be on {device} (got {tensor.device})")
        rows, top_k = topk_ids.shape
        if top_k != self.top_k:
            raise ValueError(f"topk_ids must have {self.top_k} columns (got {top_k})")
        if rows > self.max_tokens:
            raise ValueError(f"topk_ids may have {self.max_tokens} rows (got {rows})")
        if rows != batch.num_rows:
            raise ValueError(
                f"topk_ids must have {batch.num_rows} rows, as the batch was prepared for "
                f"(got {rows})"
            )
        if batch.max_slots != self.max_slots:
            raise ValueError(f"batch must have {self.max_slots} slots (got {batch.max_slots})")


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
    pair_slots, pair_experts, *of_tiles, counts = tables
    tile_slots, tile_experts, tile_pairs, num_tiles, *of_base = of_tiles
    base_experts, base_pairs, num_base_tiles = of_base
    PairTables(
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
        num_rows=topk_ids.shape[0],
        top_k=topk_ids.shape[1],
        num_experts=num_experts,
        max_slots=max_slots,
        with_base=with_base,
    ).fill(topk_ids, token_slots, expert_map)


def num_bins(num_experts: int, max_slots: int, with_base: bool) -> int:
    """Counters of the alignment: one for each bucket, rounded up to powers of two."""
    return max(16, _power_of_2(num_experts)) * _slot_bins(max_slots, with_base)


def _slot_bins(max_slots: int, with_base: bool) -> int:
    return _power_of_2(max_slots + with_base)


@cache
def _power_of_2(value: int) -> int:
    return int(triton.next_power_of_2(max(1, value)))
