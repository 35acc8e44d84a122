"""Places of the pairs of a small batch, found by comparing all of them with each other: without a
counter for each bucket, so that the time depends on the number of pairs alone."""

import triton
import triton.language as tl

from lorakernels.moe.align.kernels.buckets import bucket_of


@triton.jit
def find_leaders(
    routes,
    sizes,
    layout: tl.constexpr,
    HEIGHT: tl.constexpr,
    BASE_HEIGHT: tl.constexpr,
    PAIRS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Bucket and expert of each of PAIRS pairs, and whether it is the first one of a tile, and of a
    base tile. The number of tiles is that of their first pairs."""
    pair = tl.arange(0, PAIRS)
    bucket, expert, slot = bucket_of(routes, sizes, pair, layout)
    rank = tl.zeros([PAIRS], dtype=tl.int32)
    base_rank = tl.zeros([PAIRS], dtype=tl.int32)
    # CHUNK at a time, so that the comparison fits into registers
    for first in tl.static_range(0, PAIRS, CHUNK):
        other = first + tl.arange(0, CHUNK)
        buckets, experts, _ = bucket_of(routes, sizes, other, layout)
        same = bucket[:, None] == buckets[None, :]
        earlier = same & (other[None, :] < pair[:, None])
        rank += tl.sum(earlier.to(tl.int32), axis=1)
        if layout.WITH_BASE:
            # pairs of an expert are ordered by slot, and so by bucket
            lower = (expert[:, None] == experts[None, :]) & (buckets[None, :] < bucket[:, None])
            base_rank += tl.sum((lower | earlier).to(tl.int32), axis=1)
    counted = bucket >= 0
    leads = counted & (slot >= 0) & (rank % HEIGHT == 0)
    base_leads = counted & (base_rank % BASE_HEIGHT == 0)
    return bucket, expert, leads, base_leads


@triton.jit
def count_where(here):
    """How many of all pairs, the columns, are counted for each row."""
    return tl.sum(here.to(tl.int32), axis=1)
