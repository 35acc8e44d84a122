"""The types of a MoE layer: activation, router weights, quantised operands, buffers, adapters."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from lorakernels.common.quantised import Quantised
from lorakernels.moe.delta.ops import MoEWorkspace
from lorakernels.moe.weights import ExpertWeights
from lorakernels.runtime.device import keep_address


class Activation(Enum):
    """The activation between the two products."""

    # silu(gate) * up: w13 holds both halves, gate first
    SILU_GATED = auto()
    # silu(x): w13 is one projection
    SILU = auto()


class RouterWeight(Enum):
    """Where a token's router weights are applied. On the input of the first product, which has no
    bias, is the same as on its result, before the activation."""

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
    """The adapters of a layer. `workspace` fits both products, which run one after the other."""

    w13: ExpertWeights
    w2: ExpertWeights
    workspace: MoEWorkspace


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOperands:
    """The arguments of `run_experts` but for the prepared pairs and the adapters; see there.
    act and y are those of the buffers."""

    x: Tensor
    w13: Tensor | Quantised
    w2: Tensor | Quantised
    quantised_x: Quantised | None
    router_weights: Tensor
    act: Tensor
    y: Tensor
    out: Tensor
    activation: Activation
    router_weight: RouterWeight
