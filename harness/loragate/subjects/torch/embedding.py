"""A vocabulary embedding in plain torch, with adapters whose A is looked up by token id. All
tensor-parallel ranks run in this process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loragate.matrix.case import Case
from loragate.protocol import BaseLayer, Pool


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds: the rows of the weight from `first` on, and slot -> (A, B, scale) with
    its columns of A."""

    first: int
    weight: Tensor
    slots: dict[int, tuple[Tensor, Tensor, float]]


class Embedding:
    """weight[id] + scale * B @ A[:, id], and zeros for an id that does not exist."""

    def __init__(self, case: Case, base: BaseLayer) -> None:
        # the last rank may hold less
        size = -(-case.in_features // case.tp)
        firsts = [rank * size for rank in range(case.tp)]
        self.shards = [Shard(first, base.weight[first : first + size], {}) for first in firsts]
        self.token_slots = torch.empty(0, dtype=torch.int32)

    def load(self, slot: int, pool: Pool) -> None:
        rank, scale = pool.ranks[slot][0], pool.scales[slot][0]
        b = pool.b[0][slot, :, :rank].clone()
        for shard in self.shards:
            columns = slice(shard.first, shard.first + len(shard.weight))
            shard.slots[slot] = (pool.a[slot, 0, :rank, columns].clone(), b, scale)

    def unload(self, slot: int) -> None:
        for shard in self.shards:
            shard.slots.pop(slot, None)

    def prepare(self, token_slots: Tensor) -> None:
        self.token_slots = token_slots.clone()

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        result = torch.zeros_like(out)
        for shard in self.shards:
            # ids of other ranks, and those of no row, add nothing here
            result += self.looked_up(shard, x[:, 0].long())
        return result

    def looked_up(self, shard: Shard, ids: Tensor) -> Tensor:
        """[tokens, width]: what one rank adds for each id."""
        local = ids - shard.first
        is_here = (local >= 0) & (local < len(shard.weight))
        local = local.where(is_here, 0)
        rows = shard.weight[local] if len(shard.weight) else shard.weight.new_zeros(len(ids), 1)
        rows = rows.where(is_here[:, None], 0)
        for slot, (a, b, scale) in shard.slots.items():
            own = is_here & (self.token_slots == slot).to(ids.device)
            columns = a[:, local[own]].float()
            rows[own] += (scale * columns.T @ b.float().T).to(rows.dtype)
        return rows
