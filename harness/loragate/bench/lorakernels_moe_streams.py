"""The MoE layer of lorakernels as `bench streams` times it: in a given form, or in the one that its
plan takes with the switch on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from loragate.bench.lorakernels_streams import switched_on
from loragate.core.machine import Machine
from loragate.matrix.case import Case
from loragate.protocol import Pool, Routes
from loragate.subjects.lorakernels.moe_delta import expert_factors
from lorakernels.batch.metadata import BatchMetadata
from lorakernels.layers.gate_up import GateUp
from lorakernels.layers.moe import GATED, FusedMoELoRA, MoEScratch
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.layer.forms import MoEForm, plan_form
from lorakernels.runtime.options import dual_stream
from lorakernels.runtime.tuning import tuning_of

Shared = Callable[[Tensor], Tensor] | None


class MoELayer:
    """A layer with adapters in all slots, for steps of at most as many rows as `case` has, which
    is the delta of w13. Each call aligns the token-expert pairs first."""

    def __init__(
        self, w13: Tensor, w2: Tensor, case: Case, pools: tuple[Pool, Pool], machine: Machine
    ) -> None:
        self._layer = FusedMoELoRA(
            w13, w2, gate_up=GateUp.HALVES, num_slots=case.slots, rank=case.rank
        )
        for slot in range(case.slots):
            factors = [part for pool in pools for part in expert_factors(pool, slot)]
            names = [f"experts.{name}" for name in GATED]
            self._layer.load_adapter(slot, dict(zip(names, factors, strict=True)))
        self._rows = BatchMetadata(
            max_tokens=case.tokens, max_slots=case.slots, device=machine.device
        )
        self._pairs = PairMetadata(
            max_tokens=case.tokens,
            top_k=case.top_k,
            num_experts=case.experts,
            max_slots=case.slots,
            device=machine.device,
            with_base=True,
        )
        self._scratch = MoEScratch([self._layer], max_tokens=case.tokens, top_k=case.top_k)
        self._device = torch.device(machine.device)

    def prepare(self, token_slots: Tensor) -> None:
        """Once a step; token_slots int32 [tokens] on the CPU."""
        self._rows.prepare(token_slots)

    def run(self, x: Tensor, routes: Routes, shared: Shared, form: str) -> Tensor:
        """In a form as streams_rows.py names it."""
        return self._forward(x, routes, shared, MoEForm[form.upper()])

    def run_planned(self, x: Tensor, routes: Routes, shared: Shared) -> Tensor:
        with switched_on():
            return self._forward(x, routes, shared, None)

    def planned(self, num_pairs: int) -> str:
        """The form that `run_planned` takes for a step."""
        with switched_on():
            is_on = dual_stream(self._device)
        return plan_form(num_pairs, tuning_of(self._device), dual_stream=is_on).name.lower()

    def _forward(self, x: Tensor, routes: Routes, shared: Shared, form: MoEForm | None) -> Tensor:
        assert routes.weights is not None, "a layer weighs its experts"
        out: Tensor = self._layer(
            x,
            routes.topk_ids,
            routes.weights,
            self._rows,
            self._pairs,
            self._scratch,
            shared=shared,
            form=form,
        )
        return out
