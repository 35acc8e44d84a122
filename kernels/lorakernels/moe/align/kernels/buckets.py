"""What the kernels of all ways to align share: the buckets of pairs, and the reset of tables.

A bucket is (expert, slot), numbered expert * SLOT_BINS + slot; where the base layer is tiled as
well, base rows are slot 0 and every other slot moves up by one. A table is reset to -1, which
stands for no pair, slot or expert.
"""

import triton
import triton.language as tl


@triton.jit
def bucket_of(routes, sizes, pair, layout: tl.constexpr):
    """Bucket (-1: none), expert (-1: not local) and slot (-1: base row) of each pair."""
    live = pair < sizes.num_pairs
    expert = tl.load(routes.topk_ids + pair, mask=live, other=-1)
    if layout.MAPPED:
        # an unknown id is not looked up (sglang #23178)
        known = (expert >= 0) & (expert < sizes.num_ids)
        expert = tl.load(routes.expert_map + expert, mask=known, other=-1)
    slot = tl.load(routes.token_slots + pair // layout.TOP_K, mask=live, other=-1)
    slot = tl.where((slot >= 0) & (slot < sizes.max_slots), slot, -1)
    expert = tl.where((expert >= 0) & (expert < sizes.num_experts), expert, -1)
    bucket = expert * layout.SLOT_BINS + slot + layout.WITH_BASE
    counted = (expert >= 0) & (slot + layout.WITH_BASE >= 0)
    return tl.where(counted, bucket, -1), expert, slot


@triton.jit
def fill(table_ptr, start, end, index, of, BLOCK: tl.constexpr = 1024):
    """-1 from `start` to `end`: the share of the program `index` of `of`."""
    lanes = tl.arange(0, BLOCK)
    nothing = tl.full([BLOCK], -1, tl.int32)
    for at in range(start + index * BLOCK, end, of * BLOCK):
        tl.store(table_ptr + at + lanes, nothing, mask=at + lanes < end)


@triton.jit
def reset(table_ptr, start, end):
    """-1 from `start` to `end`; the programs share the work."""
    fill(table_ptr, start, end, tl.program_id(0), tl.num_programs(0))


@triton.jit
def reset_before_tiles(
    tables,
    num_pairs,
    size_pair_tables,
    size_tiles,
    size_tile_pairs,
    size_base_tiles,
    size_base_pairs,
    layout: tl.constexpr,
):
    """What a launch resets that is followed by one which writes the tiles."""
    reset(tables.pair_slots, num_pairs, size_pair_tables)
    reset(tables.pair_experts, num_pairs, size_pair_tables)
    reset(tables.tile_slots, 0, size_tiles)
    reset(tables.tile_experts, 0, size_tiles)
    reset(tables.tile_pairs, 0, size_tile_pairs)
    if layout.WITH_BASE:
        reset(tables.base_experts, 0, size_base_tiles)
        reset(tables.base_pairs, 0, size_base_pairs)
