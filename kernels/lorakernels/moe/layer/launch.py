"""Launches of a MoE layer: arguments and grids, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lorakernels.common.sizes import rank_vector
from lorakernels.moe.align.launch import PairTables
from lorakernels.moe.delta.launch import Delta, shape_of, shrink
from lorakernels.moe.delta.plan import MoEShape
from lorakernels.moe.layer.kernels import moe_gemm_kernel, sum_choices_kernel
from lorakernels.moe.layer.plan import fold_ranks, plan_gemm
from lorakernels.moe.layer.types import Activation, Quantised
from lorakernels.runtime.device import launch_options


@dataclass(frozen=True, slots=True)
class Adapters:
    """Those of one product: the buffers of ExpertWeights, and the shrink output of a workspace."""

    a: Tensor
    b: Tensor
    ranks: Tensor
    scales: Tensor
    shrunk: Tensor


def product(
    x: Tensor | Quantised,
    w: Tensor | Quantised,
    out: Tensor,
    pairs: PairTables,
    *,
    lora_input: Tensor,
    lora: Adapters | None,
    activation: Activation | None,
    router_weights: Tensor | None,
    pdl: bool,
) -> None:
    """out[p] = act(x_row @ W[e].T + delta), times the router weight before or instead of act."""
    delta = None
    if lora is not None:
        slices = 2 if activation is Activation.SILU_GATED else 1
        delta = _delta(lora_input, lora, (out.shape[1],) * slices, pairs)
        shrink(delta, pdl=pdl, scaled=True)
    values, x_scales = (x.values, x.scales) if isinstance(x, Quantised) else (x, None)
    weight, w_scales = (w.values, w.scales) if isinstance(w, Quantised) else (w, None)
    width, depth = out.shape[1], values.shape[1]
    is_gated = activation is Activation.SILU_GATED
    plan = plan_gemm(pairs.base_height, itemsize=out.element_size(), is_gated=is_gated)
    moe_gemm_kernel[(-(-width // plan.block_n), pairs.base_tile_programs)](
        values,
        weight,
        # what is not there is never read
        out if x_scales is None else x_scales,
        out if w_scales is None else w_scales,
        *((delta.shrunk, delta.factors[1], delta.tables[0]) if delta else (out, out, out)),
        out if router_weights is None else router_weights,
        pairs.pair_slots,
        pairs.base_experts,
        pairs.base_pairs,
        pairs.num_base_tiles,
        out,
        values.stride(0),
        weight.stride(0),
        out.stride(0),
        *(delta.b_strides if delta else (0, 0)),
        depth,
        WIDTH=width,
        ROWS_PER_X=pairs.num_pairs // values.shape[0],
        HEIGHT=pairs.base_height,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        EVEN_K=depth % plan.block_k == 0,
        EVEN_N=width % plan.block_n == 0,
        GATED=int(is_gated),
        SILU=activation is not None,
        WEIGHTED=router_weights is not None,
        SCALED=x_scales is not None,
        LORA=delta is not None,
        IEEE=out.dtype == torch.float32,
        PDL=pdl,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **_fold_constants(delta),
        **launch_options(pdl),
    )


def _fold_constants(delta: Delta | None) -> dict[str, int]:
    if delta is None:
        return {"S": 1, "R": 1, "BLOCK_R": 16, "RANK_ALIGN": 1}
    rank = delta.shape.rank
    return {
        "S": len(delta.shape.slice_widths),
        "R": rank,
        "BLOCK_R": fold_ranks(rank),
        "RANK_ALIGN": rank_vector(rank),
    }


def _delta(x: Tensor, lora: Adapters, widths: tuple[int, ...], pairs: PairTables) -> Delta:
    shape = shape_of(lora.a, widths, num_pairs=pairs.num_pairs, num_experts=pairs.num_experts)
    return Delta(
        shape=shape,
        x=x,
        pairs_per_x=pairs.num_pairs // x.shape[0],
        factors=(lora.a, lora.b),
        tables=(lora.ranks, lora.scales),
        of_pairs=(pairs.pair_slots, pairs.pair_experts),
        of_tiles=(pairs.tile_slots, pairs.tile_experts, pairs.tile_pairs, pairs.num_tiles),
        shrunk=_ranks_of_pairs(lora.shrunk, x, shape),
        out=x,
        router_weights=None,
        add_inputs=True,
    )


def _ranks_of_pairs(shrunk: Tensor, x: Tensor, shape: MoEShape) -> Tensor:
    """[1, pairs, slices * rank] of the layer's dtype, in the memory of the shrink output."""
    ranks = shape.ranks_of_all_slices
    values = shrunk.view(x.dtype)[: shape.num_pairs * ranks]
    if values.numel() < shape.num_pairs * ranks:
        raise ValueError(
            f"workspace must hold {shape.num_pairs} pairs of {ranks} ranks (got {values.numel()})"
        )
    return values.view(1, shape.num_pairs, ranks)


def sum_choices(y: Tensor, pairs: PairTables, out: Tensor, *, pdl: bool) -> None:
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
