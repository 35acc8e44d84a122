"""The input projection of a gated delta net as one opaque operator: two base products of one input,
qkvz and ba, and the delta of the adapters of both, which is one shrink and one expand.

All forms write the columns of one output, [qkvz | ba]. Its layout is therefore the same for every
form, and a traced graph does not depend on which form a batch takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.common.choices import choice_number
from lorakernels.common.stacked_weights import SlotTensors
from lorakernels.dense.check import check_step
from lorakernels.dense.forms import LinearForm
from lorakernels.dense.launch import TileTables
from lorakernels.dense.linear import Delta, add_delta
from lorakernels.dense.ops import DenseWorkspace
from lorakernels.dense.weights import SlotWeights
from lorakernels.gdn.forms import GDNForm, check_form, plan_gdn
from lorakernels.gdn.products import BaseProduct
from lorakernels.runtime.operators import register_operator
from lorakernels.runtime.options import dual_stream


def gdn_in_proj(
    x: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    qkvz_features: int,
    slots: SlotWeights,
    metadata: BatchMetadata,
    workspace: DenseWorkspace,
    *,
    form: GDNForm | None = None,
) -> Tensor:
    """x [rows, in_features] @ weight.T + the delta of each row's slot: [rows, columns of both].

    weights: one contiguous tensor, `qkvz_features` rows of qkvz above those of ba; or two, where
    only one of them is quantised. scales: for each of them fp32 [its rows] if its values are 8-bit
    floats, else None. form: None lets the plan choose. Raises ValueError.
    """
    check_step(x, slots, metadata)
    check_form(form, is_one_format=len(weights) == 1)
    out: Tensor = torch.ops.lorakernels.gdn_in_proj(
        x,
        list(weights),
        list(scales),
        qkvz_features,
        slots.a,
        slots.b,
        slots.ranks,
        slots.scales,
        list(slots.slice_widths),
        metadata.tile_slots,
        metadata.tile_rows,
        metadata.num_tiles,
        workspace.buffers,
        choice_number("form", form, GDNForm),
    )
    return out


def _output(x: Tensor, weights: list[Tensor], *others: object) -> Tensor:
    """What the operator returns for tensors without data."""
    return x.new_empty(x.shape[0], sum(weight.shape[0] for weight in weights))


@register_operator("gdn_in_proj", mutates=("shrunk",), fake=_output)
def _gdn_in_proj(
    x: Tensor,
    weights: list[Tensor],
    base_scales: Sequence[Tensor | None],
    qkvz_features: int,
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
    slots = SlotTensors(a, b, ranks, scales)
    delta = Delta.of(x, slots, slice_widths, TileTables(tile_slots, tile_rows, num_tiles), shrunk)
    products = [BaseProduct(*operands) for operands in zip(weights, base_scales, strict=True)]
    plan = GDNForm(form) if form else _plan(delta, products)
    if plan is GDNForm.MERGED or plan is GDNForm.BESIDE:
        (product,) = products
        linear = LinearForm.SINGLE if plan is GDNForm.MERGED else LinearForm.DUAL
        return add_delta(lambda: product(x), delta, linear)
    two = products if len(products) > 1 else products[0].split(qkvz_features)
    qkvz, ba = _writers(x, two, qkvz_features)
    linear = LinearForm.SINGLE if plan is GDNForm.SERIAL else LinearForm.DUAL
    return add_delta(qkvz, delta, linear, ba)


def _plan(delta: Delta, products: Sequence[BaseProduct]) -> GDNForm:
    # where a rank's columns do not fit together, those of qkvz alone mostly do
    may_join = len(products) == 1 and products[0].fits_tensor_cores
    return plan_gdn(delta.shape, dual_stream=dual_stream(delta.x.device), may_join=may_join)


def _writers(
    x: Tensor, products: Sequence[BaseProduct], qkvz_features: int
) -> tuple[Callable[[], Tensor], Callable[[], None]]:
    """Two products that write one output, which is allocated here, before any fork. The first one
    returns it, and none of it is complete before both are."""
    of_qkvz, of_ba = products
    out = x.new_empty(x.shape[0], qkvz_features + of_ba.weight.shape[0])

    def qkvz() -> Tensor:
        of_qkvz.write(x, out[:, :qkvz_features])
        return out

    def ba() -> None:
        of_ba.write(x, out[:, qkvz_features:])

    return qkvz, ba
