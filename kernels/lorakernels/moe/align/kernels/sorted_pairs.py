"""What the kernels that sort pairs share: the keys of pairs that one program holds, and how sorted
pairs are cut into tiles."""

import triton
import triton.language as tl


@triton.jit
def sort_key(bucket, pair, num_experts, layout: tl.constexpr, PAIRS: tl.constexpr):
    """Keys of up to PAIRS pairs, no two of them equal: pairs without a bucket come last, and those
    of one bucket by their numbers."""
    bucket = tl.where(bucket >= 0, bucket, num_experts * layout.SLOT_BINS)
    return bucket * PAIRS + pair


@triton.jit
def leading_pairs(
    key, rank, base_rank, live, num_experts, layout: tl.constexpr, HEIGHT, BASE_HEIGHT
):
    """Which pairs have an expert, which a slot as well, which are the first of a tile, and which of
    a base tile."""
    is_keyed = live & (key < num_experts * layout.SLOT_BINS)
    routed = is_keyed & (key % layout.SLOT_BINS >= layout.WITH_BASE)
    leads = routed & (rank % HEIGHT == 0)
    return is_keyed, routed, leads, is_keyed & (base_rank % BASE_HEIGHT == 0)


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
