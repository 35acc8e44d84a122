"""A whole MoE layer on prepared pairs: w13, activation, w2, sum over the choices of a token.

With adapters each product is preceded by the shrink of its input, and the expand is folded into
the product itself: the layer has two launches more than without, and no pass over its outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.device import launch_options, supports_pdl
from lorakernels.moe.align import PairMetadata
from lorakernels.moe.experts_check import check_experts
from lorakernels.moe.experts_kernels import moe_gemm_kernel, sum_choices_kernel
from lorakernels.moe.experts_plan import GemmShape, fold_ranks, plan_gemm
from lorakernels.moe.experts_types import (
    Activation,
    ExpertBuffers,
    ExpertLoRA,
    Quantised,
    RouterWeight,
)
from lorakernels.moe.launch import Delta, shrink
from lorakernels.moe.ops import MoEWorkspace
from lorakernels.moe.plan import MoEShape, rank_vector
from lorakernels.moe.weights import ExpertWeights

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
    act, y = buffers.act[: pairs.num_pairs], buffers.y[: pairs.num_pairs]
    on_input = router_weight is RouterWeight.ON_INPUT
    pdl = supports_pdl(x.device)
    _product(
        x if quantised_x is None else quantised_x,
        w13,
        act,
        pairs,
        lora_input=x,
        lora=None if lora is None else (lora.w13, lora.workspace),
        activation=activation,
        router_weights=router_weights if on_input else None,
        pdl=pdl,
    )
    _product(
        act if quantised_x is None else quantise_rows(act),
        w2,
        y,
        pairs,
        lora_input=act,
        lora=None if lora is None else (lora.w2, lora.workspace),
        activation=None,
        router_weights=None if on_input else router_weights,
        pdl=pdl,
    )
    _sum_choices(y, pairs, out, pdl=pdl)


def quantise_rows(x: Tensor) -> Quantised:
    """8-bit values with one scale a row, so that the largest of a row is just representable."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    # rows that no pair owns hold anything; NaN and Inf stay in their row
    scales = x.abs().amax(dim=1).float().clamp_min(1e-12) / largest
    return Quantised((x.float() / scales[:, None]).to(torch.float8_e4m3fn), scales)


def _product(
    x: Tensor | Quantised,
    w: Tensor | Quantised,
    out: Tensor,
    pairs: PairMetadata,
    *,
    lora_input: Tensor,
    lora: tuple[ExpertWeights, MoEWorkspace] | None,
    activation: Activation | None,
    router_weights: Tensor | None,
    pdl: bool,
) -> None:
    delta = None
    if lora is not None:
        delta = _delta(lora_input, *lora, pairs)
        shrink(delta, pdl=pdl, scaled=True)
    values, x_scales = (x.values, x.scales) if isinstance(x, Quantised) else (x, None)
    weight, w_scales = (w.values, w.scales) if isinstance(w, Quantised) else (w, None)
    width, depth = out.shape[1], values.shape[1]
    is_gated = activation is Activation.SILU_GATED
    shape = GemmShape(
        pairs.num_pairs, pairs.base_height, width, depth, out.element_size(), is_gated
    )
    plan = plan_gemm(shape)
    # without adapters the arguments of the fold are never read
    factors, bridge = (delta.factors[1], delta.bridge) if delta else (out, out)
    ranks = delta.tables[0] if delta else out
    b_strides = delta.b_strides if delta else (0, 0)
    moe_gemm_kernel[(-(-width // plan.block_n), pairs.base_tile_programs)](
        values,
        weight,
        out if x_scales is None else x_scales,
        out if w_scales is None else w_scales,
        bridge,
        factors,
        ranks,
        out if router_weights is None else router_weights,
        pairs.pair_slots,
        pairs.base_experts,
        pairs.base_pairs,
        pairs.num_base_tiles,
        out,
        values.stride(0),
        weight.stride(0),
        out.stride(0),
        *b_strides,
        depth,
        WIDTH=width,
        ROWS_PER_X=pairs.num_pairs // values.shape[0],
        HEIGHT=pairs.base_height,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        EVEN_K=depth % plan.block_k == 0,
        EVEN_N=width % plan.block_n == 0,
        S=len(delta.shape.slice_widths) if delta else 1,
        R=delta.shape.rank if delta else 1,
        BLOCK_R=fold_ranks(delta.shape.rank) if delta else 16,
        RANK_ALIGN=rank_vector(delta.shape.rank) if delta else 1,
        GATED=int(is_gated),
        SILU=activation is not None,
        WEIGHTED=router_weights is not None,
        SCALED=x_scales is not None,
        LORA=delta is not None,
        IEEE=out.dtype == torch.float32,
        PDL=pdl,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **launch_options(pdl),
    )


def _delta(
    x: Tensor, weights: ExpertWeights, workspace: MoEWorkspace, pairs: PairMetadata
) -> Delta:
    shape = MoEShape(
        pairs.num_pairs,
        weights.num_experts,
        weights.in_features,
        weights.slice_widths,
        weights.rank,
        weights.a.element_size(),
    )
    return Delta(
        shape=shape,
        x=x,
        pairs_per_x=pairs.num_pairs // x.shape[0],
        factors=(weights.a, weights.b),
        tables=(weights.ranks, weights.scales),
        of_pairs=(pairs.pair_slots, pairs.pair_experts),
        of_tiles=(pairs.tile_slots, pairs.tile_experts, pairs.tile_pairs, pairs.num_tiles),
        bridge=_ranks_of_pairs(workspace, x, shape),
        out=x,
        router_weights=None,
        add_inputs=True,
    )


def _ranks_of_pairs(workspace: MoEWorkspace, x: Tensor, shape: MoEShape) -> Tensor:
    """[1, pairs, slices * rank] of the layer's dtype, in the memory of the bridge."""
    ranks = shape.ranks_of_all_slices
    values = workspace.bridge.view(x.dtype)[: shape.num_pairs * ranks]
    if values.numel() < shape.num_pairs * ranks:
        raise ValueError(
            f"workspace must hold {shape.num_pairs} pairs of {ranks} ranks (got {values.numel()})"
        )
    return values.view(1, shape.num_pairs, ranks)


def _sum_choices(y: Tensor, pairs: PairMetadata, out: Tensor, *, pdl: bool) -> None:
    rows, hidden = out.shape
    block = 1024 if hidden >= 1024 else 256
    sum_choices_kernel[(rows, -(-hidden // block))](
        y,
        pairs.pair_experts,
        out,
        y.stride(0),
        out.stride(0),
        hidden,
        TOP_K=pairs.top_k,
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
