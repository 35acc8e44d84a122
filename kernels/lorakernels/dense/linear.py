"""A linear layer with its adapters: base product and delta as one opaque operator, so that a traced
graph contains no operation on streams. Which form it takes is decided when it runs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lorakernels.batch.metadata import BatchMetadata, has_adapters
from lorakernels.common.stacked_weights import SlotTensors
from lorakernels.dense.check import check_input, check_rows, check_step
from lorakernels.dense.forms import LinearForm, plan_form
from lorakernels.dense.launch import TileTables, launch_expand, launch_shrink
from lorakernels.dense.ops import DenseWorkspace, shape_of, view_shrunk
from lorakernels.dense.plan import DenseShape
from lorakernels.dense.weights import SlotWeights
from lorakernels.runtime.device import supports_pdl
from lorakernels.runtime.options import dual_stream
from lorakernels.runtime.streams import fork_join, is_capturing


def lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: SlotWeights,
    metadata: BatchMetadata,
    workspace: DenseWorkspace,
    *,
    form: LinearForm | None = None,
) -> Tensor:
    """x [rows, in_features] @ weight.T + bias + the delta of each row's slot: [rows, out_features].

    form: None lets the plan choose. Raises ValueError.
    """
    check_step(x, slots, metadata)
    out: Tensor = torch.ops.lorakernels.lora_linear(
        x,
        weight,
        bias,
        slots.a,
        slots.b,
        slots.ranks,
        slots.scales,
        list(slots.slice_widths),
        metadata.tile_slots,
        metadata.tile_rows,
        metadata.num_tiles,
        workspace.buffers,
        0 if form is None else form.value,
    )
    return out


@torch.library.custom_op("lorakernels::lora_linear", mutates_args=("shrunk",))
def _lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    slice_widths: list[int],
    tile_slots: Tensor,
    tile_rows: Tensor,
    num_tiles: Tensor,
    shrunk: list[Tensor],
    form: int,
) -> Tensor:
    check_rows(x, tile_rows)
    check_input(x, a)
    shape = shape_of(x.shape[0], a, slice_widths)
    plan = LinearForm(form) if form else plan_form(shape, dual_stream=dual_stream(x.device))
    if x.shape[0] == 0:
        return F.linear(x, weight, bias)
    view = view_shrunk(shrunk, shape, a.shape[0])
    slots = SlotTensors(a, b, ranks, scales)
    tiles = TileTables(tile_slots, tile_rows, num_tiles)
    return _run(plan, x, weight, bias, slots, shape, tiles, view)


def _run(
    form: LinearForm,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: SlotTensors,
    shape: DenseShape,
    tiles: TileTables,
    shrunk: Tensor,
) -> Tensor:
    # the expand reads the base output before it waits for the shrink, and relies on the shrink
    # having waited for the base product: only where it follows the shrink on one stream
    pdl = form is LinearForm.SINGLE and supports_pdl(x.device)

    def base() -> Tensor:
        return F.linear(x, weight, bias)

    def shrink() -> None:
        launch_shrink(x, slots, shape, tiles, shrunk, pdl=pdl)

    if form is LinearForm.SINGLE:
        out = base()
        shrink()
    else:
        # a graph is replayed with other batches, and needs its fork even if this one has no adapter
        is_used = has_adapters(tiles.tile_rows) or is_capturing(x.device)
        out = fork_join(x.device, base, shrink, parallel=form is LinearForm.DUAL and is_used)
    launch_expand(shrunk, slots, shape, tiles, out, pdl=pdl)
    return out


@_lora_linear.register_fake
def _(x: Tensor, weight: Tensor, *others: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])
