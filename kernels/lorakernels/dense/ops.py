"""Host side of the dense delta: validation, launch, and the custom operator.

`dense_delta` is one opaque operator that only gets tensors and the slice widths. A layer's
name or the number of active adapters can therefore not become a constant of a traced graph
(vllm #34119, #38152).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lorakernels.batch.metadata import BatchMetadata, tile_height
from lorakernels.common.sizes import rank_vector
from lorakernels.dense.kernels import lora_expand_kernel, lora_shrink_kernel
from lorakernels.dense.plan import (
    DenseShape,
    ExpandPlan,
    ShrinkPlan,
    largest_shrunk,
    plan_expand,
    plan_shrink,
    plan_shrunk,
    tile_programs,
)
from lorakernels.dense.weights import SlotWeights
from lorakernels.runtime.device import launch_options, supports_pdl


class DenseWorkspace:
    """The shrink output between shrink and expand: fp32, allocated once, shared by layers that run
    one after the other. Large enough for every batch of up to `max_tokens` rows."""

    def __init__(self, layers: Sequence[SlotWeights], *, max_tokens: int) -> None:
        if not layers:
            raise ValueError("layers must name at least one layer (got none)")
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1 (got {max_tokens})")
        geometries = {(_shape(0, layer), layer.num_slots) for layer in layers}
        size = max(largest_shrunk(shape, slots, max_tokens) for shape, slots in geometries)
        self.shrunk = torch.empty(size, dtype=torch.float32, device=layers[0].a.device)


def dense_delta(
    x: Tensor,
    weights: SlotWeights,
    metadata: BatchMetadata,
    workspace: DenseWorkspace,
    out: Tensor,
) -> None:
    """out[row] += scale * (x[row] @ A[slot].T) @ B[slot].T for each row with a slot, in place.

    x [rows, in_features] and out [rows, out_features] of the weights' dtype, any strides.
    Rows of slot -1 are neither read nor written. Deterministic. Raises ValueError.
    """
    _check_rows(x, weights, metadata)
    torch.ops.lorakernels.dense_delta(
        x,
        weights.a,
        weights.b,
        weights.ranks,
        weights.scales,
        list(weights.slice_widths),
        metadata.tile_slots,
        metadata.tile_rows,
        metadata.num_tiles,
        workspace.shrunk,
        out,
    )


def lora_shrink(x: Tensor, weights: SlotWeights, metadata: BatchMetadata, shrunk: Tensor) -> None:
    """shrunk[:, i] = split-K partials whose sum is x[metadata.tile_rows[i]] @ A[slot].T, unscaled.

    shrink output: contiguous fp32 of `shrunk_shape`. Only rows of the batch with a slot are written.
    Raises ValueError.
    """
    _check_rows(x, weights, metadata)
    _check_input(x, weights.a)
    shape = _shape(x.shape[0], weights)
    _check_shrunk(shrunk, shape, weights.num_slots)
    _shrink(x, weights.a, weights.ranks, shape, _tables(metadata), shrunk, pdl=False)


def lora_expand(shrunk: Tensor, weights: SlotWeights, metadata: BatchMetadata, out: Tensor) -> None:
    """out[metadata.tile_rows[i]] += scale * shrunk[:, i].sum(0) @ B[slot].T, in place.

    shrink output as `lora_shrink` left it for a batch of as many rows. Raises ValueError.
    """
    _check_rows(out, weights, metadata)
    _check_output(out, weights.b)
    shape = _shape(out.shape[0], weights)
    _check_shrunk(shrunk, shape, weights.num_slots)
    factors = (weights.b, weights.ranks, weights.scales)
    _expand(shrunk, factors, shape, _tables(metadata), out, pdl=False)


def shrunk_shape(num_rows: int, weights: SlotWeights) -> tuple[int, int, int]:
    """[splits, padded rows of all tiles, slices * rank] of the shrink output for a batch."""
    return plan_shrunk(_shape(num_rows, weights), weights.num_slots)


@torch.library.custom_op("lorakernels::dense_delta", mutates_args=("shrunk", "out"))
def _dense_delta(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    slice_widths: list[int],
    tile_slots: Tensor,
    tile_rows: Tensor,
    num_tiles: Tensor,
    shrunk: Tensor,
    out: Tensor,
) -> None:
    _check_input(x, a)
    if out.dim() != 2:
        raise ValueError(f"out must have two dimensions (got shape {list(out.shape)})")
    if out.shape[0] != x.shape[0]:
        raise ValueError(f"out must have {x.shape[0]} rows like x (got {out.shape[0]})")
    _check_output(out, b)
    if x.shape[0] == 0:
        return
    if overlap(x, out):
        raise ValueError("out must not overlap x in memory")
    shape = DenseShape(x.shape[0], a.shape[3], tuple(slice_widths), a.shape[2], a.element_size())
    splits, padded_rows, ranks_of_all = plan_shrunk(shape, a.shape[0])
    size = splits * padded_rows * ranks_of_all
    if shrunk.numel() < size:
        raise ValueError(
            f"workspace must hold {size} values of shrink output (got {shrunk.numel()})"
        )
    view = shrunk[:size].view(splits, padded_rows, ranks_of_all)
    pdl = supports_pdl(x.device)
    tables = (tile_slots, tile_rows, num_tiles)
    _shrink(x, a, ranks, shape, tables, view, pdl=pdl)
    _expand(view, (b, ranks, scales), shape, tables, out, pdl=pdl)


def _shrink(
    x: Tensor,
    a: Tensor,
    ranks: Tensor,
    shape: DenseShape,
    tables: tuple[Tensor, Tensor, Tensor],
    shrunk: Tensor,
    *,
    pdl: bool,
) -> None:
    if shape.num_rows == 0:
        return
    plan: ShrinkPlan = plan_shrink(shape)
    total = shape.ranks_of_all_slices
    capacity = _tile_capacity(shape, tables)
    grid = (tile_programs(shape.num_rows, capacity), plan.splits, -(-total // plan.block_n))
    lora_shrink_kernel[grid](
        x,
        a,
        ranks,
        *tables,
        shrunk,
        x.stride(0),
        x.stride(1),
        shrunk.stride(0),
        capacity - 1,
        shape.in_features,
        R=shape.rank,
        SR=total,
        HEIGHT=tile_height(shape.num_rows),
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        IEEE=a.dtype == torch.float32,
        PDL=pdl,
        EARLY=plan.trigger_early,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **launch_options(pdl),
    )


def _expand(
    shrunk: Tensor,
    factors: tuple[Tensor, Tensor, Tensor],
    shape: DenseShape,
    tables: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    *,
    pdl: bool,
) -> None:
    if shape.num_rows == 0:
        return
    plan: ExpandPlan = plan_expand(shape)
    height = tile_height(shape.num_rows)
    columns = plan.block_n * plan.group
    groups = sum(-(-width // columns) for width in shape.slice_widths)
    capacity = _tile_capacity(shape, tables)
    parts = tile_programs(shape.num_rows, capacity) * (height // plan.block_m)
    lora_expand_kernel[(groups, parts)](
        shrunk,
        *factors,
        *tables,
        out,
        out.stride(0),
        out.stride(1),
        shrunk.stride(0),
        capacity * (height // plan.block_m) - 1,
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
        IEEE=out.dtype == torch.float32,
        PDL=pdl,
        num_warps=plan.num_warps,
        **launch_options(pdl),
    )


def _tile_capacity(shape: DenseShape, tables: tuple[Tensor, Tensor, Tensor]) -> int:
    """Tiles that the tables can hold at the height of this batch: programs fetch the entries of
    a tile before they know whether it exists, and must not leave the tables."""
    tile_slots, tile_rows, _ = tables
    return min(tile_slots.shape[0], tile_rows.shape[0] // tile_height(shape.num_rows))


def _tables(metadata: BatchMetadata) -> tuple[Tensor, Tensor, Tensor]:
    return (metadata.tile_slots, metadata.tile_rows, metadata.num_tiles)


def _shape(num_rows: int, weights: SlotWeights) -> DenseShape:
    return DenseShape(
        num_rows,
        weights.in_features,
        weights.slice_widths,
        weights.rank,
        weights.a.element_size(),
    )


def _check_rows(x: Tensor, weights: SlotWeights, metadata: BatchMetadata) -> None:
    if metadata.max_slots > weights.num_slots:
        # rows of a slot beyond would read behind the weights
        raise ValueError(
            f"metadata must have at most {weights.num_slots} slots like the weights "
            f"(got {metadata.max_slots})"
        )
    if x.dim() != 2:
        raise ValueError(f"x and out must have two dimensions (got shape {list(x.shape)})")
    if x.shape[0] != metadata.num_rows:
        raise ValueError(
            f"x and out must have {metadata.num_rows} rows, as the metadata was prepared for "
            f"(got {x.shape[0]})"
        )


def _check_input(x: Tensor, a: Tensor) -> None:
    if x.shape[1] != a.shape[3]:
        raise ValueError(f"x must have {a.shape[3]} columns (got {x.shape[1]})")
    _check_like("x", x, a)


def _check_output(out: Tensor, b: Tensor) -> None:
    if out.shape[1] != b.shape[1]:
        raise ValueError(f"out must have {b.shape[1]} columns (got {out.shape[1]})")
    _check_like("out", out, b)


def _check_like(name: str, tensor: Tensor, weight: Tensor) -> None:
    if tensor.dtype != weight.dtype:
        raise ValueError(f"{name} must be {weight.dtype} like the weights (got {tensor.dtype})")
    if tensor.device != weight.device:
        raise ValueError(f"{name} must be on {weight.device} (got {tensor.device})")


def overlap(x: Tensor, out: Tensor) -> bool:
    """Whether out may write what x reads. Columns side by side in one buffer do not overlap."""
    if x.untyped_storage().data_ptr() != out.untyped_storage().data_ptr():
        return False
    first, last = sorted((x, out), key=Tensor.storage_offset)
    gap = last.storage_offset() - first.storage_offset()
    if gap > sum((n - 1) * s for n, s in zip(first.shape, first.stride(), strict=True)):
        return False
    row = first.stride(0)
    side_by_side = first.stride() == last.stride() == (row, 1)
    return not (side_by_side and gap % row >= first.shape[1] and gap % row + last.shape[1] <= row)


def _check_shrunk(shrunk: Tensor, shape: DenseShape, num_slots: int) -> None:
    wanted = plan_shrunk(shape, num_slots)
    if shrunk.shape != wanted or shrunk.dtype != torch.float32 or not shrunk.is_contiguous():
        raise ValueError(
            f"shrunk must be contiguous float32 {list(wanted)} "
            f"(got {shrunk.dtype} {list(shrunk.shape)})"
        )
