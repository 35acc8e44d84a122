"""Which row of a batch uses which slot, sorted and tiled on the device.

One launch without host synchronisation writes everything that the dense kernels read. All
buffers are persistent and every prepare() resets what lies past the live part, so a padded
row is always a base row and a replayed graph never meets an entry of an earlier step
(vllm #42120, sglang #29468).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# smallest height of a tile: the M of a tensor-core instruction
MIN_TILE_ROWS = 16


def tile_height(num_rows: int) -> int:
    """Rows of one adapter that one tile covers. Depends on the batch size alone, so that it
    is a constant of a captured graph."""
    if num_rows <= 256:
        return 16
    return 32 if num_rows <= 1024 else 64


class BatchMetadata:
    """Device buffers, all int32:

    token_slots [max_tokens]: slot of each row, -1 for base rows, padding and unknown slots.
    rows [max_tokens]: rows that use an adapter, grouped by slot, in ascending order within a
        slot; -1 behind them.
    tiles [max_tiles, 3]: (slot, first index into `rows`, count); slot -1 behind the last.
    num_tiles [1].
    """

    def __init__(self, *, max_tokens: int, max_slots: int, device: torch.device | str) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1 (got {max_tokens})")
        if max_slots < 1:
            raise ValueError(f"max_slots must be at least 1 (got {max_slots})")
        self.max_tokens, self.max_slots = max_tokens, max_slots
        # each slot adds at most one tile that is not full
        max_tiles = triton.cdiv(max_tokens, MIN_TILE_ROWS) + min(max_slots, max_tokens)

        def table(*shape: int) -> Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        self.token_slots = table(max_tokens)
        self.rows = table(max_tokens)
        self.tiles = table(max_tiles, 3)
        self.num_tiles = torch.zeros(1, dtype=torch.int32, device=device)
        self.num_rows = 0

    def prepare(self, token_slots: Tensor, *, num_rows: int | None = None) -> None:
        """Install the mapping of the next step.

        token_slots: int32 [live rows], on this device (no copy) or on the CPU (copied without
            a sync). -1 is a base row; on the device an id >= max_slots counts as one, too.
        num_rows: rows of the tensors of this step where the batch is padded; the rows behind
            the live ones are base rows. Raises ValueError with nothing changed.
        """
        num_live = self._check(token_slots, num_rows)
        if token_slots.device != self.token_slots.device:
            token_slots = _upload(token_slots, self.token_slots.device)
        self.num_rows = num_live if num_rows is None else num_rows
        block = 1024 if self.max_tokens <= 1024 else 4096
        _prepare_kernel[(self.max_slots,)](
            token_slots,
            self.token_slots,
            self.rows,
            self.tiles,
            self.num_tiles,
            num_live,
            self.max_tokens,
            self.tiles.shape[0],
            self.max_slots,
            TILE_ROWS=tile_height(self.num_rows),
            NUM_BINS=max(16, triton.next_power_of_2(self.max_slots)),
            BLOCK=block,
            num_warps=4 if block == 1024 else 8,
        )

    def _check(self, token_slots: Tensor, num_rows: int | None) -> int:
        if token_slots.dtype != torch.int32 or token_slots.dim() != 1:
            raise ValueError(
                "token_slots must be int32 with one dimension "
                f"(got {token_slots.dtype} with shape {list(token_slots.shape)})"
            )
        if not token_slots.is_contiguous():
            raise ValueError(
                f"token_slots must be contiguous (got a stride of {token_slots.stride(0)})"
            )
        num_live = token_slots.shape[0]
        wanted = num_live if num_rows is None else num_rows
        if wanted > self.max_tokens:
            raise ValueError(f"token_slots may have {self.max_tokens} rows (got {wanted})")
        if wanted < num_live:
            raise ValueError(f"num_rows must be at least {num_live}, the live rows (got {wanted})")
        # a check of device data would be a sync; there the kernel takes a foreign id as base
        if token_slots.device.type == "cpu" and num_live:
            low, high = token_slots.min().item(), token_slots.max().item()
            if low < -1 or high >= self.max_slots:
                raise ValueError(
                    f"token_slots must be -1 to {self.max_slots - 1} (got {low} to {high})"
                )
        return num_live


def _upload(token_slots: Tensor, device: torch.device) -> Tensor:
    # a fresh pinned block each step: the allocator recycles it only after the copy has run,
    # a reused one could be overwritten before (vllm #36013)
    return token_slots.pin_memory().to(device, non_blocking=True)


@triton.jit(do_not_specialize=["num_live", "max_tokens", "max_tiles", "max_slots"])
def _prepare_kernel(
    new_slots_ptr,
    token_slots_ptr,
    rows_ptr,
    tiles_ptr,
    num_tiles_ptr,
    num_live,
    max_tokens,
    max_tiles,
    max_slots,
    TILE_ROWS: tl.constexpr,
    NUM_BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # one program a slot; each counts all slots, so that none waits for another
    slot = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    bins = tl.arange(0, NUM_BINS)

    counts = tl.zeros([NUM_BINS], dtype=tl.int32)
    for start in range(0, num_live, BLOCK):
        slots = tl.load(new_slots_ptr + start + lanes, mask=start + lanes < num_live, other=-1)
        counts += tl.histogram(slots, NUM_BINS, mask=(slots >= 0) & (slots < max_slots))
    tile_counts = (counts + TILE_ROWS - 1) // TILE_ROWS
    count = tl.sum(tl.where(bins == slot, counts, 0))
    first_row = tl.sum(tl.where(bins < slot, counts, 0))
    first_tile = tl.sum(tl.where(bins < slot, tile_counts, 0))
    num_rows = tl.sum(counts)
    num_tiles = tl.sum(tile_counts)

    # rows of this slot, in ascending order
    placed = first_row
    for start in range(0, num_live, BLOCK):
        slots = tl.load(new_slots_ptr + start + lanes, mask=start + lanes < num_live, other=-1)
        mine = slots == slot
        rank = tl.cumsum(mine.to(tl.int32), axis=0)
        tl.store(rows_ptr + placed + rank - 1, start + lanes, mask=mine)
        placed += tl.sum(mine.to(tl.int32))

    # tiles of this slot
    for start in range(0, (count + TILE_ROWS - 1) // TILE_ROWS, BLOCK):
        tile = start + lanes
        left = count - tile * TILE_ROWS
        mask = left > 0
        entry = tiles_ptr + (first_tile + tile) * 3
        tl.store(entry, tl.zeros([BLOCK], dtype=tl.int32) + slot, mask=mask)
        tl.store(entry + 1, first_row + tile * TILE_ROWS, mask=mask)
        tl.store(entry + 2, tl.minimum(left, TILE_ROWS), mask=mask)

    # the tails, shared out among the programs
    for start in range(slot * BLOCK, max_tokens, max_slots * BLOCK):
        token = start + lanes
        slots = tl.load(new_slots_ptr + token, mask=token < num_live, other=-1)
        slots = tl.where((slots >= 0) & (slots < max_slots), slots, -1)
        tl.store(token_slots_ptr + token, slots, mask=token < max_tokens)
        behind = (token >= num_rows) & (token < max_tokens)
        tl.store(rows_ptr + token, tl.full([BLOCK], -1, tl.int32), mask=behind)
    for start in range(slot * BLOCK, max_tiles * 3, max_slots * BLOCK):
        cell = start + lanes
        behind = (cell >= num_tiles * 3) & (cell < max_tiles * 3)
        tl.store(tiles_ptr + cell, tl.full([BLOCK], -1, tl.int32), mask=behind)
    if slot == 0:
        tl.store(num_tiles_ptr, num_tiles)
