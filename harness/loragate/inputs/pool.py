"""The adapters of a case.

SIGNED: A ~ N(0, 1/in_features), B of either sign and bounded away from zero, so that a delta
is about as large as its scale. The last column of A is heavy: a lost K tail then shows at any
width, and no delta of a low rank comes near zero by accident. Of an embedding a single column of A
is read: there A is like B. Every (slot, slice) has its own values and its own scale of either sign,
which is never 1 (peft #2489: alpha == r hides a lost scale), and so has every expert, unless
experts share a factor, or gate and up a module (case.gate_up).

EXACT: see exactness.py, and exact_layer.py for moe_layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.inputs.draw import DataKind, Draw, number, torch_dtype
from loragate.inputs.exact_layer import exact_layer_b
from loragate.inputs.exactness import exact_a, exact_b, exact_scale, sign_of_scale
from loragate.inputs.mapping import live_ranks
from loragate.inputs.pool_changes import fill_dead
from loragate.matrix.case import MOE_SITES, Case, GateUp, RouterWeights, Sharing, Site
from loragate.protocol import Capabilities, Pool

# [slots][slices]
T = TypeVar("T")
Table: TypeAlias = tuple[tuple[T, ...], ...]

_LOW_RANK = 3
_MOST_COPIED = 1 << 28
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class Dead(StrEnum):
    """The content of the ranks that an adapter does not use."""

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

    Without `rank_per_slice` all slices of a slot have the same rank and scale.
    """
    per_slice = capabilities.rank_per_slice
    if case.site is Site.MOE_LAYER:
        pool = _layer_pool(case, seed, kind, machine, per_slice=per_slice)
    else:
        draw = Draw(machine, seed, f"pool-{kind}")
        ranks = live_ranks(case, seed, per_slice=per_slice)
        scales = _scales(case, seed, kind, per_slice=per_slice)
        pool = _draw_pool(case, draw, kind, ranks, scales)
    return fill_dead(_laid_out(pool, seed), float("nan") if dead is Dead.NAN else 0.0)


def _laid_out(pool: Pool, seed: int) -> Pool:
    """The same adapters; whether A, and whether B, are views of transposed tensors depends on the
    seed. A loader must not rely on contiguous factors."""
    layout = number(seed, "factors")
    a = _transposed(pool.a) if layout & 1 else pool.a
    b = tuple(_transposed(part) for part in pool.b) if layout & 2 else pool.b
    return replace(pool, a=a, b=b, down=None if pool.down is None else _laid_out(pool.down, seed))


def _transposed(factor: Tensor) -> Tensor:
    # a copy of the largest ones would not fit beside them
    return factor.mT.contiguous().mT if factor.numel() < _MOST_COPIED else factor


def _layer_pool(
    case: Case, seed: int, kind: DataKind, machine: Machine, *, per_slice: bool
) -> Pool:
    """Gate and up, and a pool of down beside them: one table of ranks and scales for all three."""
    # gate and up of one module are one slice for both tables, so that no rank of it is lost
    modules = case.slices[:1] if case.gate_up is GateUp.INTERLEAVED else case.slices
    of_all = replace(case, slices=(*modules, *case.out_slices), router=RouterWeights.NONE)
    ranks = live_ranks(of_all, seed, per_slice=per_slice)
    scales = _scales(of_all, seed, kind, per_slice=per_slice)
    if case.gate_up is GateUp.INTERLEAVED:
        ranks, scales = _alike(ranks), _alike(scales)
    shared = case.sharing is Sharing.SHARED_OUTER
    up = replace(case, sharing=Sharing.SHARED_A if shared else Sharing.PER_EXPERT)
    down = replace(
        case,
        in_features=case.slices[0],
        slices=case.out_slices,
        sharing=Sharing.SHARED_B if shared else Sharing.PER_EXPERT,
    )
    count = len(case.slices)
    halves = [
        _draw_pool(
            half,
            Draw(machine, seed, f"{purpose}-{kind}"),
            kind,
            tuple(row[columns] for row in ranks),
            tuple(row[columns] for row in scales),
            is_down=half is down,
        )
        for half, purpose, columns in (
            (up, "pool", slice(count)),
            (down, "pool-down", slice(count, None)),
        )
    ]
    if case.gate_up is GateUp.INTERLEAVED:
        a = halves[0].a
        a[:, :, 1] = a[:, :, 0]
    return replace(halves[0], down=halves[1])


