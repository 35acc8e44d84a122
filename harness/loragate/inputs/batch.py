"""The rows of a step and the base layer.

SIGNED: x ~ N(0, 1), its last column -1 or 1 like the heavy column of A. The base is a quarter
of a delta in size: its rounding does not drown the delta, and it is still far too large to be
lost unnoticed. EXACT: see exactness.py.
"""

from __future__ import annotations

import math

from torch import Tensor

from loragate.inputs.draw import DataKind, Draw, torch_dtype
from loragate.inputs.exactness import exact_base_rows, exact_bias, exact_weight, exact_x
from loragate.inputs.mapping import make_token_slots
from loragate.inputs.placement import Band, copy_placed, place
from loragate.machine import Machine
from loragate.matrix.case import Case, Layout
from loragate.subjects.protocol import BaseLayer, Batch

_BASE_SIZE = 0.25
_ALIGNED_MARGIN, _ODD_MARGIN = 16, 3


def make_batch(case: Case, seed: int, step: int, kind: DataKind, machine: Machine) -> Batch:
    """Step number `step` of a case: other rows, other lengths, another idle slot in each.

    x [tokens, in_features] and out [tokens, out_features] lie inside guard bands. A column
    slice is aligned to 32 bytes or to nothing at all, as the seed has it.
    """
    draw = Draw(machine, seed, f"batch-{kind}", step)
    if kind is DataKind.EXACT:
        x = exact_x(draw, case.tokens, case.in_features)
        out = exact_base_rows(draw, case.tokens, case.out_features)
    else:
        x = draw.normal(case.tokens, case.in_features)
        x[:, -1] = draw.signs(case.tokens)
        out = draw.normal(case.tokens, case.out_features) * _BASE_SIZE
    margin = _ALIGNED_MARGIN if seed % 2 else _ODD_MARGIN
    out_layout = Layout.CONTIGUOUS if case.layout is Layout.TRANSPOSED else case.layout
    dtype = torch_dtype(case.dtype)
    return Batch(
        place(x.to(dtype), case.layout, margin=margin),
        make_token_slots(case, seed, step),
        place(out.to(dtype), out_layout, margin=margin, band=Band.NUMBER),
    )


def copy_batch(batch: Batch) -> Batch:
    """The same step again, in memory of its own with guard bands of its own."""
    return Batch(copy_placed(batch.x), batch.token_slots.clone(), copy_placed(batch.out))


def reordered_rows(batch: Batch, rows: Tensor) -> Batch:
    """Row i of the result is row `rows[i]` (int64, CPU); layout and guard bands stay."""
    result = copy_batch(batch)
    index = rows.to(batch.x.device)
    result.x.copy_(batch.x[index])
    result.out.copy_(batch.out[index])
    result.token_slots.copy_(batch.token_slots[rows])
    return result


def make_base(case: Case, seed: int, kind: DataKind, machine: Machine) -> BaseLayer:
    """The full layer of lora_linear, before any tensor-parallel cut."""
    draw = Draw(machine, seed, f"base-{kind}")
    dtype = torch_dtype(case.dtype)
    if kind is DataKind.EXACT:
        weight = exact_weight(draw, case.out_features, case.in_features)
        bias = exact_bias(draw, case.out_features)
    else:
        size = _BASE_SIZE / math.sqrt(case.in_features)
        weight = draw.normal(case.out_features, case.in_features) * size
        bias = draw.normal(case.out_features) * _BASE_SIZE
    return BaseLayer(weight.to(dtype), bias.to(dtype))
