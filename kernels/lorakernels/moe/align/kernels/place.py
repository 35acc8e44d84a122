"""Triton kernel that puts each pair of a large batch into the tile of its (expert, slot), after
other kernels counted the pairs of each span, found the offsets and reset the places of all tiles.
What lies past the live part of the other tables is reset here."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lorakernels.moe.align.kernels.arguments import Sizes
from lorakernels.moe.align.kernels.buckets import bucket_of, reset


@triton.jit(
    do_not_specialize=[
        "num_pairs",
        "num_ids",
        "num_experts",
        "max_slots",
        "num_spans",
        "size_pair_tables",
        "size_tiles",
        "size_base_tiles",
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
    size_base_tiles,
    layout: tl.constexpr,
    NUM_BINS: tl.constexpr,
    HEIGHT: tl.constexpr,
    BASE_HEIGHT: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    # one program places SPAN pairs
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    sizes = Sizes(num_pairs, num_ids, num_experts, max_slots)
    span = tl.program_id(0)
    lanes = tl.arange(0, SPAN)
    pair = span * SPAN + lanes
    bucket, expert, slot = bucket_of(routes, sizes, pair, layout)
    index = tl.maximum(bucket, 0)
    # programs behind the last span, which only reset tables, have neither pairs nor counters
    earlier = tl.load(counts_ptr + span * NUM_BINS + index, mask=bucket >= 0, other=0)
    offsets_ptr = counts_ptr + (num_spans + 1) * NUM_BINS + index
    own_first = tl.load(offsets_ptr)

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
    tl.store(tables.tile_pairs + own_first * HEIGHT + rank, pair, mask=routed)
    leads = routed & (rank % HEIGHT == 0)
    tile = own_first + rank // HEIGHT
    tl.store(tables.tile_slots + tile, slot, mask=leads)
    tl.store(tables.tile_experts + tile, expert, mask=leads)
    # a pair without expert has no slot either, so that a reader of one table needs no other
    tl.store(tables.pair_slots + pair, tl.where(expert >= 0, slot, -1), mask=pair < num_pairs)
    tl.store(tables.pair_experts + pair, expert, mask=pair < num_pairs)
    if layout.WITH_BASE:
        lower = tl.load(offsets_ptr + NUM_BINS)
        base_first = tl.load(offsets_ptr + 2 * NUM_BINS)
        base_rank = rank + lower
        tl.store(tables.base_pairs + base_first * BASE_HEIGHT + base_rank, pair, mask=counted)
        base_leads = counted & (base_rank % BASE_HEIGHT == 0)
        base_tile = base_first + base_rank // BASE_HEIGHT
        tl.store(tables.base_experts + base_tile, expert, mask=base_leads)

    # everything past the live part is reset in every step
    num_tiles = tl.load(tables.num_tiles)
    reset(tables.pair_slots, num_pairs, size_pair_tables)
    reset(tables.pair_experts, num_pairs, size_pair_tables)
    reset(tables.tile_slots, num_tiles, size_tiles)
    reset(tables.tile_experts, num_tiles, size_tiles)
    if layout.WITH_BASE:
        reset(tables.base_experts, tl.load(tables.num_base_tiles), size_base_tiles)
