"""The deltas of the plug-in, by the methods of its wrapper that vLLM's layers call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from loragate.inputs.draw import torch_dtype
from loragate.matrix.case import Case, RouterWeights, Sharing, Write
from loragate.protocol import Pool, Routes
from loragate.subjects.vllm.layer_package import VllmLayers
from loragate.subjects.vllm.package import fold_scale
from lorakernels.common.slice_stacks import pack


class _Delta:
    """Packed adapters of one layer, and a wrapper that serves nothing else."""

    def __init__(self, layers: VllmLayers, case: Case, device: str) -> None:
        config = SimpleNamespace(
            max_loras=case.slots, max_lora_rank=case.rank, specialize_active_lora=False
        )
        # the oracles give even a case without tokens steps with one token
        self._rows = max(case.max_tokens, 1)
        self._mapping, self._slots = layers.mapping, case.slots
        self.wrapper = layers.wrapper(self._rows, self._rows, device, lora_config=config)
        experts = max(case.experts, 1)
        sharing = case.sharing
        of_a = 1 if sharing is Sharing.SHARED_A else experts
        of_b = 1 if sharing is Sharing.SHARED_B else experts
        dtype = torch_dtype(case.dtype)

        def stack(*shape: int) -> Tensor:
            return torch.zeros(case.slots, *shape, dtype=dtype, device=device)

        self.a, self.b = pack(
            [stack(of_a, case.rank, case.in_features) for _ in case.slices],
            [stack(of_b, width, case.rank) for width in case.slices],
        )
        self._case, self._experts = case, experts

    def load(self, slot: int, pool: Pool) -> None:
        self.unload(slot)
        parts = zip(pool.ranks[slot], pool.scales[slot], self.a, self.b, strict=True)
        for index, (rank, scale, a, b) in enumerate(parts):
            a[slot, :, :rank].copy_(pool.a[slot, ..., index, :rank, :])
            b[slot, :, :, :rank].copy_(fold_scale(pool.b[index][slot, ..., :rank], scale))

    def unload(self, slot: int) -> None:
        for weight in (*self.a, *self.b):
            weight[slot] = 0

    def prepare(self, token_slots: Tensor) -> None:
        # ids of adapters start at 1
        ids = tuple(slot + 1 for slot in token_slots.tolist())
        resident = [slot + 1 for slot in range(self._slots)]
        mapping = self._mapping(ids, ids, is_prefill=True)
        self.wrapper.update_metadata(mapping, resident, self._slots + 1, 1)


class LinearDelta(_Delta):
    """Site dense_delta."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        self.wrapper.add_lora_linear(out, x, self.a, self.b, 1.0, self._case.slices)
        return out


class MoEDelta(_Delta):
    """Site moe_delta: w13 without router weights, w2 with them."""

    def __init__(self, layers: VllmLayers, case: Case, device: str) -> None:
        super().__init__(layers, case, device)
        self.wrapper.reserve_experts(top_k=case.top_k, num_experts=case.experts)

    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        a, b = (self._expanded(factors) for factors in (self.a, self.b))
        adds = self._case.write is Write.ADD
        if self._case.router is RouterWeights.OUTPUT:
            experts = self.wrapper.experts_of(self._case.top_k, a)
            experts.prepare(routes.topk_ids, self.wrapper.token_step.row_slots)
            self._add_w2(out, x, a, b, routes, adds)
        else:
            self._add_w13(out, x, a, b, routes, adds)
        return out

    def _add_w13(self, out: Tensor, x: Tensor, a: Any, b: Any, routes: Routes, adds: bool) -> None:
        tokens, k = routes.topk_ids.shape
        case, wrapper = self._case, self.wrapper
        wrapper.add_lora_w13(
            *(out.view(tokens, k, out.shape[1]), x, a, b, routes.topk_ids, routes.weights, None),
            *(None, None, tokens, k, case.slots, None, case.experts, k, len(case.slices)),
            *(False, False),
            add_inputs=adds,
        )

    def _add_w2(self, out: Tensor, x: Tensor, a: Any, b: Any, routes: Routes, adds: bool) -> None:
        tokens, k = routes.topk_ids.shape
        self.wrapper.add_lora_w2(
            *(out.view(tokens, k, out.shape[1]), x, a, b, routes.weights, None, None, None, None),
            *(tokens, None, None, k, self._case.slots, None, k, False, 0, False),
            add_inputs=adds,
        )

    def _expanded(self, factors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Shared factors as vLLM passes them on."""
        return tuple(factor.expand(-1, self._experts, -1, -1) for factor in factors)
