"""A linear layer with its adapters: base product and delta as one opaque operator, so that a traced
graph contains no operation on streams. Which form it takes is decided when it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.batch.steps import runs_adapters
from lorakernels.common.choices import choice_number
from lorakernels.common.stacked_weights import SlotTensors
from lorakernels.dense.check import check_devices, check_input, check_rows, check_step
from lorakernels.dense.forms import LinearForm, plan_form
from lorakernels.dense.launch import TileTables, launch_add, launch_expand, launch_shrink
from lorakernels.dense.ops import DenseWorkspace, branch_buffer, shape_of, view_shrunk
from lorakernels.dense.shape import DenseShape
from lorakernels.dense.sizes import stored_delta
from lorakernels.dense.weights import SlotWeights
from lorakernels.runtime.device import supports_pdl
from lorakernels.runtime.operators import register_operator
from lorakernels.runtime.options import dual_stream
from lorakernels.runtime.streams import fork_join


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
        choice_number("form", form, LinearForm),
    )
    return out


@dataclass(frozen=True, slots=True)
class Delta:
    """The delta of a batch: its input, its adapters, and what this branch keeps between its
    launches, in one of `buffers`."""

    x: Tensor
    slots: SlotTensors
    shape: DenseShape
    tiles: TileTables
    buffers: Sequence[Tensor]
    shrunk: Tensor

    @classmethod
    def of(
        cls,
        x: Tensor,
        slots: SlotTensors,
        slice_widths: Sequence[int],
        tiles: TileTables,
        buffers: Sequence[Tensor],
    ) -> Delta:
        """Raises ValueError where the operands do not fit."""
        check_rows(x, tiles.tile_rows)
        check_input(x, slots.a)
        shape = shape_of(x.shape[0], slots.a, slice_widths)
        shrunk = view_shrunk(buffers, shape, slots.a.shape[0])
        check_devices(x, tiles.tile_rows, shrunk)
        return cls(x, slots, shape, tiles, buffers, shrunk)

    def beside(self) -> Delta:
        """The same delta, whose shrink runs beside the base product."""
        shape = replace(self.shape, beside=True)
        shrunk = view_shrunk(self.buffers, shape, self.slots.a.shape[0])
        return replace(self, shape=shape, shrunk=shrunk)

    def stored(self) -> Tensor:
        """What this branch keeps the whole delta in, behind the shrink output. ValueError."""
        size = stored_delta(self.shape)
        shrunk = self.shrunk.numel()
        return branch_buffer(self.buffers, shrunk + math.prod(size))[shrunk:].view(size)

    def store(self, stored: Tensor, *, pdl: bool) -> None:
        # nothing says what runs before the shrink on its stream
        self.shrink(pdl=False)
        launch_expand(
            *(self.shrunk, self.slots, self.shape, self.tiles, stored), pdl=pdl, store=True
        )

    def shrink(self, *, pdl: bool) -> None:
        launch_shrink(self.x, self.slots, self.shape, self.tiles, self.shrunk, pdl=pdl)

    def expand(self, out: Tensor, *, pdl: bool, behind_base: bool) -> None:
        launch_expand(
            *(self.shrunk, self.slots, self.shape, self.tiles, out),
            pdl=pdl,
            behind_base=behind_base,
        )


def add_delta(
    base: Callable[[], Tensor], delta: Delta, form: LinearForm, *beside: Callable[[], None]
) -> Tensor:
    """The output of the base product with the delta added in place. `beside` are other sides of
    the fork, which may write parts of the output; they run first where nothing is forked."""
    device = delta.x.device
    if not runs_adapters(delta.tiles.tile_rows, device):
        return fork_join(device, base, *beside, parallel=form.is_dual)
    if form is LinearForm.STORED:
        return _add_stored(base, delta.beside(), *beside)
    pdl = supports_pdl(device)
    if form is LinearForm.SINGLE:
        out = fork_join(device, base, *beside, parallel=False)
        delta.shrink(pdl=pdl)
    else:
        delta = delta.beside() if form is LinearForm.DUAL else delta
        parallel = form is LinearForm.DUAL
        # nothing says what runs before the shrink on its stream
        out = fork_join(device, base, *beside, partial(delta.shrink, pdl=False), parallel=parallel)
    delta.expand(out, pdl=pdl, behind_base=form is not LinearForm.SINGLE)
    return out


def _add_stored(base: Callable[[], Tensor], delta: Delta, *beside: Callable[[], None]) -> Tensor:
    device, stored = delta.x.device, delta.stored()
    pdl = supports_pdl(device)
    out = fork_join(device, base, *beside, partial(delta.store, stored, pdl=pdl))
    launch_add(stored, delta.shape, delta.tiles, out, pdl=pdl)
    return out


def _output(x: Tensor, weight: Tensor, *others: object) -> Tensor:
    """What the operator returns for tensors without data."""
    return x.new_empty(x.shape[0], weight.shape[0])


@register_operator("lora_linear", mutates=("shrunk",), fake=_output)
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
    def base() -> Tensor:
        return F.linear(x, weight, bias)

    slots = SlotTensors(a, b, ranks, scales)
    delta = Delta.of(x, slots, slice_widths, TileTables(tile_slots, tile_rows, num_tiles), shrunk)
    plan = LinearForm(form) if form else plan_form(delta.shape, dual_stream=dual_stream(x.device))
    return add_delta(base, delta, plan)
