"""A whole MoE layer in plain torch, cut over simulated ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from loragate.inputs.base_experts import (
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    dequantised,
    in_halves,
    quantised,
)
from loragate.inputs.expert_places import experts_of_ranks, rank_of_pairs
from loragate.matrix.case import Activation, Case, Placement, RouterWeights
from loragate.protocol import BaseExperts, Pool, Routes


@dataclass(frozen=True, slots=True)
class Factors:
    """The live part of an adapter in one projection: a [experts or 1, rank, in], b [experts or 1,
    out, rank]."""

    a: Tensor
    b: Tensor
    scale: float

    def delta(self, rows: Tensor, expert: int) -> Tensor:
        a, b = (f[min(expert, len(f) - 1)].float() for f in (self.a, self.b))
        return self.scale * (rows.float() @ a.T) @ b.T


@dataclass(frozen=True, slots=True)
class Rank:
    """The share of one rank of a group: some experts, and some columns of gate and of up. `number`
    is its rank of expert parallelism."""

    number: int
    experts: Sequence[int]
    columns: slice


class MoELayer:
    """sum over the choices of w * (silu(gate) * up) @ w2.T, with a bias and a delta in each
    product; or with another activation."""

    def __init__(self, case: Case, base: BaseExperts) -> None:
        self.case = case
        self.is_quantised = base.scales is not None
        self.w13, self.w2 = base.weight, base.down
        if base.scales is not None:
            self.w13 = dequantised(self.w13, base.scales[0])
            self.w2 = dequantised(self.w2, base.scales[1])
        # gate above up, whatever their order is in the base layer
        self.w13 = in_halves(case, self.w13)
        self.b13 = None if base.bias is None else in_halves(case, base.bias)
        self.b2 = base.down_bias
        # slot -> gate and up, or up alone; and down
        self.slots: dict[int, tuple[list[Factors], Factors]] = {}
        self.token_slots = torch.empty(0, dtype=torch.int32)
        self.ranks = [
            Rank(number, experts, columns)
            for number, experts in enumerate(experts_of_ranks(case))
            for columns in cut(case.slices[0], case.tp)
        ]

    def load(self, slot: int, pool: Pool) -> None:
        assert pool.down is not None
        (down,) = factors(pool.down, slot)
        self.slots[slot] = (factors(pool, slot), down)

    def unload(self, slot: int) -> None:
        self.slots.pop(slot, None)

    def prepare(self, token_slots: Tensor) -> None:
        self.token_slots = token_slots.clone()

    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        total = torch.zeros(out.shape, dtype=x.dtype, device=x.device)
        for rank in self.ranks:
            total += self.partial(rank, x, routes).to(x.dtype)
        return total

    def partial(self, rank: Rank, x: Tensor, routes: Routes) -> Tensor:
        """fp32 [tokens, hidden]: the partial output of a rank."""
        assert routes.weights is not None
        out = torch.zeros(x.shape, device=x.device)
        ids, weights = routes.topk_ids.flatten(), routes.weights.flatten()
        if self.case.placement is Placement.REPLICATED:
            ids = self.chosen_here(rank, ids, routes.topk_ids.shape[1])
        for expert in sorted(set(rank.experts)):
            pairs = (ids == expert).nonzero().flatten()
            # the experts of a token are all different
            tokens = pairs // routes.topk_ids.shape[1]
            if len(pairs):
                out[tokens] += self.pairs(
                    rank, expert, x[tokens], tokens, weights[pairs, None]
                ).float()
        return out

    def chosen_here(self, rank: Rank, ids: Tensor, top_k: int) -> Tensor:
        """The ids of pairs, -1 where another rank has the replica that computes a pair."""
        rows = torch.arange(len(ids), device=ids.device) // top_k
        ranks = rank_of_pairs(self.case, ids.long().clamp(min=0), rows)
        return torch.where(ranks == rank.number, ids, -1)

    def pairs(self, rank: Rank, expert: int, x: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
        """[pairs of the expert, hidden] in the dtype of x; weights [pairs, 1]."""
        inner = self.first(rank, expert, x, tokens)
        if self.case.router is RouterWeights.INPUT:
            inner = inner * weights
        act = self.activated(inner).to(x.dtype)
        y = self.second(rank, expert, act, tokens)
        if self.case.router is RouterWeights.OUTPUT:
            y = y * weights
        return y.to(x.dtype)

    def first(self, rank: Rank, expert: int, x: Tensor, tokens: Tensor) -> Tensor:
        """fp32: gate and up of a rank, side by side."""
        # gate and up are cut separately
        count = len(self.case.slices)
        w13 = self.w13[expert].float().chunk(count)
        b13 = None if self.b13 is None else self.b13[expert].float().chunk(count)
        parts = []
        for part, weight in enumerate(w13):
            y = self.as_base_sees_it(x) @ weight[rank.columns].T
            if b13 is not None:
                y += b13[part][rank.columns]
            for slot, (up, _) in self.slots.items():
                own = self.of_slot(slot, tokens)
                y[own] += up[part].delta(x[own], expert)[:, rank.columns]
            parts.append(y)
        return torch.cat(parts, 1)

    def activated(self, inner: Tensor) -> Tensor:
        if len(self.case.slices) == 1:
            return functional.silu(inner)
        gate, up = inner.chunk(2, 1)
        if self.case.activation is Activation.GELU_TANH:
            return functional.gelu(gate, approximate="tanh") * up
        if self.case.activation is Activation.SWIGLU_OAI:
            gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
            return (up + 1) * gate * torch.sigmoid(SWIGLU_ALPHA * gate)
        return functional.silu(gate) * up

    def second(self, rank: Rank, expert: int, act: Tensor, tokens: Tensor) -> Tensor:
        """fp32 [pairs, hidden]"""
        y = self.as_base_sees_it(act) @ self.w2[expert][:, rank.columns].float().T
        # the sum over the ranks that share an expert must hold its bias once
        if self.b2 is not None and rank.columns.start == 0:
            y += self.b2[expert].float()
        for slot, (_, down) in self.slots.items():
            own = self.of_slot(slot, tokens)
            part = Factors(down.a[..., rank.columns], down.b, down.scale)
            y[own] += part.delta(act[own], expert)
        return y

    def of_slot(self, slot: int, tokens: Tensor) -> Tensor:
        return (self.token_slots.to(tokens.device)[tokens] == slot).nonzero().flatten()

    def as_base_sees_it(self, values: Tensor) -> Tensor:
        return dequantised(*quantised(values)) if self.is_quantised else values.float()


def factors(pool: Pool, slot: int) -> list[Factors]:
    """The factors of each slice; a slice that the adapter lacks has rank 0."""
    parts = zip(pool.b, pool.ranks[slot], pool.scales[slot], strict=True)
    return [
        Factors(pool.a[slot, :, part, :rank].clone(), b[slot, :, :, :rank].clone(), scale)
        for part, (b, rank, scale) in enumerate(parts)
    ]


def cut(size: int, count: int) -> list[slice]:
    """Slices as even as possible, the first ones larger."""
    share, rest = divmod(size, count)
    starts = [part * share + min(part, rest) for part in range(count + 1)]
    return [slice(*ends) for ends in pairwise(starts)]
