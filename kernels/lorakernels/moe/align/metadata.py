"""Which token-expert pair of a batch goes to which expert and slot, sorted and tiled on the device.

A pair is one of the top-k choices of a token: pair p belongs to token p // top_k. One result
serves both products of a layer, w13 and w2. As in BatchMetadata the buffers are persistent, every
prepare() resets what lies past the live part, and nothing waits for the host. The order is
(expert, slot, pair): it never depends on timing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.batch.metadata import MIN_TILE_ROWS, BatchMetadata
from lorakernels.batch.steps import note_rows, prepared_rows
from lorakernels.moe.align.kernels.arguments import Tables
from lorakernels.moe.align.ops import align_pairs
from lorakernels.moe.align.tables import PairTables
from lorakernels.moe.tiles import base_tile_height, max_tiles, scratch_size, tile_height
from lorakernels.runtime.device import keep_address
from lorakernels.runtime.tuning import tuning_of


class PairMetadata:
    """Device buffers, all int32; `pairs` = max_tokens * top_k:

    pair_slots, pair_experts [pairs]: slot and local expert of each pair. Both are -1 for a pair
        without a local expert and past the last pair.
    tile_slots, tile_experts [max tiles]: of each tile, by expert, then slot; -1 past the last.
    tile_pairs [max tiles * height]: the pairs of each tile, ascending; -1 in free places.
    num_tiles [1].
    base_experts, base_pairs, num_base_tiles: the same for tiles of an expert's pairs, base rows
        included, ordered by slot; only `with_base`.
    step [1]: stands for the prepared step. An operator looks up the rows of the step by it; it is
        never written, so that torch.compile puts no copy into its place.
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
        tuning = tuning_of(torch.device(device))
        self._is_invariant = tuning.is_invariant
        pairs, buckets = max_tokens * top_k, num_experts * max_slots

        def table(size: int) -> Tensor:
            return keep_address(torch.full((size,), -1, dtype=torch.int32, device=device))

        def count() -> Tensor:
            return keep_address(torch.zeros(1, dtype=torch.int32, device=device))

        self.pair_slots, self.pair_experts = table(pairs), table(pairs)
        tiles = max_tiles(pairs, buckets, MIN_TILE_ROWS)
        tallest = tile_height(pairs, num_experts, tuning)
        self.tile_slots, self.tile_experts = table(tiles), table(tiles)
        self.tile_pairs = table(max_tiles(pairs, buckets, tallest) * tallest)
        self.num_tiles = count()
        base_tiles = max_tiles(pairs, num_experts, MIN_TILE_ROWS) if with_base else 1
        tallest = base_tile_height(pairs, num_experts, tuning)
        capacity = max_tiles(pairs, num_experts, tallest) * tallest if with_base else 1
        self.base_experts, self.base_pairs = table(base_tiles), table(capacity)
        self.num_base_tiles = count()
        self._scratch = table(scratch_size(pairs, num_experts, max_slots, with_base, tuning))
        self.step = count()
        note_rows(self.step, 0)

    @property
    def num_rows(self) -> int:
        """Rows of the prepared step."""
        return prepared_rows(self.step) or 0

    @property
    def tables(self) -> PairTables:
        """All buffers, with the sizes of the prepared step."""
        return PairTables.of(self.buffers, self.num_rows, self.sizes)

    @property
    def buffers(self) -> list[Tensor]:
        """As an operator takes them; see PairTables.of."""
        tables = Tables(
            pair_slots=self.pair_slots,
            pair_experts=self.pair_experts,
            tile_slots=self.tile_slots,
            tile_experts=self.tile_experts,
            tile_pairs=self.tile_pairs,
            num_tiles=self.num_tiles,
            base_experts=self.base_experts,
            base_pairs=self.base_pairs,
            num_base_tiles=self.num_base_tiles,
        )
        return [*tables, self._scratch]

    @property
    def sizes(self) -> list[int]:
        """Of every step, as an operator takes them; see PairTables.of."""
        sizes = self.top_k, self.num_experts, self.max_slots
        return [*sizes, int(self.with_base), int(self._is_invariant)]

    def prepare(
        self, topk_ids: Tensor, batch: BatchMetadata, *, expert_map: Tensor | None = None
    ) -> None:
        """Install the routing of a layer, after `batch` was prepared for the step.

        topk_ids: int32 [rows of the step, top_k] on this device, contiguous.
        expert_map: int32 [global experts] on this device, the local expert or -1; without it
            the ids are local. The pair of an id without local expert has no expert.
        Raises ValueError with nothing changed.
        """
        self._check(topk_ids, batch, expert_map)
        align_pairs(
            topk_ids,
            batch.token_slots,
            expert_map,
            self.buffers,
            self.sizes,
            batch_rows=batch.tile_rows,
            step=self.step,
        )

    def _check(self, topk_ids: Tensor, batch: BatchMetadata, expert_map: Tensor | None) -> None:
        """What holds for any number of rows: part of a traced graph, see `align_pairs`."""
        device = self.pair_slots.device
        for name, tensor, dims in (("topk_ids", topk_ids, 2), ("expert_map", expert_map, 1)):
            if tensor is None:
                continue
            if tensor.dtype != torch.int32 or tensor.dim() != dims:
                raise ValueError(
                    f"{name} must be int32 with {dims} dimension{'s' * (dims > 1)} "
                    f"(got {tensor.dtype} with shape {list(tensor.shape)})"
                )
            if tensor.device != device:
                raise ValueError(f"{name} must be on {device} (got {tensor.device})")
        if topk_ids.shape[1] != self.top_k:
            raise ValueError(f"topk_ids must have {self.top_k} columns (got {topk_ids.shape[1]})")
        if batch.token_slots.device != device:
            raise ValueError(f"batch must be on {device} (got {batch.token_slots.device})")
        if batch.max_slots != self.max_slots:
            raise ValueError(f"batch must have {self.max_slots} slots (got {batch.max_slots})")
