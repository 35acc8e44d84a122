"""LoRA in plain torch: the shortest complete subject, and a start for one of your own.

It supports every dtype and rank, and shows what the harness expects of an instance: adapters are
copied when they are loaded, the mapping when it is prepared, `dense_delta` adds in place, and all
ranks of a tensor-parallel layer are simulated in this process.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from loragate.core.machine import Machine
from loragate.matrix.case import (
    OPERATIONS,
    Activation,
    Bias,
    Case,
    Dtype,
    Execution,
    GateUp,
    Parallel,
    Placement,
    Quantisation,
    Site,
    Write,
)
from loragate.protocol import (
    AnyInstance,
    BaseExperts,
    BaseLayer,
    Capabilities,
    Others,
    Pool,
    Routes,
)
from loragate.subjects.torch.embedding import Embedding
from loragate.subjects.torch.gdn import DeltaNetInput
from loragate.subjects.torch.moe_layer import MoELayer

# far above every rank of the matrix: this implementation has no limit
MAX_RANK = 1 << 16


class TorchSubject:
    name = "torch"

    def version(self) -> str:
        return torch.__version__

    def capabilities(self, machine: Machine) -> Capabilities | str:
        return Capabilities(
            sites=OPERATIONS,
            supports={
                "dtype": frozenset(Dtype),
                # indexing by a mapping on the host cannot be replayed with another mapping
                "execution": frozenset({Execution.EAGER}),
                "rank": range(1, MAX_RANK + 1),
                "parallel": frozenset(Parallel),
                "quantisation": frozenset(Quantisation),
                "activation": frozenset(Activation),
                "gate_up": frozenset(GateUp),
                "placement": frozenset(Placement),
                "expert_bias": frozenset(Bias),
            },
            skips_dead_ranks=True,
            rank_per_slice=True,
            # other adapters change the shapes of the products
            batch_invariant=frozenset({Others.VALUES}),
        )

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> AnyInstance:
        if isinstance(base, BaseExperts):
            return MoELayer(case, base)
        if case.site is Site.MOE_DELTA:
            return MoEDelta(case)
        if base is None:
            return DenseDelta(case)
        if case.site is Site.EMBEDDING:
            return Embedding(case, base)
        if case.site is Site.GDN_IN_PROJ:
            return DeltaNetInput(case, base, [DenseDelta(case) for _ in range(case.tp)])
        return LoRALinear(case, base)


class DenseDelta:
    """out += scale * (x @ A.T) @ B.T, for each slot and slice in turn."""

    def __init__(self, case: Case) -> None:
        # slot -> for each slice (a, b, scale), live ranks only
        self.slots: dict[int, list[tuple[Tensor, Tensor, float]]] = {}
        self.token_slots = torch.empty(0, dtype=torch.int32)

    def load(self, slot: int, pool: Pool) -> None:
        self.slots[slot] = [
            (pool.a[slot, part, :rank].clone(), b[slot, :, :rank].clone(), scale)
            for part, (b, rank, scale) in enumerate(
                zip(pool.b, pool.ranks[slot], pool.scales[slot], strict=True)
            )
        ]

    def unload(self, slot: int) -> None:
        self.slots.pop(slot, None)

    def prepare(self, token_slots: Tensor) -> None:
        self.token_slots = token_slots.clone()

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        for slot, factors in self.slots.items():
            rows = (self.token_slots == slot).nonzero().flatten().to(x.device)
            column = 0
            for a, b, scale in factors:
                columns = slice(column, column + b.shape[0])
                shrunk = x[rows].float() @ a.float().T
                out[rows, columns] += (scale * shrunk @ b.float().T).to(out.dtype)
                column = columns.stop
        return out


class MoEDelta:
    """out[pair] += weight * scale * (x @ A.T) @ B.T, for each slot, expert and slice in turn."""

    def __init__(self, case: Case) -> None:
        self.case = case
        # slot -> for each slice (a, b, scale), live ranks only
        self.slots: dict[int, list[tuple[Tensor, Tensor, float]]] = {}
        self.token_slots = torch.empty(0, dtype=torch.int32)

    def load(self, slot: int, pool: Pool) -> None:
        # a factor that all experts share has a single expert
        self.slots[slot] = [
            (pool.a[slot, :, part, :rank].clone(), b[slot, :, :, :rank].clone(), scale)
            for part, (b, rank, scale) in enumerate(
                zip(pool.b, pool.ranks[slot], pool.scales[slot], strict=True)
            )
        ]

    def unload(self, slot: int) -> None:
        self.slots.pop(slot, None)

    def prepare(self, token_slots: Tensor) -> None:
        self.token_slots = token_slots.clone()

    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        top_k = routes.topk_ids.shape[1]
        slots = self.token_slots.to(x.device).repeat_interleave(top_k)
        experts = self.local_experts(routes)
        for slot, factors in self.slots.items():
            for expert in range(self.case.experts):
                pairs = ((slots == slot) & (experts == expert)).nonzero().flatten()
                if not len(pairs):
                    continue
                # w2 has a row of x for each pair, w13 one for each token
                rows = x[pairs if len(x) == len(out) else pairs // top_k].float()
                if routes.weights is not None:
                    rows = rows * routes.weights.view(-1)[pairs, None]
                self.add(rows, pairs, out, factors, expert)
        return out

    def local_experts(self, routes: Routes) -> Tensor:
        """[pairs]: the expert of each pair, negative where it is not here."""
        ids = routes.topk_ids.flatten().long()
        if routes.expert_map is None:
            return ids
        return torch.where(ids < 0, ids, routes.expert_map[ids.clamp(min=0)].long())

    def add(
        self,
        rows: Tensor,
        pairs: Tensor,
        out: Tensor,
        factors: list[tuple[Tensor, Tensor, float]],
        expert: int,
    ) -> None:
        column = 0
        for all_a, all_b, scale in factors:
            a, b = (f[min(expert, len(f) - 1)].float() for f in (all_a, all_b))
            columns = slice(column, column + len(b))
            column = columns.stop
            # a slice without an adapter keeps what is there, a negative zero as well
            if not len(a):
                continue
            delta = (scale * rows @ a.T @ b.T).to(out.dtype)
            if self.case.write is Write.ADD:
                out[pairs, columns] += delta
            else:
                out[pairs, columns] = delta


@dataclass(frozen=True, slots=True)
class Shard:
    """What one tensor-parallel rank owns of a layer."""

    features: slice
    columns: Tensor
    bias: Tensor | None
    delta: DenseDelta


class LoRALinear:
    """The base layer and its adapters, cut over `case.tp` simulated ranks."""

    def __init__(self, case: Case, base: BaseLayer) -> None:
        self.case, self.weight = case, base.weight
        self.shards = [self._shard(rank, base) for rank in range(case.tp)]

    def _shard(self, rank: int, base: BaseLayer) -> Shard:
        case, tp = self.case, self.case.tp
        column = torch.arange(case.out_features, device=base.weight.device)
        if case.parallel is Parallel.ROW:
            width = case.in_features // tp
            # every rank adds to the sum, so only one may add the bias
            bias = base.bias if rank == 0 else None
            return Shard(slice(rank * width, (rank + 1) * width), column, bias, DenseDelta(case))
        # each packed slice is cut by itself, not the packed whole
        parts = torch.split(column, list(case.slices))
        column = torch.cat([part.chunk(tp)[rank] for part in parts])
        bias = None if base.bias is None else base.bias[column]
        return Shard(slice(0, case.in_features), column, bias, DenseDelta(case))

    def load(self, slot: int, pool: Pool) -> None:
        for rank, shard in enumerate(self.shards):
            a, b = pool.a[..., shard.features], pool.b
            if self.case.parallel is not Parallel.ROW:
                b = tuple(part.chunk(self.case.tp, dim=1)[rank] for part in b)
            shard.delta.load(slot, Pool(a, b, pool.ranks, pool.scales))

    def unload(self, slot: int) -> None:
        for shard in self.shards:
            shard.delta.unload(slot)

    def prepare(self, token_slots: Tensor) -> None:
        for shard in self.shards:
            shard.delta.prepare(token_slots)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        result = x.new_zeros(x.shape[0], self.case.out_features)
        for shard in self.shards:
            local = x[:, shard.features]
            weight = self.weight[shard.columns, shard.features]
            y = shard.delta.apply(local, functional.linear(local, weight, shard.bias))
            result[:, shard.columns] += y
        return result
