"""Triton kernels that sort the pairs of a batch by (expert, slot) without counting buckets,
where one program would sort them too slowly: the programs of a first launch compare a few pairs
each with all others, and one program of a second launch cuts the sorted pairs into tiles."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lorakernels.moe.align.kernels.arguments import Sizes
from lorakernels.moe.align.kernels.buckets import bucket_of, reset_before_tiles
from lorakernels.moe.align.kernels.sorted_pairs import cut_into_tiles, sort_key


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
def compare_pairs_kernel(
    routes,
    tables,
    ordered_ptr,
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
    PAIRS: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    # one program finds the places of SPAN pairs among the sorted ones, of which there are PAIRS at
    # most, and resets a part of the tables
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    sizes = Sizes(num_pairs, num_ids, num_experts, max_slots)
    pair = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    live = pair < num_pairs
    bucket, expert, slot = bucket_of(routes, sizes, pair, layout)
    key = sort_key(bucket, pair, num_experts, layout, PAIRS)
    other = tl.arange(0, PAIRS)
    buckets, _, _ = bucket_of(routes, sizes, other, layout)
    others = sort_key(buckets, other, num_experts, layout, PAIRS)
    place = tl.sum((others[None, :] < key[:, None]).to(tl.int32), axis=1)
    tl.store(ordered_ptr + place, key, mask=live)
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


@triton.jit(do_not_specialize=["num_pairs", "num_experts"])
def cut_pairs_kernel(
    tables,
    ordered_ptr,
    num_pairs,
    num_experts,
    layout: tl.constexpr,
    HEIGHT: tl.constexpr,
    BASE_HEIGHT: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lane = tl.arange(0, PAIRS)
    ordered = tl.load(ordered_ptr + lane, mask=lane < num_pairs, other=0)
    cut_into_tiles(tables, ordered, num_pairs, num_experts, layout, HEIGHT, BASE_HEIGHT, PAIRS)
