"""The types of a MoE layer: activations, router weights, quantised operands, buffers, adapters."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import ClassVar

import torch
from torch import Tensor

from lorakernels.common.quantised import Quantised
from lorakernels.moe.delta.ops import MoEWorkspace
from lorakernels.moe.weights import ExpertWeights
from lorakernels.runtime.device import keep_address


class Formula(StrEnum):
    """The table of activations. The kernel compares with these names."""

    # silu(gate) * up
    SILU = "silu"
    # gelu(gate) * up, in its approximation by tanh
    GELU_TANH = "gelu_tanh"
    # (min(max(up, -limit), limit) + 1) * g * sigmoid(alpha * g), with g = min(gate, limit)
    SWIGLU_OAI = "swiglu_oai"


@dataclass(frozen=True, slots=True)
class Activation:
    """The activation between the two products, of gate and up. Without a gate the formula is
    applied to up itself. `alpha` and `limit` are those of SWIGLU_OAI; no other formula reads
    them. Raises ValueError."""

    formula: Formula
    is_gated: bool = True
    alpha: float = 0.0
    limit: float = 0.0

    SILU: ClassVar[Activation]
    SILU_GATED: ClassVar[Activation]
    # Gemma
    GELU_TANH_GATED: ClassVar[Activation]
    # GPT-OSS
    SWIGLU_OAI: ClassVar[Activation]

    def __post_init__(self) -> None:
        if self.formula is not Formula.SWIGLU_OAI:
            return
        if not self.is_gated:
            raise ValueError(f"{self.formula} must have a gate")
        for name, value in (("alpha", self.alpha), ("limit", self.limit)):
            if not 0 < value < float("inf"):
                raise ValueError(
                    f"{name} of {self.formula} must be positive and finite (got {value})"
                )


Activation.SILU = Activation(Formula.SILU, is_gated=False)
Activation.SILU_GATED = Activation(Formula.SILU)
Activation.GELU_TANH_GATED = Activation(Formula.GELU_TANH)
Activation.SWIGLU_OAI = Activation(Formula.SWIGLU_OAI, alpha=1.702, limit=7.0)


class RouterWeight(Enum):
    """Where a token's router weights are applied. On the input of the first product, which then has
    no bias, is the same as on its result, before the activation."""

    ON_OUTPUT = auto()
    ON_INPUT = auto()


class ExpertBuffers:
    """The intermediate results of a layer: allocated once, shared by layers that run one after the
    other. act [pairs, I] and y [pairs, H] for up to max_tokens * top_k pairs."""

    def __init__(
        self,
        *,
        max_tokens: int,
        top_k: int,
        hidden: int,
        intermediate: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        pairs = max_tokens * top_k
        self.act = keep_address(torch.empty(pairs, intermediate, dtype=dtype, device=device))
        self.y = keep_address(torch.empty(pairs, hidden, dtype=dtype, device=device))


@dataclass(frozen=True, slots=True)
class ExpertLoRA:
    """The adapters of a layer. `workspace` fits both products, which run one after the other.
    `group`: of adapters that are sharded by rank, the number of the ranks that share the experts;
    -1 of others."""

    w13: ExpertWeights
    w2: ExpertWeights
    workspace: MoEWorkspace
    group: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOperands:
    """The arguments of `run_experts` but for the prepared pairs and the adapters; see there.
    act and y are those of the buffers."""

    x: Tensor
    w13: Tensor | Quantised
    w2: Tensor | Quantised
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    quantised_x: Quantised | None
    router_weights: Tensor
    act: Tensor
    y: Tensor
    out: Tensor
    activation: Activation
    router_weight: RouterWeight
