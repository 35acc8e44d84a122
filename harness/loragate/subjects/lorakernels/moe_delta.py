"""The project's own MoE kernels. Token-expert pairs are aligned in every call, so that a captured
graph contains the alignment, as in a server."""

from __future__ import annotations

from copy import copy
from types import MappingProxyType

from torch import Tensor

from loragate.core.machine import Machine
from loragate.inputs.draw import torch_dtype
from loragate.matrix.case import Case, Path, Sharing, Write
from loragate.protocol import Pool, Routes
from loragate.subjects.lorakernels.dead_ranks import spoil_dead_ranks
from loragate.subjects.lorakernels.mapping import Mapping
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.delta.ops import MoEPath, MoEWorkspace, moe_delta, shape_of_batch
from lorakernels.moe.delta.plan import plan_path
from lorakernels.moe.weights import ExpertFactors, ExpertWeights

_PATHS = MappingProxyType(
    {
        Path.PLAN: None,
        Path.TWO_KERNEL: MoEPath.TWO_KERNEL,
        Path.ONE_SHOT: MoEPath.ONE_SHOT,
        Path.SMALL_BATCH: MoEPath.SMALL_BATCH,
    }
)


class MoEDelta(Mapping):
    def __init__(self, case: Case, machine: Machine) -> None:
        super().__init__(case, machine)
        self.add_inputs, self.path = case.write is Write.ADD, _PATHS[case.path]
        max_tokens = case.max_tokens
        self.weights = expert_weights(case, machine)
        self.pairs = PairMetadata(
            max_tokens=max_tokens,
            top_k=case.top_k,
            num_experts=case.experts,
            max_slots=case.slots,
            device=machine.device,
        )
        self.workspace = MoEWorkspace([self.weights], max_tokens=max_tokens, top_k=case.top_k)

    def load(self, slot: int, pool: Pool) -> None:
        self.weights.load(slot, expert_factors(pool, slot))
        spoil_dead_ranks(self.weights, slot, pool)

    def unload(self, slot: int) -> None:
        self.weights.reset(slot)

    def on_path(self, path: Path) -> MoEDelta:
        """An instance on another path that shares weights, pairs and metadata with this one."""
        other = copy(self)
        other.path = _PATHS[path]
        return other

    def planned(self, tokens: int) -> Path:
        """The path that the plan takes for that many tokens."""
        shape = shape_of_batch(self.weights, tokens * self.pairs.top_k)
        chosen = plan_path(shape, None)
        return next(path for path, own in _PATHS.items() if own is chosen)

    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        self.assign(routes)
        return self.launch(x, out, routes, None)

    def assign(self, routes: Routes) -> None:
        """Sort the pairs of a step into the tables that every path reads."""
        self.pairs.prepare(routes.topk_ids, self.metadata, expert_map=routes.expert_map)

    def launch(self, x: Tensor, out: Tensor, routes: Routes, assignment: None) -> Tensor:
        """The delta of pairs that have been assigned."""
        moe_delta(
            x,
            self.weights,
            self.pairs,
            self.workspace,
            out,
            router_weights=routes.weights,
            add_inputs=self.add_inputs,
            path=self.path,
        )
        return out


def expert_weights(case: Case, machine: Machine) -> ExpertWeights:
    """Empty slots, sized for the case."""
    return ExpertWeights(
        num_slots=case.slots,
        num_experts=case.experts,
        slice_widths=case.slices,
        in_features=case.in_features,
        rank=case.rank,
        dtype=torch_dtype(case.dtype),
        device=machine.device,
        shared_a=case.sharing is Sharing.SHARED_A,
        shared_b=case.sharing is Sharing.SHARED_B,
    )


def expert_factors(pool: Pool, slot: int) -> list[ExpertFactors | None]:
    """The live part of an adapter, slice by slice; None for a slice that it lacks."""
    parts = zip(pool.b, pool.ranks[slot], pool.scales[slot], strict=True)
    return [
        ExpertFactors(pool.a[slot, :, part, :rank], b[slot, :, :, :rank], scale) if rank else None
        for part, (b, rank, scale) in enumerate(parts)
    ]
