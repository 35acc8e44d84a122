"""Triton kernel that sorts the pairs of a small batch by (expert, slot) within one program: without
a counter for each bucket, so that the time depends on the number of pairs alone."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lorakernels.moe.align.kernels.arguments import Sizes
from lorakernels.moe.align.kernels.buckets import bucket_of, fill
from lorakernels.moe.align.kernels.sorted_pairs import cut_into_tiles, sort_key


@triton.jit
def _reset(table_ptr, reachable, size):
    """-1 everywhere. The first program resets what it may write later, the others the rest."""
    reachable = tl.minimum(reachable, size)
    program = tl.program_id(0)
    if program == 0:
        fill(table_ptr, 0, reachable, 0, 1)
    else:
        fill(table_ptr, reachable, size, program - 1, tl.num_programs(0) - 1)


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
def sort_at_once_kernel(
    routes,
    tables,
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
    HEIGHT: tl.constexpr,
    BASE_HEIGHT: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    # the first program sorts and places all pairs, of which there are PAIRS at most; the others
    # only reset what lies behind. A batch has no more tiles than pairs
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    _reset(tables.pair_slots, num_pairs, size_pair_tables)
    _reset(tables.pair_experts, num_pairs, size_pair_tables)
    _reset(tables.tile_slots, num_pairs, size_tiles)
    _reset(tables.tile_experts, num_pairs, size_tiles)
    _reset(tables.tile_pairs, num_pairs * HEIGHT, size_tile_pairs)
    if layout.WITH_BASE:
        _reset(tables.base_experts, num_pairs, size_base_tiles)
        _reset(tables.base_pairs, num_pairs * BASE_HEIGHT, size_base_pairs)
    if tl.program_id(0) > 0:
        return

    sizes = Sizes(num_pairs, num_ids, num_experts, max_slots)
    lane = tl.arange(0, PAIRS)
    bucket, expert, slot = bucket_of(routes, sizes, lane, layout)
    ordered = tl.sort(sort_key(bucket, lane, num_experts, layout, PAIRS))
    # what follows writes where this program has reset
    tl.debug_barrier()
    tl.store(tables.pair_slots + lane, tl.where(expert >= 0, slot, -1), mask=lane < num_pairs)
    tl.store(tables.pair_experts + lane, expert, mask=lane < num_pairs)
    cut_into_tiles(tables, ordered, num_pairs, num_experts, layout, HEIGHT, BASE_HEIGHT, PAIRS)
