"""The delta of a vocabulary embedding: public function and the operator behind it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.batch.steps import runs_adapters
from lorakernels.common.stacked_weights import SlotTensors
from lorakernels.dense.check import check_devices, check_output, check_rows, check_step
from lorakernels.dense.launch import TileTables, launch_expand, launch_lookup
from lorakernels.dense.ops import DenseWorkspace, shape_of, view_shrunk
from lorakernels.dense.shape import DenseShape
from lorakernels.dense.weights import SlotWeights
from lorakernels.runtime.device import supports_pdl
from lorakernels.runtime.operators import register_operator

ID_TYPES = (torch.int32, torch.int64)


def embedding_delta(
    ids: Tensor,
    weights: SlotWeights,
    metadata: BatchMetadata,
    workspace: DenseWorkspace,
    out: Tensor,
    *,
    first_id: int = 0,
) -> None:
    """out[row] += scale * B[slot] @ A[slot][:, ids[row] - first_id] for each row with a slot, in
    place.

    ids [rows], int32 or int64, any stride. weights: of one slice, whose in_features are the ids
        that this tensor-parallel rank holds, from `first_id` on. An id that it does not hold has no
        delta. out [rows, out_features] of the weights' dtype, any strides.
    Rows of slot -1 are neither read nor written. Deterministic. Raises ValueError.
    """
    check_step(out, weights, metadata)
    torch.ops.lorakernels.embedding_delta(
        ids,
        weights.a,
        weights.b,
        weights.ranks,
        weights.scales,
        metadata.tile_slots,
        metadata.tile_rows,
        metadata.num_tiles,
        workspace.buffers,
        out,
        first_id,
    )


@register_operator("embedding_delta", mutates=("shrunk", "out"))
def _embedding_delta(
    ids: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    tile_slots: Tensor,
    tile_rows: Tensor,
    num_tiles: Tensor,
    shrunk: list[Tensor],
    out: Tensor,
    first_id: int,
) -> None:
    check_rows(out, tile_rows)
    _check_ids(ids, a, out)
    check_output(out, b)
    if ids.shape[0] == 0 or not runs_adapters(tile_rows, ids.device):
        return
    shape = shape_of_lookup(ids.shape[0], a, b.shape[1])
    view = view_shrunk(shrunk, shape, a.shape[0])
    check_devices(out, tile_rows, view)
    slots = SlotTensors(a, b, ranks, scales)
    tiles = TileTables(tile_slots, tile_rows, num_tiles)
    pdl = supports_pdl(ids.device)
    launch_lookup(ids, slots, shape, tiles, view, first_id=first_id, pdl=pdl)
    launch_expand(view, slots, shape, tiles, out, pdl=pdl)


def shape_of_lookup(num_rows: int, a: Tensor, width: int) -> DenseShape:
    """What the plans of a batch depend on. A row reads one column of A, as in a layer of one input:
    no sum is split."""
    return replace(shape_of(num_rows, a, [width]), in_features=1)


def check_id_type(ids: Tensor) -> None:
    """Raises ValueError."""
    if ids.dtype not in ID_TYPES:
        raise ValueError(f"ids must be int32 or int64 (got {ids.dtype})")


def _check_ids(ids: Tensor, a: Tensor, out: Tensor) -> None:
    if a.shape[1] != 1:
        raise ValueError(f"weights must have one slice (got {a.shape[1]})")
    check_id_type(ids)
    if ids.dim() != 1:
        raise ValueError(f"ids must have one dimension (got shape {list(ids.shape)})")
    if ids.device != a.device:
        raise ValueError(f"ids must be on {a.device} (got {ids.device})")
    if ids.shape[0] != out.shape[0]:
        raise ValueError(f"ids must have {out.shape[0]} rows like out (got {ids.shape[0]})")