def _alike(table: Table[T]) -> Table[T]:
    """Gate and up have one module, the first of a row: what it has, both have."""
    return tuple((row[0], *row) for row in table)


def _draw_pool(
    case: Case,
    draw: Draw,
    kind: DataKind,
    ranks: Table[int],
    scales: Table[float],
    *,
    is_down: bool = False,
) -> Pool:
    of_a, of_b = _expert_axis(case, Sharing.SHARED_A), _expert_axis(case, Sharing.SHARED_B)
    if kind is not DataKind.EXACT:
        a, b = _signed_a(draw, case, of_a, ranks), _signed_b(draw, case, of_b, ranks)
    else:
        a = exact_a(draw, case, of_a)
        if case.site is Site.MOE_LAYER:
            b = exact_layer_b(draw, case, of_b, ranks, scales, is_down=is_down)
        else:
            b = exact_b(draw, case, of_b, ranks)
    return Pool(a, b, ranks, scales)


def _expert_axis(case: Case, shared: Sharing) -> tuple[int, ...]:
    if case.site not in MOE_SITES:
        return ()
    return (1 if case.sharing is shared else case.experts,)


def _scales(case: Case, seed: int, kind: DataKind, *, per_slice: bool) -> Table[float]:
    return tuple(
        tuple(_scale(case, seed, kind, slot, part * per_slice) for part in range(len(case.slices)))
        for slot in range(case.slots)
    )


def _scale(case: Case, seed: int, kind: DataKind, slot: int, part: int) -> float:
    start = number(seed, "scales") % 97
    if kind is DataKind.EXACT:
        # neighbouring slots differ, and so do neighbouring slices, for any number of slices
        return exact_scale(start + slot + part, case.router)
    index = start + slot * len(case.slices) + part
    # low-discrepancy: no two scales of a pool are close; 1.0 is outside of both halves
    spread = index * _GOLDEN_RATIO % 1
    value = 0.5 + 0.8 * spread if spread < 0.5 else 1.1 + 1.2 * (spread - 0.5)
    value *= sign_of_scale(start + slot + part)
    return torch.tensor(value, dtype=torch.float32).item()


def _signed_a(draw: Draw, case: Case, experts: tuple[int, ...], ranks: Table[int]) -> Tensor:
    shape, width = (case.slots, *experts, len(case.slices), case.rank), case.in_features
    dtype = torch_dtype(case.dtype)
    if case.site is Site.EMBEDDING:
        return _bounded(draw, (*shape, width), dtype, [1.0] * case.slots)
    a = draw.normal(*shape, width, dtype=dtype, then=lambda values: values.div_(math.sqrt(width)))
    a[..., -1] = draw.signs(*shape)
    for slot, row in enumerate(ranks):
        for part, rank in enumerate(row):
            if rank <= _LOW_RANK:
                a[slot][..., part, :, -1] *= 4
    return a


def _signed_b(
    draw: Draw, case: Case, experts: tuple[int, ...], ranks: Table[int]
) -> tuple[Tensor, ...]:
    parts = []
    for part, width in enumerate(case.slices):
        shape = (case.slots, *experts, width, case.rank)
        divisors = [math.sqrt(max(row[part], 1)) for row in ranks]
        parts.append(_bounded(draw, shape, torch_dtype(case.dtype), divisors))
    return tuple(parts)


def _bounded(
    draw: Draw, shape: tuple[int, ...], dtype: torch.dtype, divisors: Sequence[float]
) -> Tensor:
    """[slots, ...] of either sign, from 0.5 to 1.5 in size, divided by the divisor of its slot."""
    values = draw.signs(*shape, dtype=dtype)
    flat, size = values.view(-1), values[0].numel()
    for place, sizes in draw.uniform_pieces(0.5, 1.5, values.numel()):
        # signs are exact in any dtype: the result is rounded once
        sizes *= flat[place]
        for slot in range(place.start // size, -(-place.stop // size)):
            first, last = slot * size - place.start, (slot + 1) * size - place.start
            sizes[max(first, 0) : last] /= divisors[slot]
        flat[place] = sizes
    return values
