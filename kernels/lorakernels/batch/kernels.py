"""Triton kernel that sorts a batch's rows by slot and cuts them into tiles; see metadata.py."""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["num_live", "max_tokens", "size_tile_slots", "size_tile_rows", "max_slots"]
)
def prepare_kernel(
    new_slots_ptr,
    token_slots_ptr,
    tile_slots_ptr,
    tile_rows_ptr,
    num_tiles_ptr,
    num_live,
    max_tokens,
    size_tile_slots,
    size_tile_rows,
    max_slots,
    HEIGHT: tl.constexpr,
    NUM_BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # one program for each slot; each counts all slots, so that none waits for another
    slot = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    bins = tl.arange(0, NUM_BINS)
    nothing = tl.full([BLOCK], -1, tl.int32)

    counts = tl.zeros([NUM_BINS], dtype=tl.int32)
    for start in range(0, num_live, BLOCK):
        slots = tl.load(new_slots_ptr + start + lanes, mask=start + lanes < num_live, other=-1)
        counts += tl.histogram(slots, NUM_BINS, mask=(slots >= 0) & (slots < max_slots))
    tile_counts = (counts + HEIGHT - 1) // HEIGHT
    count = tl.sum(tl.where(bins == slot, counts, 0))
    own_tiles = tl.sum(tl.where(bins == slot, tile_counts, 0))
    first_tile = tl.sum(tl.where(bins < slot, tile_counts, 0))
    num_tiles = tl.sum(tile_counts)

    # rows of this slot in ascending order, then -1 up to the end of its last tile
    own_rows_ptr = tile_rows_ptr + first_tile * HEIGHT
    placed = 0
    for start in range(0, num_live, BLOCK):
        slots = tl.load(new_slots_ptr + start + lanes, mask=start + lanes < num_live, other=-1)
        mine = slots == slot
        position = placed + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(own_rows_ptr + position, start + lanes, mask=mine)
        placed += tl.sum(mine.to(tl.int32))
    tl.store(own_rows_ptr + count + lanes, nothing, mask=count + lanes < own_tiles * HEIGHT)
    for start in range(0, own_tiles, BLOCK):
        tile = start + lanes
        tl.store(tile_slots_ptr + first_tile + tile, nothing * 0 + slot, mask=tile < own_tiles)

    # the programs share the reset of the tails
    step = max_slots * BLOCK
    for start in range(slot * BLOCK, max_tokens, step):
        token = start + lanes
        slots = tl.load(new_slots_ptr + token, mask=token < num_live, other=-1)
        slots = tl.where(slots < max_slots, slots, -1)
        tl.store(token_slots_ptr + token, tl.maximum(slots, -1), mask=token < max_tokens)
    for start in range(num_tiles + slot * BLOCK, size_tile_slots, step):
        tl.store(tile_slots_ptr + start + lanes, nothing, mask=start + lanes < size_tile_slots)
    for start in range(num_tiles * HEIGHT + slot * BLOCK, size_tile_rows, step):
        tl.store(tile_rows_ptr + start + lanes, nothing, mask=start + lanes < size_tile_rows)
    if slot == 0:
        tl.store(num_tiles_ptr, num_tiles)
