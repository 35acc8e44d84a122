"""Triton kernel that sorts the pairs of a batch by (expert, slot) and cuts them into tiles."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lorakernels.moe.align.kernels.arguments import Sizes
from lorakernels.moe.align.kernels.buckets import bucket_of, find_offsets, reset


@triton.jit
def _put(table_ptr, pair, first_tile, rank, count, HEIGHT: tl.constexpr, COUNTED: tl.constexpr):
    """Writes each pair into its tile. `rank` is its position among the `count` pairs that share
    the tiles from `first_tile` on, -1 for a pair without a tile. Where no other kernel reset the
    table before, the last of these pairs also writes -1 into the free places of the last tile."""
    here = rank >= 0
    place = (first_tile + rank // HEIGHT) * HEIGHT + rank % HEIGHT
    tl.store(table_ptr + place, pair, mask=here)
    if not COUNTED:
        behind = tl.arange(0, HEIGHT)[None, :] + 1
        ends = (here & (rank == count - 1))[:, None]
        empty = ends & ((rank % HEIGHT)[:, None] + behind < HEIGHT)
        nothing = place[:, None] * 0 - 1 + behind * 0
        tl.store(table_ptr + place[:, None] + behind, nothing, mask=empty)


@triton.jit(
    do_not_specialize=[
        "num_pairs",
        "num_ids",
        "num_experts",
        "max_slots",
        "num_spans",
        "size_pair_tables",
        "size_tiles",
        "size_tile_pairs",
        "size_base_tiles",
        "size_base_pairs",
    ]
)
def place_pairs_kernel(
    routes,
    tables,
    counts_ptr,
    num_pairs,
    num_ids,
    num_experts,
    max_slots,
    num_spans,
    size_pair_tables,
    size_tiles,
    size_tile_pairs,
    size_base_tiles,
    size_base_pairs,
    layout: tl.constexpr,
    NUM_BINS: tl.constexpr,
    HEIGHT: tl.constexpr,
    BASE_HEIGHT: tl.constexpr,
    COUNTED: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNT_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # one program places SPAN pairs. COUNTED: other kernels counted each span, found the offsets
    # and reset the tables; otherwise the batch is small and every program does it by itself
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    sizes = Sizes(num_pairs, num_ids, num_experts, max_slots)
    span = tl.program_id(0)
    lanes = tl.arange(0, SPAN)
    pair = span * SPAN + lanes
    bucket, expert, slot = bucket_of(routes, sizes, pair, layout)
    index = tl.maximum(bucket, 0)
    if COUNTED:
        num_tiles = tl.load(tables.num_tiles)
        # more programs reset the tables than there are spans with counts
        earlier = tl.load(counts_ptr + span * NUM_BINS + index, mask=bucket >= 0, other=0)
        offsets_ptr = counts_ptr + (num_spans + 1) * NUM_BINS + index
        own_first = tl.load(offsets_ptr)
        own_count = earlier
    else:
        total = tl.zeros([NUM_BINS], dtype=tl.int32)
        before = tl.zeros([NUM_BINS], dtype=tl.int32)
        for first in range(0, num_pairs, COUNT_BLOCK):
            other = first + tl.arange(0, COUNT_BLOCK)
            buckets, _, _ = bucket_of(routes, sizes, other, layout)
            total += tl.histogram(buckets, NUM_BINS, mask=buckets >= 0)
            ahead = (buckets >= 0) & (other < span * SPAN)
            before += tl.histogram(buckets, NUM_BINS, mask=ahead)
        first_tile, all_lower, first_base, of_expert, num_tiles, num_base = find_offsets(
            total, layout, NUM_BINS, HEIGHT, BASE_HEIGHT
        )
        earlier = tl.gather(before, index, axis=0)
        own_first = tl.gather(first_tile, index, axis=0)
        own_count = tl.gather(total, index, axis=0)

    # earlier pairs of the same bucket: those of earlier spans, and those of this one, CHUNK at a
    # time so that the comparison fits into registers
    rank = earlier
    for first in tl.static_range(0, SPAN, CHUNK):
        other = first + tl.arange(0, CHUNK)
        buckets, _, _ = bucket_of(routes, sizes, span * SPAN + other, layout)
        same = (bucket[:, None] == buckets[None, :]) & (other[None, :] < lanes[:, None])
        rank += tl.sum(same.to(tl.int32), axis=1)
    counted = bucket >= 0
    routed = counted & (slot >= 0)
    own_rank = tl.where(routed, rank, -1)
    _put(tables.tile_pairs, pair, own_first, own_rank, own_count, HEIGHT, COUNTED)
    leads = routed & (rank % HEIGHT == 0)
    tile = own_first + rank // HEIGHT
    tl.store(tables.tile_slots + tile, slot, mask=leads)
    tl.store(tables.tile_experts + tile, expert, mask=leads)
    # a pair without expert has no slot either, so that a reader of one table needs no other
    tl.store(tables.pair_slots + pair, tl.where(expert >= 0, slot, -1), mask=pair < num_pairs)
    tl.store(tables.pair_experts + pair, expert, mask=pair < num_pairs)
    if layout.WITH_BASE:
        if COUNTED:
            num_base = tl.load(tables.num_base_tiles)
            lower = tl.load(offsets_ptr + NUM_BINS)
            base_first = tl.load(offsets_ptr + 2 * NUM_BINS)
            base_count = lower
        else:
            lower = tl.gather(all_lower, index, axis=0)
            base_first = tl.gather(first_base, index, axis=0)
            base_count = tl.gather(of_expert, index, axis=0)
        base_rank = tl.where(counted, rank + lower, -1)
        _put(tables.base_pairs, pair, base_first, base_rank, base_count, BASE_HEIGHT, COUNTED)
        base_leads = counted & (base_rank % BASE_HEIGHT == 0)
        base_tile = base_first + base_rank // BASE_HEIGHT
        tl.store(tables.base_experts + base_tile, expert, mask=base_leads)

    # everything past the live part is reset in every step
    reset(tables.pair_slots, num_pairs, size_pair_tables)
    reset(tables.pair_experts, num_pairs, size_pair_tables)
    reset(tables.tile_slots, num_tiles, size_tiles)
    reset(tables.tile_experts, num_tiles, size_tiles)
    if not COUNTED:
        reset(tables.tile_pairs, num_tiles * HEIGHT, size_tile_pairs)
        if span == 0:
            tl.store(tables.num_tiles, num_tiles)
    if layout.WITH_BASE:
        reset(tables.base_experts, num_base, size_base_tiles)
        if not COUNTED:
            reset(tables.base_pairs, num_base * BASE_HEIGHT, size_base_pairs)
            if span == 0:
                tl.store(tables.num_base_tiles, num_base)
