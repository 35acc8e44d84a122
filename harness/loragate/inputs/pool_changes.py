"""Adapters that follow from others: copies, cut ones, other orders and scales."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from loragate.protocol import Pool

# elements of all factors
_SMALL = 1 << 20


def factors_of(pool: Pool) -> tuple[Tensor, ...]:
    """All A and B, of both products where there are two."""
    return (pool.a, *pool.b, *(() if pool.down is None else factors_of(pool.down)))


def is_small(pool: Pool) -> bool:
    """Whether copies of it, and loading it again and again, take no time to speak of. What a
    subject keeps of adapters on the host is no different where they are larger."""
    return sum(factor.numel() for factor in factors_of(pool)) <= _SMALL


def copied(pool: Pool) -> Pool:
    """The same adapters in memory of their own."""
    down = None if pool.down is None else copied(pool.down)
    return replace(pool, a=pool.a.clone(), b=tuple(b.clone() for b in pool.b), down=down)


def trimmed(pool: Pool, max_rank: int) -> Pool:
    """The same adapters cut to their first `max_rank` ranks; the rest is dead and zero."""
    ranks = tuple(tuple(min(rank, max_rank) for rank in row) for row in pool.ranks)
    cut = replace(pool, a=pool.a.clone(), b=tuple(b.clone() for b in pool.b), ranks=ranks)
    cut = replace(cut, down=None if pool.down is None else trimmed(pool.down, max_rank))
    return fill_dead(cut, 0.0)


def without_slice(pool: Pool, part: int) -> Pool:
    """The same adapters without slice `part`."""
    ranks = tuple((*row[:part], 0, *row[part + 1 :]) for row in pool.ranks)
    cut = replace(pool, a=pool.a.clone(), b=tuple(b.clone() for b in pool.b), ranks=ranks)
    return fill_dead(cut, 0.0)


def with_zero_scales(pool: Pool) -> Pool:
    """The same adapters with scales of zero: no delta."""
    zeros = tuple((0.0,) * len(row) for row in pool.scales)
    down = None if pool.down is None else with_zero_scales(pool.down)
    return replace(pool, scales=zeros, down=down)


def with_doubled_scales_of(other: Pool, pool: Pool) -> Pool:
    """The adapters of `pool`, each with twice the scale of the one of `other` in its slot."""
    scales = tuple(tuple(2 * scale for scale in row) for row in other.scales)
    down = pool.down and other.down and with_doubled_scales_of(other.down, pool.down)
    return replace(pool, scales=scales, down=down)


def reordered(pool: Pool, order: list[int]) -> Pool:
    """Slot `i` of the result holds what slot `order[i]` held."""
    return Pool(
        pool.a[order],
        tuple(b[order] for b in pool.b),
        tuple(pool.ranks[slot] for slot in order),
        tuple(pool.scales[slot] for slot in order),
        None if pool.down is None else reordered(pool.down, order),
    )


def reordered_experts(pool: Pool, order: list[int]) -> Pool:
    """Expert `i` of the result is what expert `order[i]` was; shared factors stay."""
    a = pool.a if pool.a.shape[1] == 1 else pool.a[:, order]
    b = tuple(b if b.shape[1] == 1 else b[:, order] for b in pool.b)
    down = None if pool.down is None else reordered_experts(pool.down, order)
    return replace(pool, a=a, b=b, down=down)


def with_huge_unused(pool: Pool, used: Tensor) -> Pool:
    """The same adapters with the largest value of the dtype wherever no row uses them, so that a
    delta of it is Inf. Not NaN, which a loader may refuse. `used` bool [slots, experts], with one
    expert where the site has none. A shared factor is used if any expert of its slot is."""
    a, b = pool.a.clone(), tuple(part.clone() for part in pool.b)
    huge = torch.finfo(a.dtype).max
    for slot, row in enumerate(pool.ranks):
        for part, rank in enumerate(row):
            live = a[slot][..., part, :rank, :], b[part][slot][..., :rank]
            for factor in live:
                experts = factor if factor.dim() == 3 else factor[None]
                mine = used[slot] if len(experts) > 1 else used[slot].any(0, keepdim=True)
                # ids and no mask, for which the host would wait for the device
                experts[(~mine).nonzero().flatten().to(a.device)] = huge
    return replace(
        pool, a=a, b=b, down=None if pool.down is None else with_huge_unused(pool.down, used)
    )


def fill_dead(pool: Pool, value: float) -> Pool:
    for slot, row in enumerate(pool.ranks):
        for part, rank in enumerate(row):
            if rank < pool.a.shape[-2]:
                pool.a[slot][..., part, rank:, :] = value
                pool.b[part][slot][..., rank:] = value
    if pool.down is not None:
        fill_dead(pool.down, value)
    return pool
