"""A whole MoE layer on prepared pairs: w13, activation, w2, sum over the choices of a token.

With adapters each product is preceded by the shrink of its input, and the expand is folded into
the product itself: the layer has two launches more than without, and no pass over its outputs.
All of it is one opaque operator that only gets tensors and sizes, as `dense_delta` is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.moe.align.launch import table_of
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.layer.check import check_experts
from lorakernels.moe.layer.launch import Adapters, product, sum_choices
from lorakernels.moe.layer.types import (
    Activation,
    ExpertBuffers,
    ExpertLoRA,
    Quantised,
    RouterWeight,
)
from lorakernels.runtime.device import supports_pdl

__all__ = [
    "Activation",
    "ExpertBuffers",
    "ExpertLoRA",
    "Quantised",
    "RouterWeight",
    "quantise_rows",
    "run_experts",
]


def run_experts(
    x: Tensor,
    w13: Tensor | Quantised,
    w2: Tensor | Quantised,
    router_weights: Tensor,
    pairs: PairMetadata,
    buffers: ExpertBuffers,
    out: Tensor,
    *,
    lora: ExpertLoRA | None = None,
    activation: Activation = Activation.SILU_GATED,
    router_weight: RouterWeight = RouterWeight.ON_OUTPUT,
    quantised_x: Quantised | None = None,
) -> None:
    """out[t] = sum over the choices p of t of w[p] * act(x[t] @ W13[e].T) @ W2[e].T, each product
    with the delta of the slot of t.

    x [rows, H] contiguous in the layer's dtype; the adapters always see it as it is, also where
        `quantised_x` replaces it for the base product (vllm #42120).
    w13 [E, 2 * I or I, H], w2 [E, H, I] contiguous. router_weights fp32 [rows, top_k].
    pairs: prepared, `with_base`. out [rows, H]. Choices without a local expert add nothing.
    Products accumulate in fp32, the activation included; act and y are rounded to the dtype.
    Deterministic. Raises ValueError.
    """
    check_experts(x, w13, w2, router_weights, pairs, buffers, out, activation, lora, quantised_x)
    if x.shape[0] == 0:
        return
    slots = () if lora is None else (lora.w13, lora.w2)
    torch.ops.lorakernels.run_experts(
        x,
        _flat(w13, w2),
        [] if quantised_x is None else _flat(quantised_x),
        router_weights,
        pairs.buffers,
        pairs.top_k,
        pairs.num_experts,
        pairs.max_slots,
        [tensor for w in slots for tensor in (w.a, w.b, w.ranks, w.scales)],
        None if lora is None else lora.workspace.shrunk,
        buffers.act,
        buffers.y,
        out,
        activation.value,
        router_weight is RouterWeight.ON_INPUT,
    )


def quantise_rows(x: Tensor) -> Quantised:
    """8-bit values with one scale a row, so that the largest of a row is just representable."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    # rows that no pair owns hold anything; NaN and Inf stay in their row
    scales = x.abs().amax(dim=1).float().clamp_min(1e-12) / largest
    return Quantised((x.float() / scales[:, None]).to(torch.float8_e4m3fn), scales)


@torch.library.custom_op("lorakernels::run_experts", mutates_args=("shrunk", "act", "y", "out"))
def _run_experts(
    x: Tensor,
    weights: list[Tensor],
    x_quantised: list[Tensor],
    router_weights: Tensor,
    buffers: list[Tensor],
    top_k: int,
    num_experts: int,
    max_slots: int,
    slots: list[Tensor],
    shrunk: Tensor | None,
    act: Tensor,
    y: Tensor,
    out: Tensor,
    activation: int,
    on_input: bool,
) -> None:
    sizes = {"top_k": top_k, "num_experts": num_experts, "max_slots": max_slots}
    pairs = table_of(buffers, num_rows=x.shape[0], with_base=True, **sizes)
    act, y = act[: pairs.num_pairs], y[: pairs.num_pairs]
    quantised_x = Quantised(*x_quantised) if x_quantised else None
    w13, w2 = weights if quantised_x is None else (Quantised(*weights[:2]), Quantised(*weights[2:]))
    first, second = _adapters(slots[:4], shrunk), _adapters(slots[4:], shrunk)
    pdl = supports_pdl(x.device)
    product(
        x if quantised_x is None else quantised_x,
        w13,
        act,
        pairs,
        lora_input=x,
        lora=first,
        activation=Activation(activation),
        router_weights=router_weights if on_input else None,
        pdl=pdl,
    )
    product(
        act if quantised_x is None else quantise_rows(act),
        w2,
        y,
        pairs,
        lora_input=act,
        lora=second,
        activation=None,
        router_weights=None if on_input else router_weights,
        pdl=pdl,
    )
    sum_choices(y, pairs, out, pdl=pdl)


def _adapters(slots: list[Tensor], shrunk: Tensor | None) -> Adapters | None:
    if shrunk is None:
        return None
    a, b, ranks, scales = slots
    return Adapters(a, b, ranks, scales, shrunk)


def _flat(*operands: Tensor | Quantised) -> list[Tensor]:
    """An operator takes tensors alone: values, then scales where there are some."""
    flat = []
    for operand in operands:
        flat += [operand.values, operand.scales] if isinstance(operand, Quantised) else [operand]
    return flat
