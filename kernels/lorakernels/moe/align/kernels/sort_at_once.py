"""Triton kernel that sorts the pairs of a small batch by (expert, slot) within one program: without
a counter for each bucket, so that the time depends on the number of pairs alone."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lorakernels.moe.align.kernels.arguments import Sizes
from lorakernels.moe.align.kernels.buckets import bucket_of, fill
from lorakernels.moe.align.kernels.sort import leading_pairs


@triton.jit
def _maximum(left, right):
    return tl.maximum(left, right)


@triton.jit
def _rank(group, PAIRS: tl.constexpr):
    """How many pairs before each have its group; those of a group are adjacent."""
    lane = tl.arange(0, PAIRS)
    before = tl.gather(group, tl.maximum(lane - 1, 0), axis=0)
    first = tl.where((lane == 0) | (before != group), lane, 0)
    return lane - tl.associative_scan(first, 0, _maximum)


@triton.jit
def sort_key(bucket, pair, num_experts, layout: tl.constexpr, PAIRS: tl.constexpr):
    """Keys of up to PAIRS pairs, no two of them equal: pairs without a bucket come last, and those
    of one bucket by their numbers."""
    bucket = tl.where(bucket >= 0, bucket, num_experts * layout.SLOT_BINS)
    return bucket * PAIRS + pair


@triton.jit
def cut_into_tiles(
    tables,
    ordered,
    num_pairs,
    num_experts,
    layout: tl.constexpr,
    HEIGHT: tl.constexpr,
    BASE_HEIGHT: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Write the tables of tiles, which hold -1, from sorted keys."""
    lane = tl.arange(0, PAIRS)
    key = ordered // PAIRS
    pair = ordered % PAIRS
    rank = _rank(key, PAIRS)
    base_rank = rank
    if layout.WITH_BASE:
        base_rank = _rank(key // layout.SLOT_BINS, PAIRS)
    is_keyed, routed, leads, base_leads = leading_pairs(
        key, rank, base_rank, lane < num_pairs, num_experts, layout, HEIGHT, BASE_HEIGHT
    )
    tile = tl.cumsum(leads.to(tl.int32), axis=0) - 1
    tl.store(tables.tile_pairs + tile * HEIGHT + rank % HEIGHT, pair, mask=routed)
    tl.store(tables.tile_slots + tile, key % layout.SLOT_BINS - layout.WITH_BASE, mask=leads)
    tl.store(tables.tile_experts + tile, key // layout.SLOT_BINS, mask=leads)
    tl.store(tables.num_tiles, tl.sum(leads.to(tl.int32), axis=0))
    if layout.WITH_BASE:
        tile = tl.cumsum(base_leads.to(tl.int32), axis=0) - 1
        place = tile * BASE_HEIGHT + base_rank % BASE_HEIGHT
        tl.store(tables.base_pairs + place, pair, mask=is_keyed)
        tl.store(tables.base_experts + tile, key // layout.SLOT_BINS, mask=base_leads)
        tl.store(tables.num_base_tiles, tl.sum(base_leads.to(tl.int32), axis=0))


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
