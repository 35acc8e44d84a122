"""What the adapters of a batch add: the products of each row with the factors of its slot and
expert, in a few batched matmuls whatever the number of slots. A trial asks for it dozens of times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loragate.inputs.pairs import OutRows
from loragate.oracles.numeric.grouped import GroupedRows
from loragate.protocol import Pool


def deltas(
    pool: Pool,
    x: Tensor,
    rows: OutRows,
    dtype: torch.dtype,
    *,
    squares: bool = False,
    smallest: float = 0.0,
) -> Tensor:
    """[rows, out_features] in `dtype`: weight * scale * (x @ A.T) @ B.T, zero for rows without
    a slot. `squares`: each term of the last product squared before it is added up, and none of
    x @ A.T counted as below `smallest`."""
    widths, column = widths_of(pool), 0
    delta = torch.zeros(len(rows.slots), sum(widths), dtype=dtype, device=x.device)
    # the slots are on the CPU: which rows have one is known without waiting for the device
    live = ((rows.slots >= 0) & (rows.slots < pool.num_slots)).nonzero().flatten()
    if not live.numel():
        return delta
    own = live.to(x.device)
    slots, grouped = _grouped(pool, rows, live, own)
    values = x[rows.x_rows[own]].to(dtype)
    weights = 1.0 if rows.weights is None else rows.weights[own].to(dtype)[:, None]
    for part, width in enumerate(widths):
        factors = _Factors(pool, part, dtype)
        shrunk = grouped.times_each(values, factors.a, factors.elements)
        factor = factors.scales[slots] * weights
        if squares:
            shrunk, factor = shrunk.square().clamp(min=smallest**2), factor**2
        b = factors.b_squared if squares else factors.b
        expanded = grouped.times_each(shrunk, b, factors.elements)
        delta[own, column : column + width] = factor * expanded
        column += width
    return delta


def _grouped(pool: Pool, rows: OutRows, live: Tensor, own: Tensor) -> tuple[Tensor, GroupedRows]:
    """Of the rows `own`, which are `live` on the CPU: their slots on the device, and the rows by
    adapter, which is a slot and an expert."""
    experts, slots = _num_experts(pool), rows.slots[live].long()
    groups = slots if experts == 1 else slots * experts + rows.experts[own].cpu()
    return slots.to(own.device), GroupedRows(groups, pool.num_slots * experts, own.device)


class _Factors:
    """A slice of all adapters. `a`, `b` and `b_squared` give the factors of groups of
    `GroupedRows` in `dtype`, zero in the ranks that an adapter does not use. scales [slots, 1]."""

    def __init__(self, pool: Pool, part: int, dtype: torch.dtype) -> None:
        device = pool.a.device
        ranks = torch.tensor([row[part] for row in pool.ranks])
        most = int(ranks.max())
        self._a, self._b = pool.a[..., part, :most, :], pool.b[part][..., :most]
        self._dtype, self._num_experts = dtype, _num_experts(pool)
        self._dead = (torch.arange(most) >= ranks[:, None]).to(device)[:, None]
        scales = torch.tensor([row[part] for row in pool.scales], dtype=dtype)
        self.scales = scales.to(device)[:, None]
        self.elements = most * max(self._a.shape[-1], self._b.shape[-2])

    def a(self, groups: Tensor) -> Tensor:
        """[groups, rank, in_features]"""
        return self._of(self._a, groups).masked_fill_(self._dead_of(groups).mT, 0.0)

    def b(self, groups: Tensor) -> Tensor:
        """[groups, width, rank]"""
        return self._of(self._b, groups).masked_fill_(self._dead_of(groups), 0.0)

    def b_squared(self, groups: Tensor) -> Tensor:
        return self.b(groups).square_()

    def _of(self, factors: Tensor, groups: Tensor) -> Tensor:
        """A copy."""
        slots = groups // self._num_experts
        if factors.dim() == 3:
            return factors[slots].to(self._dtype)
        # experts may share one of the two factors
        experts = groups % self._num_experts if factors.shape[1] > 1 else 0
        return factors[slots, experts].to(self._dtype)

    def _dead_of(self, groups: Tensor) -> Tensor:
        """bool [groups, 1, rank]"""
        return self._dead[groups // self._num_experts]


def widths_of(pool: Pool) -> list[int]:
    """Of the slices."""
    return [b.shape[-2] for b in pool.b]


def _num_experts(pool: Pool) -> int:
    """1 where there are no experts, or where they share both factors."""
    return 1 if pool.a.dim() == 4 else max(pool.a.shape[1], pool.b[0].shape[1])
