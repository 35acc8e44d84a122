"""Launches of the kernels of a MoE delta: arguments and grids, nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorakernels.common.sizes import rank_vector
from lorakernels.common.stacked_weights import SlotTensors
from lorakernels.moe.align.kernels.arguments import Tables
from lorakernels.moe.delta.kernels.one_shot import moe_one_shot_kernel
from lorakernels.moe.delta.kernels.small_batch import moe_small_batch_kernel
from lorakernels.moe.delta.kernels.two_launch import moe_expand_kernel, moe_shrink_kernel
from lorakernels.moe.delta.plan import (
    MoEPath,
    MoEShape,
    plan_expand,
    plan_one_shot,
    plan_shrink,
    plan_small_batch,
    tile_programs,
)
from lorakernels.runtime.device import launch_options
from lorakernels.runtime.launching import start
from lorakernels.runtime.tuning import tuning_of


@dataclass(frozen=True, slots=True)
class Delta:
    """The operands of one MoE delta; see ops.py for what they hold."""

    shape: MoEShape
    x: Tensor
    # pairs that read the same row of x
    pairs_per_x: int
    slots: SlotTensors
    tables: Tables
    shrunk: Tensor
    out: Tensor
    router_weights: Tensor | None
    add_inputs: bool
    # whether the shrink output is stored times its scale, which nothing behind it applies then
    scales_ranks: bool = False

    @property
    def tile_capacity(self) -> int:
        """Tiles that the tables can hold: programs fetch the entries of a tile before they know
        whether it exists, and must not leave the tables."""
        tables = self.tables
        return min(tables.tile_slots.shape[0], tables.tile_pairs.shape[0] // self.shape.height)

    @property
    def a_strides(self) -> tuple[int, int]:
        """From slot to slot and from expert to expert, which is 0 for a shared factor."""
        a = self.slots.a
        return a.stride(0), a.stride(1) if a.shape[1] > 1 else 0

    @property
    def b_strides(self) -> tuple[int, int]:
        b = self.slots.b
        return b.stride(0), b.stride(1) if b.shape[1] > 1 else 0

    @property
    def weights_or_any(self) -> Tensor:
        """The router weights, or a tensor in their place that no kernel reads."""
        return self.out if self.router_weights is None else self.router_weights

    @property
    def is_fp32(self) -> bool:
        return self.out.dtype == torch.float32


def shape_of(
    a: Tensor, slice_widths: Sequence[int], *, num_pairs: int, num_experts: int
) -> MoEShape:
    """The shape of a delta of `num_pairs` pairs with A [slots, experts or 1, slices, rank, K]."""
    return MoEShape(
        num_pairs=num_pairs,
        num_experts=num_experts,
        in_features=a.shape[4],
        slice_widths=tuple(slice_widths),
        rank=a.shape[3],
        itemsize=a.element_size(),
        tuning=tuning_of(a.device),
    )


def launch(delta: Delta, path: MoEPath, *, pdl: bool) -> None:
    if path is MoEPath.SMALL_BATCH:
        _small_batch(delta, pdl=pdl)
    elif path is MoEPath.ONE_SHOT:
        _one_shot(delta, pdl=pdl)
    else:
        shrink(delta, pdl=pdl)
        expand(delta, pdl=pdl)


def shrink(delta: Delta, *, pdl: bool) -> None:
    """The ranks of every pair into the shrink output, in its dtype."""
    shape, slots, plan = delta.shape, delta.slots, plan_shrink(delta.shape)
    splits = delta.shrunk.shape[0]
    total = shape.ranks_of_all_slices
    tiles = tile_programs(shape, delta.tile_capacity)
    start(moe_shrink_kernel, (-(-total // plan.block_n), splits, tiles))(
        delta.x,
        slots.a,
        slots.ranks,
        slots.scales,
        *delta.tables.of_tiles,
        delta.shrunk,
        *delta.x.stride(),
        *delta.a_strides,
        delta.shrunk.stride(0),
        delta.tile_capacity - 1,
        shape.in_features,
        ROWS_PER_X=delta.pairs_per_x,
        R=shape.rank,
        SR=total,
        HEIGHT=shape.height,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        SCALED=delta.scales_ranks,
        IEEE=delta.is_fp32,
        PDL=pdl,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **launch_options(pdl),
    )


def expand(delta: Delta, *, pdl: bool) -> None:
    """The delta of every pair from the shrink output, into its output."""
    shape, slots, plan = delta.shape, delta.slots, plan_expand(delta.shape)
    columns = plan.block_n * plan.group
    groups = sum(-(-width // columns) for width in shape.slice_widths)
    tiles = tile_programs(shape, delta.tile_capacity)
    start(moe_expand_kernel, (groups, tiles))(
        delta.shrunk,
        slots.b,
        slots.ranks,
        slots.scales,
        delta.weights_or_any,
        *delta.tables.of_tiles,
        delta.out,
        *delta.out.stride(),
        *delta.b_strides,
        delta.shrunk.stride(0),
        delta.tile_capacity - 1,
        SPLITS=delta.shrunk.shape[0],
        HEIGHT=shape.height,
        BLOCK_N=plan.block_n,
        BLOCK_R=plan.block_r,
        GROUP=plan.group,
        STAGES=plan.num_stages,
        IEEE=delta.is_fp32,
        PDL=pdl,
        num_warps=plan.num_warps,
        **_output_constants(delta),
        **launch_options(pdl),
    )


def _one_shot(delta: Delta, *, pdl: bool) -> None:
    shape, plan = delta.shape, plan_one_shot(delta.shape)
    tiles = tile_programs(shape, delta.tile_capacity)
    slices = 1 if plan.paired else len(shape.slice_widths)
    start(moe_one_shot_kernel, (plan.parts, slices, tiles))(
        delta.x,
        *delta.slots,
        delta.weights_or_any,
        *delta.tables.of_tiles,
        delta.out,
        *delta.x.stride(),
        *delta.a_strides,
        *delta.b_strides,
        *delta.out.stride(),
        delta.tile_capacity - 1,
        shape.in_features,
        ROWS_PER_X=delta.pairs_per_x,
        HEIGHT=shape.height,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        BLOCK_R=plan.block_r,
        EVEN_N=all(width % plan.block_n == 0 for width in shape.slice_widths),
        STAGES=plan.column_stages,
        PAIRED=plan.paired,
        IEEE=delta.is_fp32,
        PDL=pdl,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **_output_constants(delta),
        **launch_options(pdl),
    )


def _small_batch(delta: Delta, *, pdl: bool) -> None:
    shape, plan = delta.shape, plan_small_batch(delta.shape)
    blocks = sum(-(-width // plan.block_n) for width in shape.slice_widths)
    start(moe_small_batch_kernel, (shape.num_pairs, blocks))(
        delta.x,
        *delta.slots,
        delta.weights_or_any,
        *delta.tables.of_pairs,
        delta.out,
        *delta.x.stride(),
        *delta.a_strides,
        *delta.b_strides,
        *delta.out.stride(),
        shape.in_features,
        ROWS_PER_X=delta.pairs_per_x,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        BLOCK_R=plan.block_r,
        PDL=pdl,
        num_warps=plan.num_warps,
        **_output_constants(delta),
        **launch_options(pdl),
    )


def _output_constants(delta: Delta) -> dict[str, object]:
    shape = delta.shape
    return {
        "WIDTHS": shape.slice_widths,
        "R": shape.rank,
        "WIDTH_ALIGN": math.gcd(16, *shape.slice_widths),
        "RANK_ALIGN": rank_vector(shape.rank),
        "WEIGHTED": delta.router_weights is not None,
        "ADD": delta.add_inputs,
    }
