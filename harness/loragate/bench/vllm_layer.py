"""vLLM's MoE layer without adapters, for who times it: what LoRA is added to there.

Invariant: a layer that cannot be called alone gives a sentence, never an exception.

On a GPU alone: it calls compiled operators for alignment, activation and the sum of the choices.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.subjects.vllm.package import headline, importing

_MODULE = "vllm.model_executor.layers.fused_moe.fused_moe"
# x, w13, w2, weights and ids of the choices to [tokens, hidden] in new memory
FusedExperts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@cache
def load_fused_experts(machine: Machine) -> FusedExperts | str:
    """The layer, alignment included, or a sentence that says why there is none."""
    if machine.interpreted:
        return "its MoE layer calls operators that exist for CUDA alone"
    try:
        with importing(False):
            module: Any = importlib.import_module(_MODULE)
        experts = cast(FusedExperts, module.fused_experts)
        # a layer that wants more of its server around it says so at the first call
        experts(*_any_step(machine.device))
        return experts
    except Exception as error:
        return f"its MoE layer cannot be called alone: {headline(error)}"


def _any_step(device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, hidden, intermediate, num_experts, top_k = 4, 256, 128, 8, 2

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16, device=device)

    x, w2 = zeros(tokens, hidden), zeros(num_experts, hidden, intermediate)
    ids = torch.arange(tokens * top_k, dtype=torch.int32, device=device).view(tokens, top_k)
    weights = torch.ones(tokens, top_k, device=device)
    return x, zeros(num_experts, 2 * intermediate, hidden), w2, weights, ids
