"""The rows of a step and the base layer.

SIGNED: x ~ N(0, 1), with -1 or 1 in its last column, which meets the heavy column of A. The base
is a quarter of a delta in size: its rounding does not drown the delta, and a lost base still
shows. EXACT: see exactness.py. The rows of an embedding are ids: see vocabulary.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.inputs.draw import DataKind, Draw, torch_dtype
from loragate.inputs.exact_layer import exact_layer_x
from loragate.inputs.exactness import exact_base_rows, exact_bias, exact_weight, exact_x
from loragate.inputs.mapping import BASE_ROW, make_token_slots
from loragate.inputs.placement import Band, copy_placed, place
from loragate.inputs.routing import make_routes
from loragate.inputs.vocabulary import make_ids
from loragate.matrix.case import Bias, Case, Layout, Quantisation, Site
from loragate.protocol import BaseLayer, Batch

BASE_SIZE = 0.25
_ALIGNED_MARGIN, _ODD_MARGIN = 16, 3
# where it is not that of the case
_LAYOUT_OF_X = {Layout.OUTPUT_SLICE: Layout.CONTIGUOUS}
_LAYOUT_OF_OUT = {Layout.OUTPUT_SLICE: Layout.COLUMN_SLICE, Layout.TRANSPOSED: Layout.CONTIGUOUS}


def make_batch(case: Case, seed: int, step: int, kind: DataKind, machine: Machine) -> Batch:
    """Step number `step` of a case. Each step has other rows, other lengths, another idle slot.

    x [tokens, in_features], or ids [tokens, 1], and out [tokens, out_features], or rows for
    token-expert pairs, lie inside guard bands. Whether a column slice is aligned to 32 bytes or not
    at all depends on the seed.
    """
    draw = Draw(machine, seed, f"batch-{kind}", step)
    margin = _ALIGNED_MARGIN if seed % 2 else _ODD_MARGIN
    # each is placed before the next one is drawn: a large one leaves no memory for both twice
    x_layout = _LAYOUT_OF_X.get(case.layout, case.layout)
    x = place(_rows(case, seed, step, draw, kind), x_layout, margin=margin)
    out_layout = _LAYOUT_OF_OUT.get(case.layout, case.layout)
    out = place(_base_rows(case, draw, kind), out_layout, margin=margin, band=Band.NUMBER)
    token_slots = make_token_slots(case, seed, step)
    if case.quantisation is not Quantisation.NONE:
        # as padding is, of which no largest value makes a scale
        x[(token_slots == BASE_ROW).nonzero().flatten()[-1:].to(x.device)] = 0
    return Batch(
        x,
        token_slots,
        out,
        make_routes(case, seed, step, kind, machine, token_slots),
    )


def _rows(case: Case, seed: int, step: int, draw: Draw, kind: DataKind) -> Tensor:
    if case.site is Site.EMBEDDING:
        return make_ids(case, seed, step, draw)
    if kind is DataKind.EXACT:
        sparse = exact_layer_x if case.site is Site.MOE_LAYER else exact_x
        return sparse(draw, case.x_rows, case.in_features, torch_dtype(case.dtype))
    x = draw.normal(case.x_rows, case.in_features, dtype=torch_dtype(case.dtype))
    x[:, -1] = draw.signs(case.x_rows)
    return x


def _base_rows(case: Case, draw: Draw, kind: DataKind) -> Tensor:
    shape, dtype = (case.out_rows, case.out_features), torch_dtype(case.dtype)
    if kind is DataKind.EXACT:
        return exact_base_rows(draw, *shape, dtype)
    return draw.normal(*shape, dtype=dtype, then=lambda values: values.mul_(BASE_SIZE))


def copy_batch(batch: Batch) -> Batch:
    """The same step in memory of its own, with guard bands of its own."""
    routes = batch.routes
    if routes is not None:
        weights = None if routes.weights is None else copy_placed(routes.weights)
        table = None if routes.expert_map is None else copy_placed(routes.expert_map)
        ids = copy_placed(routes.topk_ids)
        routes = replace(routes, topk_ids=ids, expert_map=table, weights=weights)
    return Batch(copy_placed(batch.x), batch.token_slots.clone(), copy_placed(batch.out), routes)


def reordered_rows(batch: Batch, rows: Tensor) -> Batch:
    """Token i of the result is token `rows[i]` (int64, CPU), with all its pairs; layout and
    guard bands stay."""
    result = copy_batch(batch)
    tensors = [
        (result.x, batch.x),
        (result.out, batch.out),
        (result.token_slots, batch.token_slots),
    ]
    if batch.routes is not None and result.routes is not None:
        tensors.append((result.routes.topk_ids, batch.routes.topk_ids))
        if batch.routes.weights is not None and result.routes.weights is not None:
            tensors.append((result.routes.weights, batch.routes.weights))
    for moved, values in tensors:
        index = rows_of(rows, len(values) // max(len(rows), 1))
        moved.copy_(values[index.to(values.device)])
    return result


def rows_of(tokens: Tensor, per_token: int) -> Tensor:
    """int64: the rows of these tokens in a tensor that has `per_token` rows for each token."""
    return (tokens[:, None] * per_token + torch.arange(per_token)).flatten()


def make_base(case: Case, seed: int, kind: DataKind, machine: Machine) -> BaseLayer:
    """The full layer of a site with one, before any tensor-parallel cut."""
    draw = Draw(machine, seed, f"base-{kind}")
    dtype = torch_dtype(case.dtype)
    shape = (case.out_features, case.in_features)
    if case.site is Site.EMBEDDING:
        # a row is looked up: nothing is added up
        shape, size = shape[::-1], BASE_SIZE
    else:
        size = BASE_SIZE / math.sqrt(case.in_features)
    if kind is DataKind.EXACT:
        weight = exact_weight(draw, *shape, dtype)
        bias = exact_bias(draw, case.out_features)
    else:
        weight = draw.normal(*shape, dtype=dtype, then=lambda values: values.mul_(size))
        bias = draw.normal(case.out_features) * BASE_SIZE
    has_bias = case.site is Site.LORA_LINEAR and case.bias is Bias.PRESENT
    return BaseLayer(weight, bias.to(dtype) if has_bias else None)
