"""The adapters of a case.

SIGNED: A ~ N(0, 1/in_features), B of either sign and bounded away from zero, so that a delta
is about as large as its scale. The last column of A is heavy: a lost K tail is then plain at
any width, and no delta of a low rank comes near zero by accident. Every (slot, slice) has
numbers of its own and a scale of its own, none of them 1 (peft #2489: alpha == r hides a lost
scale); every expert of it has numbers of its own, unless it shares them.

EXACT: see exactness.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from enum import StrEnum

import torch
from torch import Tensor

from loragate.inputs.draw import DataKind, Draw, number, torch_dtype
from loragate.inputs.exactness import exact_a, exact_b, exact_scale
from loragate.inputs.mapping import live_ranks
from loragate.machine import Machine
from loragate.matrix.case import MOE_SITES, Case, Sharing
from loragate.subjects.protocol import Capabilities, Pool

_LOW_RANK = 3
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class Dead(StrEnum):
    """What the ranks of a buffer hold that the adapter does not use."""

    ZERO = "zero"
    NAN = "nan"


def make_pool(
    case: Case,
    seed: int,
    kind: DataKind,
    machine: Machine,
    capabilities: Capabilities,
    *,
    dead: Dead = Dead.ZERO,
) -> Pool:
    """Adapters for every slot, on the machine's device, in the case's dtype.

    Without `rank_per_slice` all slices of a slot get one rank and one scale.
    """
    draw = Draw(machine, seed, f"pool-{kind}")
    ranks = live_ranks(case, seed, per_slice=capabilities.rank_per_slice)
    of_a, of_b = _expert_axis(case, Sharing.SHARED_A), _expert_axis(case, Sharing.SHARED_B)
    if kind is DataKind.EXACT:
        a = exact_a(draw, case, of_a)
        b = exact_b(draw, case, of_b, ranks)
    else:
        a = _signed_a(draw, case, of_a, ranks)
        b = _signed_b(draw, case, of_b, ranks)
    dtype = torch_dtype(case.dtype)
    per_slice = capabilities.rank_per_slice
    scales = tuple(
        tuple(_scale(case, seed, kind, slot, part * per_slice) for part in range(len(case.slices)))
        for slot in range(case.slots)
    )
    pool = Pool(a.to(dtype), tuple(part.to(dtype) for part in b), ranks, scales)
    return _fill_dead(pool, float("nan") if dead is Dead.NAN else 0.0)


def trimmed(pool: Pool, max_rank: int) -> Pool:
    """The same adapters cut to their first `max_rank` ranks; the rest is dead and zero."""
    ranks = tuple(tuple(min(rank, max_rank) for rank in row) for row in pool.ranks)
    cut = replace(pool, a=pool.a.clone(), b=tuple(b.clone() for b in pool.b), ranks=ranks)
    return _fill_dead(cut, 0.0)


def without_slice(pool: Pool, part: int) -> Pool:
    """The same adapters, none of which touches slice `part` any more."""
    ranks = tuple((*row[:part], 0, *row[part + 1 :]) for row in pool.ranks)
    cut = replace(pool, a=pool.a.clone(), b=tuple(b.clone() for b in pool.b), ranks=ranks)
    return _fill_dead(cut, 0.0)


def reordered(pool: Pool, order: list[int]) -> Pool:
    """Slot `i` of the result holds what slot `order[i]` held."""
    return Pool(
        pool.a[order],
        tuple(b[order] for b in pool.b),
        tuple(pool.ranks[slot] for slot in order),
        tuple(pool.scales[slot] for slot in order),
    )


def reordered_experts(pool: Pool, order: list[int]) -> Pool:
    """Expert `i` of the result is what expert `order[i]` was; shared factors stay."""
    a = pool.a if pool.a.shape[1] == 1 else pool.a[:, order]
    return replace(pool, a=a, b=tuple(b if b.shape[1] == 1 else b[:, order] for b in pool.b))


def with_huge_unused(pool: Pool, used: Tensor) -> Pool:
    """The live numbers of what no row uses replaced by the largest of the dtype: a delta of it
    is Inf. Not NaN: a loader may refuse that. `used` bool [slots, experts]; one expert where
    the site has none. A shared factor is used where any expert of its slot is."""
    a, b = pool.a.clone(), tuple(part.clone() for part in pool.b)
    huge = torch.finfo(a.dtype).max
    for slot, row in enumerate(pool.ranks):
        for part, rank in enumerate(row):
            live = a[slot][..., part, :rank, :], b[part][slot][..., :rank]
            for factor in live:
                experts = factor if factor.dim() == 3 else factor[None]
                mine = used[slot] if len(experts) > 1 else used[slot].any(0, keepdim=True)
                experts[~mine.to(a.device)] = huge
    return replace(pool, a=a, b=b)


def _expert_axis(case: Case, shared: Sharing) -> tuple[int, ...]:
    if case.site not in MOE_SITES:
        return ()
    return (1 if case.sharing is shared else case.experts,)


def _fill_dead(pool: Pool, value: float) -> Pool:
    for slot, row in enumerate(pool.ranks):
        for part, rank in enumerate(row):
            pool.a[slot][..., part, rank:, :] = value
            pool.b[part][slot][..., rank:] = value
    return pool


def _scale(case: Case, seed: int, kind: DataKind, slot: int, part: int) -> float:
    start = number(seed, "scales") % 97
    if kind is DataKind.EXACT:
        # neighbours differ among the slots and among the slices, however many slices there are
        return exact_scale(start + slot + part, case.router)
    index = start + slot * len(case.slices) + part
    # low-discrepancy: no two of a pool are close; 1.0 lies outside of both halves
    spread = index * _GOLDEN_RATIO % 1
    value = 0.5 + 0.8 * spread if spread < 0.5 else 1.1 + 1.2 * (spread - 0.5)
    return torch.tensor(value, dtype=torch.float32).item()


def _signed_a(
    draw: Draw, case: Case, experts: tuple[int, ...], ranks: tuple[tuple[int, ...], ...]
) -> Tensor:
    shape, width = (case.slots, *experts, len(case.slices), case.rank), case.in_features
    a = draw.normal(*shape, width) / math.sqrt(width)
    a[..., -1] = draw.signs(*shape)
    for slot, row in enumerate(ranks):
        for part, rank in enumerate(row):
            if rank <= _LOW_RANK:
                a[slot][..., part, :, -1] *= 4
    return a


def _signed_b(
    draw: Draw, case: Case, experts: tuple[int, ...], ranks: tuple[tuple[int, ...], ...]
) -> tuple[Tensor, ...]:
    parts = []
    for part, width in enumerate(case.slices):
        shape = (case.slots, *experts, width, case.rank)
        b = draw.signs(*shape) * draw.uniform(0.5, 1.5, *shape)
        for slot, row in enumerate(ranks):
            b[slot] /= math.sqrt(max(row[part], 1))
        parts.append(b)
    return tuple(parts)
