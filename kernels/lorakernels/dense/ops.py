"""The delta of a linear layer: public functions and the operator behind them.

`dense_delta` is one opaque operator that only gets tensors and the slice widths. A layer's
name or the number of active adapters can therefore not become a constant of a traced graph
(vllm #34119, #38152).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.batch.steps import runs_adapters
from lorakernels.common.stacked_weights import SlotTensors, device_of
from lorakernels.dense.check import (
    check_apart,
    check_devices,
    check_input,
    check_layouts,
    check_operands,
    check_output,
    check_rows,
    check_shrunk,
    check_step,
    check_whole,
)
from lorakernels.dense.launch import TileTables, launch_expand, launch_shrink
from lorakernels.dense.shape import DenseShape
from lorakernels.dense.sizes import largest_shrunk, largest_stored, plan_shrunk
from lorakernels.dense.weights import SlotWeights
from lorakernels.runtime.device import keep_address, supports_pdl
from lorakernels.runtime.operators import register_operator
from lorakernels.runtime.prepared import launch_prepared
from lorakernels.runtime.streams import branch
from lorakernels.runtime.tuning import tuning_of


class DenseWorkspace:
    """The shrink output between shrink and expand, and the delta where a form stores it: fp32,
    allocated once, shared by layers that run one after the other. Large enough for every batch of
    up to `max_tokens` rows, whose plan stores small deltas alone.

    `branches`: how many branches of a fork may use it at the same time, each of which gets a
    buffer of its own; see runtime/streams.py. Layers that run on streams of the caller need a
    workspace for each of these streams.
    """

    def __init__(
        self, layers: Sequence[SlotWeights], *, max_tokens: int, branches: int = 1
    ) -> None:
        layers = list(layers)
        if not layers:
            raise ValueError("layers must name at least one layer (got none)")
        for layer in layers:
            if not isinstance(layer, SlotWeights):
                raise ValueError(
                    "layers must be SlotWeights, such as the `slots` of a layer "
                    f"(got a {type(layer).__name__})"
                )
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1 (got {max_tokens})")
        if branches < 1:
            raise ValueError(f"branches must be at least 1 (got {branches})")
        geometries = {
            (shape_of_batch(0, layer), layer.num_slots, layer.exchanged_copies) for layer in layers
        }
        size = max(
            largest_shrunk(shape, slots, max_tokens, copies) + largest_stored(shape, max_tokens)
            for shape, slots, copies in geometries
        )
        device = device_of(layers)
        # an exchange between ranks writes it in any mode
        with torch.inference_mode(mode=False):
            self.shrunk, *self._beside = (
                keep_address(torch.empty(size, dtype=torch.float32, device=device))
                for _ in range(branches)
            )

    @property
    def buffers(self) -> list[Tensor]:
        """One for each branch, as an operator takes them."""
        return [self.shrunk, *self._beside]


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
    check_step(x, weights, metadata)
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
        workspace.buffers,
        out,
    )


def shrink_in_tiles(
    x: Tensor, weights: SlotWeights, metadata: BatchMetadata, shrunk: Tensor
) -> None:
    """shrunk[:, i] = split-K partials whose sum is x[metadata.tile_rows[i]] @ A[slot].T, unscaled.

    shrunk: contiguous fp32 of `shrunk_shape`. Only rows of the batch with a slot are written.
    Raises ValueError.
    """
    check_step(x, weights, metadata)
    check_rows(x, metadata.tile_rows)
    check_input(x, weights.a)
    check_devices(x, metadata.tile_rows, shrunk)
    shape = shape_of_batch(x.shape[0], weights)
    check_shrunk(shrunk, shape, weights.num_slots)
    launch_shrink(x, weights.tensors, shape, TileTables.of(metadata), shrunk, pdl=False)


def expand_from_tiles(
    shrunk: Tensor, weights: SlotWeights, metadata: BatchMetadata, out: Tensor
) -> None:
    """out[metadata.tile_rows[i]] += scale * shrunk[:, i].sum(0) @ B[slot].T, in place.

    shrunk: as `shrink_in_tiles` left it for a batch of as many rows. Raises ValueError.
    """
    check_step(out, weights, metadata)
    check_rows(out, metadata.tile_rows)
    check_whole(weights.a, weights.b)
    check_output(out, weights.b)
    check_devices(out, metadata.tile_rows, shrunk)
    shape = shape_of_batch(out.shape[0], weights)
    check_shrunk(shrunk, shape, weights.num_slots)
    launch_expand(shrunk, weights.tensors, shape, TileTables.of(metadata), out, pdl=False)


def shrunk_shape(num_rows: int, weights: SlotWeights) -> tuple[int, int, int]:
    """[splits, padded rows of all tiles, slices * rank] of the shrink output for a batch."""
    return plan_shrunk(shape_of_batch(num_rows, weights), weights.num_slots)


def shape_of_batch(num_rows: int, weights: SlotWeights) -> DenseShape:
    """What the plans of a batch depend on."""
    return shape_of(num_rows, weights.a, weights.slice_widths)


@register_operator("dense_delta", mutates=("shrunk", "out"))
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
    shrunk: list[Tensor],
    out: Tensor,
) -> None:
    check_rows(x, tile_rows)
    if x.shape[0] == 0 or not runs_adapters(tile_rows, x.device):
        check_whole(a, b)
        check_operands(x, a, b, out)
        return
    check_apart(x, out)
    tables = tile_slots, tile_rows, num_tiles
    operands = x, a, b, ranks, scales, *tables, buffer_of_branch(shrunk), out
    launch_prepared(launch_delta, operands, (tuple(slice_widths),), tuning_of(x.device))


def launch_delta(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    tile_slots: Tensor,
    tile_rows: Tensor,
    num_tiles: Tensor,
    shrunk: Tensor | None,
    out: Tensor,
    slice_widths: Sequence[int],
) -> None:
    """Both launches of a delta, for `launch_prepared`. shrunk: None allocates it. ValueError."""
    check_whole(a, b)
    check_layouts(x, a, b, out)
    check_devices(x, tile_rows, shrunk)
    shape = shape_of(x.shape[0], a, slice_widths)
    size = plan_shrunk(shape, a.shape[0])
    if shrunk is None:
        view = torch.empty(size, dtype=torch.float32, device=x.device)
    else:
        view = first_values(shrunk, math.prod(size)).view(size)
    slots = SlotTensors(a, b, ranks, scales)
    tiles = TileTables(tile_slots, tile_rows, num_tiles)
    # nothing comes between the two launches
    pdl = supports_pdl(x.device)
    launch_shrink(x, slots, shape, tiles, view, pdl=pdl)
    launch_expand(view, slots, shape, tiles, out, pdl=pdl)


def view_shrunk(buffers: Sequence[Tensor], shape: DenseShape, num_slots: int) -> Tensor:
    """The shrink output of a batch in the buffer of this branch. ValueError."""
    wanted = plan_shrunk(shape, num_slots)
    return branch_buffer(buffers, math.prod(wanted)).view(wanted)


def branch_buffer(buffers: Sequence[Tensor], size: int) -> Tensor:
    """The first `size` values of the buffer of this branch. ValueError."""
    return first_values(buffer_of_branch(buffers), size)


def buffer_of_branch(buffers: Sequence[Tensor]) -> Tensor:
    """ValueError where a workspace has none."""
    number = branch()
    if number >= len(buffers):
        raise ValueError(
            f"workspace must have {number + 1} branches to be used in this side of a fork "
            f"(got {len(buffers)})"
        )
    return buffers[number]


def first_values(buffer: Tensor, size: int) -> Tensor:
    """Of the buffer of a branch. ValueError where it is too small."""
    if buffer.numel() < size:
        raise ValueError(
            f"workspace must hold {size} values for a batch of this size (got {buffer.numel()})"
        )
    return buffer[:size]


def shape_of(num_rows: int, a: Tensor, slice_widths: Sequence[int]) -> DenseShape:
    """What the plans of a batch depend on, from stacked A and the widths."""
    rank, in_features = a.shape[2], a.shape[3]
    widths, tuning = tuple(slice_widths), tuning_of(a.device)
    return DenseShape(num_rows, in_features, widths, rank, a.element_size(), tuning)
