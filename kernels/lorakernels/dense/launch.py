"""Launches of the dense kernels: arguments and grids, nothing else."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.common.sizes import MAX_GRID_Y, rank_vector
from lorakernels.common.stacked_weights import SlotTensors
from lorakernels.dense.expand_plan import plan_expand
from lorakernels.dense.kernels import (
    lora_add_kernel,
    lora_expand_kernel,
    lora_lookup_kernel,
    lora_shrink_kernel,
)
from lorakernels.dense.plan import ADD_PLAN, looked_up_ranks, plan_shrink, tile_programs
from lorakernels.dense.shape import DenseShape
from lorakernels.runtime.device import launch_options, on_device_of
from lorakernels.runtime.launching import start


class TileTables(NamedTuple):
    """The tables of BatchMetadata that the kernels read."""

    tile_slots: Tensor
    tile_rows: Tensor
    num_tiles: Tensor

    @classmethod
    def of(cls, metadata: BatchMetadata) -> TileTables:
        return cls(metadata.tile_slots, metadata.tile_rows, metadata.num_tiles)

    def capacity(self, height: int) -> int:
        """Tiles that the tables can hold at the height of a batch: programs fetch the entries of
        a tile before they know whether it exists, and must not leave the tables."""
        return min(self.tile_slots.shape[0], self.tile_rows.shape[0] // height)


def launch_shrink(
    x: Tensor,
    slots: SlotTensors,
    shape: DenseShape,
    tiles: TileTables,
    shrunk: Tensor,
    *,
    pdl: bool,
) -> None:
    """The ranks of every row with a slot into `shrunk`, which is of `plan_shrunk`."""
    if shape.num_rows == 0:
        return
    plan, total = plan_shrink(shape), shape.ranks_of_all_slices
    assert shrunk.shape[0] == plan.splits, "the expand reads other partials than are written"
    capacity = tiles.capacity(shape.height)
    grid = (tile_programs(shape, capacity), plan.splits, -(-total // plan.block_n))
    with on_device_of(x):
        start(lora_shrink_kernel, grid)(
            x,
            slots.a,
            slots.ranks,
            *tiles,
            shrunk,
            x.stride(0),
            x.stride(1),
            shrunk.stride(0),
            capacity - 1,
            shape.in_features,
            R=shape.rank,
            SR=total,
            HEIGHT=shape.height,
            BLOCK_N=plan.block_n,
            BLOCK_K=plan.block_k,
            ALL_RANKS=plan.reads_all_ranks,
            IEEE=x.dtype == torch.float32,
            PDL=pdl,
            EARLY=plan.trigger_early,
            num_warps=plan.num_warps,
            num_stages=plan.num_stages,
            **launch_options(pdl, plan.registers),
        )


def launch_expand(
    shrunk: Tensor,
    slots: SlotTensors,
    shape: DenseShape,
    tiles: TileTables,
    out: Tensor,
    *,
    pdl: bool,
    behind_base: bool = False,
    store: bool = False,
) -> None:
    """Adds the delta of every row with a slot to `out`. behind_base: the launch before this one on
    its stream is the base product, not the shrink. store: `out` becomes the delta; fp32."""
    if shape.num_rows == 0:
        return
    plan, height = plan_expand(shape), shape.height
    columns = plan.block_n * plan.group
    groups = sum(-(-width // columns) for width in shape.slice_widths)
    capacity, parts = tiles.capacity(height), height // plan.block_m
    # more parts than CUDA's limit of this axis are left to the stride loop
    programs = min(tile_programs(shape, capacity) * parts, MAX_GRID_Y)
    with on_device_of(out):
        start(lora_expand_kernel, (groups, programs))(
            shrunk,
            slots.b,
            slots.ranks,
            slots.scales,
            *tiles,
            out,
            out.stride(0),
            out.stride(1),
            shrunk.stride(0),
            capacity * parts - 1,
            WIDTHS=shape.slice_widths,
            OUT_FEATURES=sum(shape.slice_widths),
            R=shape.rank,
            SPLITS=shrunk.shape[0],
            WIDTH_ALIGN=math.gcd(16, *shape.slice_widths),
            RANK_ALIGN=rank_vector(shape.rank),
            HEIGHT=height,
            BLOCK_M=plan.block_m,
            BLOCK_N=plan.block_n,
            BLOCK_R=plan.block_r,
            GROUP=plan.group,
            STAGES=plan.num_stages,
            IEEE=slots.b.dtype == torch.float32,
            PDL=pdl,
            BEHIND_BASE=behind_base,
            STORE=store,
            num_warps=plan.num_warps,
            # a delta that is stored runs beside the base product, which needs the registers
            **launch_options(pdl, None if store else plan.registers),
        )


def launch_add(
    stored: Tensor, shape: DenseShape, tiles: TileTables, out: Tensor, *, pdl: bool
) -> None:
    """Adds what an expand has stored to the rows of `out` with a slot. The launch before this one
    on its stream is the base product. stored: contiguous [rows, out_features]."""
    if shape.num_rows == 0:
        return
    plan, out_features = ADD_PLAN, stored.shape[1]
    capacity, parts = tiles.capacity(shape.height), shape.height // plan.block_m
    programs = min(tile_programs(shape, capacity) * parts, MAX_GRID_Y)
    with on_device_of(out):
        start(lora_add_kernel, (-(-out_features // plan.block_n), programs))(
            stored,
            tiles.tile_rows,
            tiles.num_tiles,
            out,
            out.stride(0),
            out.stride(1),
            capacity * parts - 1,
            OUT_FEATURES=out_features,
            HEIGHT=shape.height,
            BLOCK_M=plan.block_m,
            BLOCK_N=plan.block_n,
            PDL=pdl,
            num_warps=plan.num_warps,
            **launch_options(pdl),
        )


def launch_lookup(
    ids: Tensor,
    slots: SlotTensors,
    shape: DenseShape,
    tiles: TileTables,
    shrunk: Tensor,
    *,
    first_id: int,
    pdl: bool,
) -> None:
    """The ranks of every row with a slot into `shrunk`. ids [rows], the first of which that A holds
    is `first_id`."""
    block_r = looked_up_ranks(shape)
    grid = (tile_programs(shape, tiles.capacity(shape.height)), -(-shape.rank // block_r))
    with on_device_of(ids):
        start(lora_lookup_kernel, grid)(
            ids,
            slots.a,
            slots.ranks,
            *tiles,
            shrunk,
            ids.stride(0),
            first_id,
            slots.a.shape[3],
            R=shape.rank,
            HEIGHT=shape.height,
            BLOCK_R=block_r,
            PDL=pdl,
            num_warps=4,
            **launch_options(pdl),
        )
