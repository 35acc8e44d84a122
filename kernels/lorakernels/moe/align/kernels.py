"""Triton kernels that sort the routed pairs of a batch by (expert, slot) and cut them into tiles;
see align.py.

A bucket is (expert, slot), numbered expert * SLOT_BINS + slot; where the base layer is tiled as
well, base rows are slot 0 and every other slot moves up by one. The place of a pair follows from
counts alone, so no program waits for another and the order never depends on timing.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _bucket_of(
    topk_ids_ptr,
    token_slots_ptr,
    expert_map_ptr,
    pair,
    num_pairs,
    num_ids,
    num_experts,
    max_slots,
    TOP_K: tl.constexpr,
    SLOT_BINS: tl.constexpr,
    MAPPED: tl.constexpr,
    WITH_BASE: tl.constexpr,
):
    """Bucket (-1: none), expert (-1: not here) and slot (-1: base row) of each pair."""
    live = pair < num_pairs
    expert = tl.load(topk_ids_ptr + pair, mask=live, other=-1)
    if MAPPED:
        # a foreign id is looked up nowhere (sglang #23178)
        known = (expert >= 0) & (expert < num_ids)
        expert = tl.load(expert_map_ptr + expert, mask=known, other=-1)
    slot = tl.load(token_slots_ptr + pair // TOP_K, mask=live, other=-1)
    slot = tl.where((slot >= 0) & (slot < max_slots), slot, -1)
    expert = tl.where((expert >= 0) & (expert < num_experts), expert, -1)
    bucket = expert * SLOT_BINS + slot + WITH_BASE
    counted = (expert >= 0) & (slot + WITH_BASE >= 0)
    return tl.where(counted, bucket, -1), expert, slot


@triton.jit
def _reset(table_ptr, start, end, BLOCK: tl.constexpr = 1024):
    """-1 from `start` to `end`, shared out among the programs."""
    lanes = tl.arange(0, BLOCK)
    nothing = tl.full([BLOCK], -1, tl.int32)
    first = start + tl.program_id(0) * BLOCK
    for at in range(first, end, tl.num_programs(0) * BLOCK):
        tl.store(table_ptr + at + lanes, nothing, mask=at + lanes < end)


@triton.jit(
    do_not_specialize=[
        "num_pairs",
        "num_ids",
        "num_experts",
        "max_slots",
        "size_tile_pairs",
        "size_base_pairs",
    ]
)
def count_pairs_kernel(
    topk_ids_ptr,
    token_slots_ptr,
    expert_map_ptr,
    counts_ptr,
    tile_pairs_ptr,
    base_pairs_ptr,
    num_pairs,
    num_ids,
    num_experts,
    max_slots,
    size_tile_pairs,
    size_base_pairs,
    TOP_K: tl.constexpr,
    SLOT_BINS: tl.constexpr,
    NUM_BINS: tl.constexpr,
    MAPPED: tl.constexpr,
    WITH_BASE: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    # one program counts the buckets of SPAN pairs, and resets a part of the tables
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    bucket, _, _ = _bucket_of(
        topk_ids_ptr,
        token_slots_ptr,
        expert_map_ptr,
        pair,
        num_pairs,
        num_ids,
        num_experts,
        max_slots,
        TOP_K,
        SLOT_BINS,
        MAPPED,
        WITH_BASE,
    )
    counts = tl.histogram(bucket, NUM_BINS, mask=bucket >= 0)
    tl.store(counts_ptr + tl.program_id(0) * NUM_BINS + tl.arange(0, NUM_BINS), counts)
    _reset(tile_pairs_ptr, 0, size_tile_pairs)
    if WITH_BASE:
        _reset(base_pairs_ptr, 0, size_base_pairs)


@triton.jit(do_not_specialize=["num_spans"])
def sum_counts_kernel(
    counts_ptr, num_spans, NUM_BINS: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr
):
    # counts [num_spans + 1, NUM_BINS]: of each span becomes of all spans before it, in place;
    # the last row gets the totals. One program does BINS buckets
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    ROWS: tl.constexpr = 4096 // BINS
    bins = tl.program_id(0) * BINS + tl.arange(0, BINS)
    so_far = tl.zeros([BINS], dtype=tl.int32)
    for first in range(0, num_spans, ROWS):
        row = first + tl.arange(0, ROWS)
        cells = counts_ptr + row[:, None] * NUM_BINS + bins[None, :]
        here = (row < num_spans)[:, None]
        counts = tl.load(cells, mask=here, other=0)
        tl.store(cells, so_far[None, :] + tl.cumsum(counts, axis=0) - counts, mask=here)
        so_far += tl.sum(counts, axis=0)
    tl.store(counts_ptr + num_spans * NUM_BINS + bins, so_far)


@triton.jit
def _offsets(
    total,
    HEIGHT: tl.constexpr,
    BASE_HEIGHT: tl.constexpr,
    SLOT_BINS: tl.constexpr,
    NUM_BINS: tl.constexpr,
    WITH_BASE: tl.constexpr,
):
    """From the pairs of each bucket: its first tile, the pairs of its expert in lower slots, the
    first base tile and the pairs of its expert; and the numbers of tiles."""
    tiles = (total + HEIGHT - 1) // HEIGHT
    if WITH_BASE:
        # base rows have no tile of an adapter
        tiles = tl.where(tl.arange(0, NUM_BINS) % SLOT_BINS == 0, 0, tiles)
    first_tile = tl.cumsum(tiles, axis=0) - tiles
    EXPERTS: tl.constexpr = NUM_BINS // SLOT_BINS
    by_slot = tl.reshape(total, [EXPERTS, SLOT_BINS])
    by_expert = tl.sum(by_slot, axis=1)
    base_tiles = (by_expert + BASE_HEIGHT - 1) // BASE_HEIGHT
    first_base = tl.cumsum(base_tiles, axis=0) - base_tiles
    lower = tl.reshape(tl.cumsum(by_slot, axis=1) - by_slot, [NUM_BINS])
    of_expert = tl.reshape(tl.broadcast_to(by_expert[:, None], [EXPERTS, SLOT_BINS]), [NUM_BINS])
    first = tl.reshape(tl.broadcast_to(first_base[:, None], [EXPERTS, SLOT_BINS]), [NUM_BINS])
    return first_tile, lower, first, of_expert, tl.sum(tiles), tl.sum(base_tiles)


@triton.jit(do_not_specialize=["num_spans"])
def find_offsets_kernel(
    counts_ptr,
    num_tiles_ptr,
    num_base_tiles_ptr,
    num_spans,
    HEIGHT: tl.constexpr,
    BASE_HEIGHT: tl.constexpr,
    SLOT_BINS: tl.constexpr,
    NUM_BINS: tl.constexpr,
    WITH_BASE: tl.constexpr,
    PDL: tl.constexpr,
):
    # one program: what places need of all buckets goes behind their totals in counts
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = counts_ptr + num_spans * NUM_BINS + tl.arange(0, NUM_BINS)
    first_tile, lower, first_base, _, num_tiles, num_base = _offsets(
        tl.load(row), HEIGHT, BASE_HEIGHT, SLOT_BINS, NUM_BINS, WITH_BASE
    )
    tl.store(row + NUM_BINS, first_tile)
    tl.store(num_tiles_ptr, num_tiles)
    if WITH_BASE:
        tl.store(row + 2 * NUM_BINS, lower)
        tl.store(row + 3 * NUM_BINS, first_base)
        tl.store(num_base_tiles_ptr, num_base)


@triton.jit
def _put(table_ptr, pair, first_tile, rank, count, HEIGHT: tl.constexpr, COUNTED: tl.constexpr):
    """Each pair into its tile. `rank` of `count` pairs that share the tiles from `first_tile`
    on; -1 for a pair without a tile. Where nobody reset the table before, the last of them also
    writes -1 into the places of the last tile that stay empty."""
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
    topk_ids_ptr,
    token_slots_ptr,
    expert_map_ptr,
    counts_ptr,
    pair_slots_ptr,
    pair_experts_ptr,
    tile_slots_ptr,
    tile_experts_ptr,
    tile_pairs_ptr,
    num_tiles_ptr,
    base_experts_ptr,
    base_pairs_ptr,
    num_base_tiles_ptr,
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
    TOP_K: tl.constexpr,
    SLOT_BINS: tl.constexpr,
    NUM_BINS: tl.constexpr,
    MAPPED: tl.constexpr,
    WITH_BASE: tl.constexpr,
    COUNTED: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNT_BLOCK: tl.constexpr,
    HEIGHT: tl.constexpr,
    BASE_HEIGHT: tl.constexpr,
    PDL: tl.constexpr,
):
    # one program places SPAN pairs. COUNTED: other kernels counted each span, found the offsets
    # and reset the tables; otherwise the batch is small and every program does it by itself
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    span = tl.program_id(0)
    lanes = tl.arange(0, SPAN)
    pair = span * SPAN + lanes
    bucket, expert, slot = _bucket_of(
        topk_ids_ptr,
        token_slots_ptr,
        expert_map_ptr,
        pair,
        num_pairs,
        num_ids,
        num_experts,
        max_slots,
        TOP_K,
        SLOT_BINS,
        MAPPED,
        WITH_BASE,
    )
    index = tl.maximum(bucket, 0)
    if COUNTED:
        num_tiles = tl.load(num_tiles_ptr)
        earlier = tl.load(counts_ptr + span * NUM_BINS + index)
        offsets_ptr = counts_ptr + (num_spans + 1) * NUM_BINS + index
        own_first = tl.load(offsets_ptr)
        own_count = earlier
    else:
        total = tl.zeros([NUM_BINS], dtype=tl.int32)
        before = tl.zeros([NUM_BINS], dtype=tl.int32)
        for first in range(0, num_pairs, COUNT_BLOCK):
            other = first + tl.arange(0, COUNT_BLOCK)
            buckets, _, _ = _bucket_of(
                topk_ids_ptr,
                token_slots_ptr,
                expert_map_ptr,
                other,
                num_pairs,
                num_ids,
                num_experts,
                max_slots,
                TOP_K,
                SLOT_BINS,
                MAPPED,
                WITH_BASE,
            )
            total += tl.histogram(buckets, NUM_BINS, mask=buckets >= 0)
            ahead = (buckets >= 0) & (other < span * SPAN)
            before += tl.histogram(buckets, NUM_BINS, mask=ahead)
        first_tile, all_lower, first_base, of_expert, num_tiles, num_base = _offsets(
            total, HEIGHT, BASE_HEIGHT, SLOT_BINS, NUM_BINS, WITH_BASE
        )
        earlier = tl.gather(before, index, axis=0)
        own_first = tl.gather(first_tile, index, axis=0)
        own_count = tl.gather(total, index, axis=0)

    # earlier pairs of the same bucket: in earlier spans, and in this one, CHUNK at a time so that
    # what is compared fits into registers
    rank = earlier
    for first in tl.static_range(0, SPAN, CHUNK):
        other = first + tl.arange(0, CHUNK)
        buckets, _, _ = _bucket_of(
            topk_ids_ptr,
            token_slots_ptr,
            expert_map_ptr,
            span * SPAN + other,
            num_pairs,
            num_ids,
            num_experts,
            max_slots,
            TOP_K,
            SLOT_BINS,
            MAPPED,
            WITH_BASE,
        )
        same = (bucket[:, None] == buckets[None, :]) & (other[None, :] < lanes[:, None])
        rank += tl.sum(same.to(tl.int32), axis=1)
    counted = bucket >= 0
    routed = counted & (slot >= 0)
    own_rank = tl.where(routed, rank, -1)
    _put(tile_pairs_ptr, pair, own_first, own_rank, own_count, HEIGHT, COUNTED)
    leads = routed & (rank % HEIGHT == 0)
    tile = own_first + rank // HEIGHT
    tl.store(tile_slots_ptr + tile, slot, mask=leads)
    tl.store(tile_experts_ptr + tile, expert, mask=leads)
    # a pair without expert has no adapter either: whoever reads one table needs no other
    tl.store(pair_slots_ptr + pair, tl.where(expert >= 0, slot, -1), mask=pair < num_pairs)
    tl.store(pair_experts_ptr + pair, expert, mask=pair < num_pairs)
    if WITH_BASE:
        if COUNTED:
            num_base = tl.load(num_base_tiles_ptr)
            lower = tl.load(offsets_ptr + NUM_BINS)
            base_first = tl.load(offsets_ptr + 2 * NUM_BINS)
            base_count = lower
        else:
            lower = tl.gather(all_lower, index, axis=0)
            base_first = tl.gather(first_base, index, axis=0)
            base_count = tl.gather(of_expert, index, axis=0)
        base_rank = tl.where(counted, rank + lower, -1)
        _put(base_pairs_ptr, pair, base_first, base_rank, base_count, BASE_HEIGHT, COUNTED)
        base_leads = counted & (base_rank % BASE_HEIGHT == 0)
        base_tile = base_first + base_rank // BASE_HEIGHT
        tl.store(base_experts_ptr + base_tile, expert, mask=base_leads)

    # what lies behind the live part is reset at every step
    _reset(pair_slots_ptr, num_pairs, size_pair_tables)
    _reset(pair_experts_ptr, num_pairs, size_pair_tables)
    _reset(tile_slots_ptr, num_tiles, size_tiles)
    _reset(tile_experts_ptr, num_tiles, size_tiles)
    if not COUNTED:
        _reset(tile_pairs_ptr, num_tiles * HEIGHT, size_tile_pairs)
        if span == 0:
            tl.store(num_tiles_ptr, num_tiles)
    if WITH_BASE:
        _reset(base_experts_ptr, num_base, size_base_tiles)
        if not COUNTED:
            _reset(base_pairs_ptr, num_base * BASE_HEIGHT, size_base_pairs)
            if span == 0:
                tl.store(num_base_tiles_ptr, num_base)
