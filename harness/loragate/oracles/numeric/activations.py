"""The activations of a whole MoE layer and their slopes, in any dtype.

Each is a product of a function of the gate and one of up; without a gate it is that of up alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from loragate.inputs.base_experts import SWIGLU_ALPHA, SWIGLU_LIMIT
from loragate.matrix.case import Activation

# a value may be beyond a limit by that much of it, and come back when its terms are rounded
_KINK = 2.0**-6


def activated(activation: Activation, gate: Tensor | None, up: Tensor) -> Tensor:
    """act of gate and up. SwiGLU of GPT-OSS has a gate."""
    if gate is None:
        return of_gate(activation, up)
    if activation is Activation.SWIGLU_OAI:
        up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
    return of_gate(activation, gate) * up


def slopes(activation: Activation, gate: Tensor | None, up: Tensor) -> tuple[Tensor | None, Tensor]:
    """The derivatives of act by gate and by up."""
    if gate is None:
        return None, _slope(activation, up)
    if activation is not Activation.SWIGLU_OAI:
        return _slope(activation, gate) * up, of_gate(activation, gate)
    live = _below(gate) * _slope(activation, gate.clamp(max=SWIGLU_LIMIT))
    by_up = _below(up) * _below(-up) * of_gate(activation, gate)
    return live * (up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1), by_up


def _below(values: Tensor) -> Tensor:
    return (values < SWIGLU_LIMIT * (1 + _KINK)).to(values.dtype)


def of_gate(activation: Activation, gate: Tensor) -> Tensor:
    """The factor of act that the gate gives, or up without a gate."""
    match activation:
        case Activation.SILU:
            return functional.silu(gate)
        case Activation.GELU_TANH:
            return functional.gelu(gate, approximate="tanh")
        case Activation.SWIGLU_OAI:
            gate = gate.clamp(max=SWIGLU_LIMIT)
            return gate * torch.sigmoid(SWIGLU_ALPHA * gate)


def _slope(activation: Activation, gate: Tensor) -> Tensor:
    """The derivative of x * sigmoid(f(x)), which all of them are."""
    if activation is Activation.GELU_TANH:
        root, cube = math.sqrt(8 / math.pi), 0.044715
        argument = root * (gate + cube * gate**3)
        inner = root * (1 + 3 * cube * gate**2)
    else:
        alpha = SWIGLU_ALPHA if activation is Activation.SWIGLU_OAI else 1.0
        argument, inner = alpha * gate, torch.full_like(gate, alpha)
    sigmoid = argument.sigmoid()
    return sigmoid * (1 + gate * inner * (1 - sigmoid))
