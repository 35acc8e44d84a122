"""Triton kernels that count the pairs of a large batch before they are placed: the buckets of
each span, then those of all spans before it, then the offsets of each bucket."""

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
        "size_tile_pairs",
        "size_base_pairs",
    ]
)
def count_pairs_kernel(
    routes,
    counts_ptr,
    tile_pairs_ptr,
    base_pairs_ptr,
    num_pairs,
    num_ids,
    num_experts,
    max_slots,
    size_tile_pairs,
    size_base_pairs,
    layout: tl.constexpr,
    NUM_BINS: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    # one program counts the buckets of SPAN pairs, and resets a part of the tables
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    sizes = Sizes(num_pairs, num_ids, num_experts, max_slots)
    pair = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    bucket, _, _ = bucket_of(routes, sizes, pair, layout)
    # not tl.histogram, which takes as long as there are buckets: 30 us for 1024 of them
    row = counts_ptr + tl.program_id(0) * NUM_BINS
    tl.store(row + tl.arange(0, NUM_BINS), tl.zeros([NUM_BINS], dtype=tl.int32))
    tl.debug_barrier()
    tl.atomic_add(row + bucket, 1, mask=bucket >= 0, sem="relaxed")
    reset(tile_pairs_ptr, 0, size_tile_pairs)
    if layout.WITH_BASE:
        reset(base_pairs_ptr, 0, size_base_pairs)


@triton.jit(do_not_specialize=["num_spans"])
def sum_counts_kernel(
    counts_ptr, num_spans, NUM_BINS: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr
):
    # counts [num_spans + 1, NUM_BINS]: the counts of each span become those of all spans before
    # it, in place; the last row gets the totals. One program sums BINS buckets
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
def find_offsets(
    total,
    layout: tl.constexpr,
    NUM_BINS: tl.constexpr,
    HEIGHT: tl.constexpr,
    BASE_HEIGHT: tl.constexpr,
):
    """From the pairs of each bucket: its first tile, the pairs of its expert in lower slots and the
    first base tile; and the numbers of tiles."""
    SLOT_BINS: tl.constexpr = layout.SLOT_BINS
    tiles = (total + HEIGHT - 1) // HEIGHT
    if layout.WITH_BASE:
        # base rows have no tile of an adapter
        tiles = tl.where(tl.arange(0, NUM_BINS) % SLOT_BINS == 0, 0, tiles)
    first_tile = tl.cumsum(tiles, axis=0) - tiles
    EXPERTS: tl.constexpr = NUM_BINS // SLOT_BINS
    by_slot = tl.reshape(total, [EXPERTS, SLOT_BINS])
    by_expert = tl.sum(by_slot, axis=1)
    base_tiles = (by_expert + BASE_HEIGHT - 1) // BASE_HEIGHT
    first_base = tl.cumsum(base_tiles, axis=0) - base_tiles
    lower = tl.reshape(tl.cumsum(by_slot, axis=1) - by_slot, [NUM_BINS])
    first = tl.reshape(tl.broadcast_to(first_base[:, None], [EXPERTS, SLOT_BINS]), [NUM_BINS])
    return first_tile, lower, first, tl.sum(tiles), tl.sum(base_tiles)


@triton.jit(do_not_specialize=["num_spans"])
def find_offsets_kernel(
    counts_ptr,
    num_tiles_ptr,
    num_base_tiles_ptr,
    num_spans,
    layout: tl.constexpr,
    NUM_BINS: tl.constexpr,
    HEIGHT: tl.constexpr,
    BASE_HEIGHT: tl.constexpr,
    PDL: tl.constexpr,
):
    # one program: the offsets of all buckets are stored after their totals in counts
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = counts_ptr + num_spans * NUM_BINS + tl.arange(0, NUM_BINS)
    first_tile, lower, first_base, num_tiles, num_base = find_offsets(
        tl.load(row), layout, NUM_BINS, HEIGHT, BASE_HEIGHT
    )
    tl.store(row + NUM_BINS, first_tile)
    tl.store(num_tiles_ptr, num_tiles)
    if layout.WITH_BASE:
        tl.store(row + 2 * NUM_BINS, lower)
        tl.store(row + 3 * NUM_BINS, first_base)
        tl.store(num_base_tiles_ptr, num_base)
