"""vLLM's MoE layer without adapters, the base that its LoRA is added to.

Invariant: a layer that cannot be called alone gives a reason as a sentence, never an exception.

It needs a GPU: it calls compiled operators for alignment, activation and the sum over experts.
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
# (x, w13, w2, router weights, expert ids) -> new tensor [tokens, hidden]
FusedExperts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@cache
def load_fused_experts(machine: Machine) -> FusedExperts | str:
    """The layer, alignment included, or the reason, as a sentence, why there is none."""
    if machine.interpreted:
        return "its MoE layer calls operators that exist for CUDA only"
    try:
        with importing(False):
            module: Any = importlib.import_module(_MODULE)
        experts = cast(FusedExperts, module.fused_experts)
        # a layer that needs more of its server raises at the first call
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
