"""Triton kernels that sort the pairs of a batch by (expert, slot) where a program cannot hold a
counter of each bucket.

The key of a pair is its bucket, as bucket_of numbers it, and beyond all buckets where it has none.
Two stable passes sort the keys, first by slot and then by expert, so that no table has an entry for
each bucket. In sorted order the pairs of a bucket and those of an expert are adjacent: tiles follow
from where these begin.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lorakernels.moe.align.kernels.arguments import Sizes
from lorakernels.moe.align.kernels.buckets import bucket_of, reset_before_tiles
from lorakernels.moe.align.kernels.sorted_pairs import leading_pairs


@triton.jit(
    do_not_specialize=[
        "num_pairs",
        "num_ids",
        "num_experts",
        "max_slots",
        "size_pair_tables",
        "size_tiles",
        "size_tile_pairs",
        "size_base_tiles",
        "size_base_pairs",
    ]
)
def key_pairs_kernel(
    routes,
    tables,
    keys_ptr,
    order_ptr,
    num_pairs,
    num_ids,
    num_experts,
    max_slots,
    size_pair_tables,
    size_tiles,
    size_tile_pairs,
    size_base_tiles,
    size_base_pairs,
    layout: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    # one program writes the keys of SPAN pairs, and resets a part of the tables
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    sizes = Sizes(num_pairs, num_ids, num_experts, max_slots)
    pair = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    live = pair < num_pairs
    bucket, expert, slot = bucket_of(routes, sizes, pair, layout)
    key = tl.where(bucket >= 0, bucket, num_experts * layout.SLOT_BINS)
    tl.store(keys_ptr + pair, key, mask=live)
    tl.store(order_ptr + pair, pair, mask=live)
    # a pair without expert has no slot either, so that a reader of one table needs no other
    tl.store(tables.pair_slots + pair, tl.where(expert >= 0, slot, -1), mask=live)
    tl.store(tables.pair_experts + pair, expert, mask=live)
    reset_before_tiles(
        tables,
        num_pairs,
        size_pair_tables,
        size_tiles,
        size_tile_pairs,
        size_base_tiles,
        size_base_pairs,
        layout,
    )


@triton.jit(do_not_specialize=["num_pairs"])
def count_digits_kernel(
    keys_ptr,
    counts_ptr,
    num_pairs,
    DIVISOR: tl.constexpr,
    BINS: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    # one program counts the digits of SPAN keys; a digit is key // DIVISOR % BINS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    place = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    live = place < num_pairs
    digit = tl.load(keys_ptr + place, mask=live, other=0) // DIVISOR % BINS
    counts = tl.histogram(digit, BINS, mask=live)
    tl.store(counts_ptr + tl.program_id(0) * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["num_pairs", "num_spans"])
def move_digits_kernel(
    keys_ptr,
    order_ptr,
    new_keys_ptr,
    new_order_ptr,
    counts_ptr,
    num_pairs,
    num_spans,
    DIVISOR: tl.constexpr,
    BINS: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    # one program moves SPAN keys behind all keys of lower digits and all earlier ones of their own
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    span = tl.program_id(0)
    lanes = tl.arange(0, SPAN)
    place = span * SPAN + lanes
    live = place < num_pairs
    key = tl.load(keys_ptr + place, mask=live, other=0)
    digit = key // DIVISOR % BINS
    totals = tl.load(counts_ptr + num_spans * BINS + tl.arange(0, BINS))
    new_place = tl.gather(tl.cumsum(totals, axis=0) - totals, digit, axis=0)
    new_place += tl.load(counts_ptr + span * BINS + digit)
    for first in tl.static_range(0, SPAN, CHUNK):
        other = first + tl.arange(0, CHUNK)
        others = tl.load(keys_ptr + span * SPAN + other, mask=span * SPAN + other < num_pairs)
        same = digit[:, None] == (others // DIVISOR % BINS)[None, :]
        earlier = same & (other[None, :] < lanes[:, None])
        new_place += tl.sum(earlier.to(tl.int32), axis=1)
    tl.store(new_keys_ptr + new_place, key, mask=live)
    tl.store(new_order_ptr + new_place, tl.load(order_ptr + place, mask=live), mask=live)


@triton.jit
def _first_place(keys_ptr, key, place, live, steps):
    """The first place whose sorted key is not below `key`; it is not behind `place`."""
    low = place * 0
    high = place
    for _ in range(steps):
        middle = (low + high) // 2
        is_below = tl.load(keys_ptr + middle, mask=live, other=0) < key
        low = tl.where(is_below, middle + 1, low)
        high = tl.where(is_below, high, middle)
    return low


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "steps"])
def count_tiles_kernel(
    keys_ptr,
    ranks_ptr,
    base_ranks_ptr,
    counts_ptr,
    num_pairs,
    num_experts,
    steps,
    layout: tl.constexpr,
    HEIGHT: tl.constexpr,
    BASE_HEIGHT: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    # one program finds the ranks of SPAN sorted pairs in their bucket and in their expert, and
    # counts the tiles that begin with them: counts [spans, 2], of adapters and of the base
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    place = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    live = place < num_pairs
    key = tl.load(keys_ptr + place, mask=live, other=0)
    rank = place - _first_place(keys_ptr, key, place, live, steps)
    base_rank = rank
    if layout.WITH_BASE:
        of_expert = key // layout.SLOT_BINS * layout.SLOT_BINS
        base_rank = place - _first_place(keys_ptr, of_expert, place, live, steps)
        tl.store(base_ranks_ptr + place, base_rank, mask=live)
    tl.store(ranks_ptr + place, rank, mask=live)
    _, _, leads, base_leads = leading_pairs(
        key, rank, base_rank, live, num_experts, layout, HEIGHT, BASE_HEIGHT
    )
    cell = counts_ptr + tl.program_id(0) * 2
    tl.store(cell, tl.sum(leads.to(tl.int32), axis=0))
    tl.store(cell + 1, tl.sum(base_leads.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "num_spans"])
def write_tiles_kernel(
    tables,
    keys_ptr,
    order_ptr,
    ranks_ptr,
    base_ranks_ptr,
    counts_ptr,
    num_pairs,
    num_experts,
    num_spans,
    layout: tl.constexpr,
    HEIGHT: tl.constexpr,
    BASE_HEIGHT: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    # one program writes SPAN sorted pairs into their tiles. The tile of a pair is the last one that
    # began before it
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    span = tl.program_id(0)
    place = span * SPAN + tl.arange(0, SPAN)
    live = place < num_pairs
    key = tl.load(keys_ptr + place, mask=live, other=0)
    pair = tl.load(order_ptr + place, mask=live, other=-1)
    rank = tl.load(ranks_ptr + place, mask=live, other=0)
    base_rank = rank
    if layout.WITH_BASE:
        base_rank = tl.load(base_ranks_ptr + place, mask=live, other=0)
    is_keyed, routed, leads, base_leads = leading_pairs(
        key, rank, base_rank, live, num_experts, layout, HEIGHT, BASE_HEIGHT
    )
    expert = key // layout.SLOT_BINS
    tile = tl.load(counts_ptr + span * 2) + tl.cumsum(leads.to(tl.int32), axis=0) - 1
    tl.store(tables.tile_pairs + tile * HEIGHT + rank % HEIGHT, pair, mask=routed)
    tl.store(tables.tile_slots + tile, key % layout.SLOT_BINS - layout.WITH_BASE, mask=leads)
    tl.store(tables.tile_experts + tile, expert, mask=leads)
    if span == 0:
        tl.store(tables.num_tiles, tl.load(counts_ptr + num_spans * 2))
    if layout.WITH_BASE:
        tile = tl.load(counts_ptr + span * 2 + 1)
        tile += tl.cumsum(base_leads.to(tl.int32), axis=0) - 1
        tl.store(
            tables.base_pairs + tile * BASE_HEIGHT + base_rank % BASE_HEIGHT, pair, mask=is_keyed
        )
        tl.store(tables.base_experts + tile, expert, mask=base_leads)
        if span == 0:
            tl.store(tables.num_base_tiles, tl.load(counts_ptr + num_spans * 2 + 1))
