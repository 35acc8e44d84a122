"""The MoE layer of lorakernels as it is timed: with adapters and without."""

from __future__ import annotations

import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.inputs.draw import torch_dtype
from loragate.inputs.mapping import BASE_ROW
from loragate.matrix.case import Case
from loragate.protocol import Pool, Routes
from loragate.subjects.lorakernels.moe_delta import expert_factors, expert_weights
from lorakernels.batch.metadata import BatchMetadata
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.delta.ops import MoEWorkspace
from lorakernels.moe.layer.ops import ExpertBuffers, ExpertLoRA, run_experts


class ExpertsLayer:
    """Sum over the experts of a token of w * (silu(gate) * up) @ W2.T, where [gate, up] is
    x @ W13.T. `cases` are the deltas of w13 and w2 for the largest step.

    Each call aligns the token-expert pairs first. Without adapters they are aligned for a single
    slot that no row uses.
    """

    def __init__(self, w13: Tensor, w2: Tensor, cases: tuple[Case, Case], machine: Machine) -> None:
        self._w13, self._w2 = w13, w2
        self._rows, self._pairs = _metadata(cases[0], cases[0].slots, machine)
        self._base_rows, self._base_pairs = _metadata(cases[0], 1, machine)
        first, second = (expert_weights(case, machine) for case in cases)
        tokens, top_k = cases[0].tokens, cases[0].top_k
        workspace = MoEWorkspace([first, second], max_tokens=tokens, top_k=top_k)
        self._lora = ExpertLoRA(first, second, workspace)
        self._buffers = ExpertBuffers(
            max_tokens=tokens,
            top_k=top_k,
            hidden=w2.shape[1],
            intermediate=w2.shape[2],
            dtype=torch_dtype(cases[0].dtype),
            device=machine.device,
        )

    def load(self, pools: tuple[Pool, Pool]) -> None:
        """Adapters for every slot of w13 and of w2."""
        for weights, pool in zip((self._lora.w13, self._lora.w2), pools, strict=True):
            for slot in range(pool.num_slots):
                weights.load(slot, expert_factors(pool, slot))

    def prepare(self, token_slots: Tensor) -> None:
        """Once a step; token_slots int32 [tokens] on the CPU."""
        self._rows.prepare(token_slots)
        self._base_rows.prepare(torch.full_like(token_slots, BASE_ROW))

    def with_adapters(self, x: Tensor, routes: Routes, out: Tensor) -> Tensor:
        return self._run(x, routes, out, self._rows, self._pairs, self._lora)

    def without(self, x: Tensor, routes: Routes, out: Tensor) -> Tensor:
        return self._run(x, routes, out, self._base_rows, self._base_pairs, None)

    def _run(
        self,
        x: Tensor,
        routes: Routes,
        out: Tensor,
        rows: BatchMetadata,
        pairs: PairMetadata,
        lora: ExpertLoRA | None,
    ) -> Tensor:
        assert routes.weights is not None, "a layer weighs its experts"
        pairs.prepare(routes.topk_ids, rows)
        run_experts(x, self._w13, self._w2, routes.weights, pairs, self._buffers, out, lora=lora)
        return out


def _metadata(case: Case, slots: int, machine: Machine) -> tuple[BatchMetadata, PairMetadata]:
    rows = BatchMetadata(max_tokens=case.tokens, max_slots=slots, device=machine.device)
    pairs = PairMetadata(
        max_tokens=case.tokens,
        top_k=case.top_k,
        num_experts=case.experts,
        max_slots=slots,
        device=machine.device,
        with_base=True,
    )
    return rows, pairs
