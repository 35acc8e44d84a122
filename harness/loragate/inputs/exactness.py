"""Data that leaves nothing to round: floating-point addition is then associative.

By construction, in units of UNIT:
* a row of x has at most X_NONZEROS entries of -1 or 1, A is all -1 and 1: |x @ A.T| <= 9
* a row of B has at most B_NONZEROS entries of -1 or 1: any partial sum of a delta is <= 27
* scales are powers of two from UNIT to 4, so a delta is a multiple of UNIT and <= 108
* a base value is a multiple of UNIT and <= 8

Every partial sum, every cast of an intermediate and the sum with the base is thus a multiple of
UNIT of at most 116 = 232 UNITs, and representable in bf16 (256), fp16 (2048) and fp32. None of
that depends on in_features or the rank. `assert_exact` checks it on the data itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loragate.inputs.draw import Draw
from loragate.matrix.case import Case
from loragate.subjects.protocol import BaseLayer, Batch, Pool

UNIT = 0.5
# odd: a sum of as many signs is never zero
X_NONZEROS = 9
B_NONZEROS = 3
_SCALES = (UNIT, 4.0, 2.0)
# multiples of UNIT that are exact in the narrowest dtype, bf16
_EXACT_UNITS = 256


def exact_scale(index: int) -> float:
    return _SCALES[index % len(_SCALES)]


def exact_x(draw: Draw, rows: int, width: int) -> Tensor:
    """[rows, width]. The last column is never zero, a second one walks over the width."""
    columns = draw.integers(0, width, rows, X_NONZEROS)
    columns[:, 0] = width - 1
    walk = torch.arange(rows, device=draw.device) * max(1, width // max(rows, 1))
    columns[:, 1] = (walk + columns[:, 1] % max(1, width // max(rows, 1))) % width
    x = torch.zeros(rows, width, device=draw.device)
    return _place(x, columns, draw.signs(rows, X_NONZEROS))


def exact_a(draw: Draw, case: Case) -> Tensor:
    return draw.signs(case.slots, len(case.slices), case.rank, case.in_features)


def exact_b(draw: Draw, case: Case, ranks: tuple[tuple[int, ...], ...]) -> tuple[Tensor, ...]:
    """Column j takes the next live ranks, beginning with the last, so that together the
    columns use as many ranks as they can."""
    parts = []
    for part, width in enumerate(case.slices):
        b = torch.zeros(case.slots, width, case.rank, device=draw.device)
        for slot, row in enumerate(ranks):
            rank = max(row[part], 1)
            place = torch.arange(width * B_NONZEROS, device=draw.device)
            index = (rank - 1 - place % rank).view(width, B_NONZEROS)
            _place(b[slot], index, draw.signs(width, B_NONZEROS))
        parts.append(b)
    return tuple(parts)


def _place(target: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    """Put values[:, j] into target[:, columns[:, j]]; of two in one place the later stays."""
    # one scatter for all would let either win on a GPU: other data from the same seed
    places = zip(torch.split(columns, 1, 1), torch.split(values, 1, 1), strict=True)
    for column, value in places:
        target.scatter_(1, column, value)
    return target


def exact_base_rows(draw: Draw, rows: int, width: int) -> Tensor:
    """Output of a base layer, for a site that adds to it."""
    return draw.integers(-8, 9, rows, width) * UNIT


def exact_weight(draw: Draw, rows: int, width: int) -> Tensor:
    return draw.signs(rows, width) * UNIT


def exact_bias(draw: Draw, rows: int) -> Tensor:
    return draw.integers(-4, 5, rows) * UNIT


def assert_exact(pool: Pool, batch: Batch, base: BaseLayer | None) -> None:
    """Check the promise in fp64: no sum of magnitudes leaves the exact range."""
    x = batch.x.double().abs()
    start = torch.zeros_like(batch.out, dtype=torch.float64) if base else batch.out.double().abs()
    if base is not None:
        bias = 0.0 if base.bias is None else base.bias.double().abs()
        start = x @ base.weight.double().abs().T + bias
    assert start.remainder(UNIT).count_nonzero() == 0, "base values off the grid"
    for slot in range(pool.num_slots):
        rows = (batch.token_slots == slot).nonzero().flatten().to(x.device)
        column = 0
        for part, b in enumerate(pool.b):
            rank, width = pool.ranks[slot][part], b.shape[1]
            shrunk = x[rows] @ pool.a[slot, part, :rank].double().abs().T
            delta = pool.scales[slot][part] * (shrunk @ b[slot, :, :rank].double().abs().T)
            assert delta.remainder(UNIT).count_nonzero() == 0, "delta off the grid"
            start[rows, column : column + width] += delta
            column += width
    top = start.max().item() if start.numel() else 0.0
    assert top <= _EXACT_UNITS * UNIT, f"a sum of magnitudes reaches {top}"
