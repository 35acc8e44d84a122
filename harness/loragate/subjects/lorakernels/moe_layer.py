"""The project's own MoE layer. All ranks of a group run in this process, one after the other, and
their outputs are added up, as a collective does. With dual streams each rank has the one after it
as its shared experts, which run beside it and are added as well."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, reduce
from itertools import product
from typing import Any

import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.inputs.base_experts import laid_out
from loragate.inputs.draw import torch_dtype
from loragate.inputs.expert_places import experts_of_ranks
from loragate.matrix.case import (
    Activation,
    Case,
    GateUp,
    Placement,
    RouterWeights,
    Sharding,
    Sharing,
    Streams,
)
from loragate.protocol import BaseExperts, Pool, Routes
from loragate.subjects.lorakernels.dead_ranks import spoil_dead_ranks
from loragate.subjects.lorakernels.mapping import Mapping, in_dims
from loragate.subjects.lorakernels.moe_delta import expert_factors
from lorakernels.common.quantised import Quantised, quantise_rows
from lorakernels.layers import gate_up
from lorakernels.layers.expert_packing import GATE_UP
from lorakernels.layers.expert_placement import ExpertPlacement
from lorakernels.layers.moe import GATED, FusedMoELoRA, MoEScratch
from lorakernels.layers.moe_partition import MoERank
from lorakernels.layers.partition import LoRASharding
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.layer import ops as moe
from lorakernels.moe.layer.forms import MoEForm
from lorakernels.moe.weights import ExpertFactors
from lorakernels.runtime.collectives import SimulatedRanks

_PLAIN = GATED[1:]
_ROUTER = {
    RouterWeights.OUTPUT: moe.RouterWeight.ON_OUTPUT,
    RouterWeights.INPUT: moe.RouterWeight.ON_INPUT,
}
_ORDER = {
    GateUp.HALVES: gate_up.GateUp.HALVES,
    GateUp.INTERLEAVED: gate_up.GateUp.INTERLEAVED,
}
_ACTIVATION = {
    Activation.SILU: moe.Activation.SILU_GATED,
    Activation.GELU_TANH: moe.Activation.GELU_TANH_GATED,
    Activation.SWIGLU_OAI: moe.Activation.SWIGLU_OAI,
}


class MoELayer(Mapping):
    def __init__(self, case: Case, machine: Machine, base: BaseExperts) -> None:
        super().__init__(case, machine)
        self.case = case
        self.projections = GATED if len(case.slices) == 2 else _PLAIN
        self.is_quantised = base.scales is not None
        self.input_dims = case.input_dims
        self.is_dual = case.streams is Streams.DUAL
        # the ranks that share experts, which exchange what adapters leave that are cut by rank
        self.groups = [SimulatedRanks(case.tp) for _ in range(case.ep)]
        self.ranks = [
            self._rank(case, base, MoERank(case.ep, ep, case.tp, tp))
            for ep, tp in product(range(case.ep), range(case.tp))
        ]
        # ranks that run one after the other share buffers, and tables of equally many experts
        pairs, scratch = cache(partial(self._pairs, case, machine)), self._scratch(case)
        self.buffers = [
            (self._pairs(case, machine, layer.cut.experts.size), self._scratch(case))
            if self.is_dual
            else (pairs(layer.cut.experts.size), scratch)
            for layer in self.ranks
        ]

    def _pairs(self, case: Case, machine: Machine, experts: int) -> PairMetadata:
        return PairMetadata(
            max_tokens=case.max_tokens,
            top_k=case.top_k,
            num_experts=experts,
            max_slots=case.slots,
            device=machine.device,
            with_base=True,
        )

    def _scratch(self, case: Case) -> MoEScratch:
        return MoEScratch(self.ranks, max_tokens=case.max_tokens, top_k=case.top_k)

    def _rank(self, case: Case, base: BaseExperts, place: MoERank) -> FusedMoELoRA:
        w13: Tensor | Quantised = base.weight
        w2: Tensor | Quantised = base.down
        if base.scales is not None:
            w13 = Quantised(base.weight, base.scales[0])
            w2 = Quantised(base.down, base.scales[1])
        gated = len(self.projections) == 3
        sharded: dict[str, Any] = {}
        if case.sharding is Sharding.RANK:
            group = self.groups[place.ep_rank].rank(place.tp_rank)
            sharded = {"sharding": LoRASharding.RANK, "collective": group}
        return FusedMoELoRA(
            w13,
            w2,
            gate_up=_ORDER[case.gate_up] if gated else None,
            w13_bias=base.bias,
            w2_bias=base.down_bias,
            activation=_ACTIVATION[case.activation] if gated else None,
            num_slots=case.slots,
            rank=case.rank,
            dtype=torch_dtype(case.dtype),
            projections=self.projections,
            shared_outer=case.sharing is Sharing.SHARED_OUTER,
            router_weight=_ROUTER[case.router],
            place=place,
            placement=_placement(case),
            padded_intermediate=-(-case.slices[0] // case.tp) * case.tp,
            **sharded,
        )

    def load(self, slot: int, pool: Pool) -> None:
        assert pool.down is not None
        factors = [*expert_factors(pool, slot), *expert_factors(pool.down, slot)]
        names = [f"experts.{projection}" for projection in self.projections]
        if self.case.gate_up is GateUp.INTERLEAVED:
            both = _one_module(self.case, *factors[:2])
            if both is not None:
                names, factors = [f"experts.{GATE_UP}", names[2]], [both, factors[2]]
        parts = dict(zip(names, factors, strict=True))
        for layer in self.ranks:
            layer.load_adapter(slot, parts)
            # a layer with a part of the ranks computes as many as another one has live
            if self.case.sharding is Sharding.BASE:
                spoil_dead_ranks(layer.w13_slots, slot, pool)
                spoil_dead_ranks(layer.w2_slots, slot, pool.down)

    def unload(self, slot: int) -> None:
        for layer in self.ranks:
            layer.unload(slot)

    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        quantised_x = quantise_rows(x) if self.is_quantised else None
        x = in_dims(x, self.input_dims)
        if self.is_dual:
            return self._from(0, routes, quantised_x, x).view(out.shape)
        calls = [
            partial(self._part, rank, x, routes, quantised_x) for rank in range(len(self.ranks))
        ]
        tp = self.case.tp
        parts = [
            part
            for number, group in enumerate(self.groups)
            for part in group.run(calls[number * tp : (number + 1) * tp])
        ]
        # from the last rank on, as layers add up that run beside each other: rounded sums of more
        # than two parts depend on their order
        return reduce(torch.add, reversed(parts)).view(out.shape)

    def _from(self, first: int, routes: Routes, quantised_x: Quantised | None, x: Tensor) -> Tensor:
        """The sum over the ranks from one on, each of them beside the one before it."""
        more = first + 1 < len(self.ranks)
        others = partial(self._from, first + 1, routes, quantised_x) if more else None
        return self._part(first, x, routes, quantised_x, others, MoEForm.DUAL)

    def _part(
        self,
        index: int,
        x: Tensor,
        routes: Routes,
        quantised_x: Quantised | None,
        shared: Callable[[Tensor], Tensor] | None = None,
        form: MoEForm | None = None,
    ) -> Tensor:
        assert routes.weights is not None
        pairs, scratch = self.buffers[index]
        result: Tensor = self.ranks[index](
            x,
            routes.topk_ids,
            routes.weights,
            self.metadata,
            pairs,
            scratch,
            quantised_x=quantised_x,
            shared=shared,
            form=form,
        )
        return result


def _placement(case: Case) -> ExpertPlacement | None:
    if case.placement is Placement.RUNS:
        return None
    if case.placement is Placement.ROUND_ROBIN:
        return ExpertPlacement.round_robin(case.experts, case.ep)
    return ExpertPlacement(case.experts, tuple(map(tuple, experts_of_ranks(case))))


def _one_module(
    case: Case, gate: ExpertFactors | None, up: ExpertFactors | None
) -> ExpertFactors | None:
    """Gate and up as an adapter of a model with one module for both has them; None where an oracle
    has changed one of the two alone."""
    if gate is None or up is None or gate.b.shape != up.b.shape or not torch.equal(gate.a, up.a):
        return None
    return ExpertFactors(gate.a, laid_out(case, torch.cat([gate.b, up.b], dim=1)), gate.scale)
