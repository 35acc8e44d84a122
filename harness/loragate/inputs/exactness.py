"""Data that leaves nothing to round: floating-point addition is then associative.

By construction, in units of UNIT:
* a row of x has at most X_NONZEROS entries of -1 or 1, A is all -1 and 1: |x @ A.T| <= 9
* a row of B has at most B_NONZEROS entries of -1 or 1: any partial sum of a delta is <= 27
* scales are powers of two from UNIT to 4, of either sign, so a delta is a multiple of UNIT and
  <= 108; with router weights of 0, 1 and 2 scales end at 2
* a base value is a multiple of UNIT and <= 8

Every partial sum, every cast of an intermediate and the sum with the base is thus a multiple of
UNIT of at most 116 = 232 UNITs, and representable in bf16 (256), fp16 (2048) and fp32. None of
that depends on in_features or the rank. The oracle checks it on the data itself.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from loragate.inputs.draw import Draw, torch_dtype
from loragate.matrix.case import Case, RouterWeights

UNIT = 0.5
# odd: a sum of that many signs is never zero
X_NONZEROS = 9
B_NONZEROS = 3
_SCALES = {RouterWeights.NONE: (UNIT, 4.0, 2.0), RouterWeights.OUTPUT: (UNIT, 2.0)}
# multiples of UNIT that are exact in the narrowest dtype, bf16
EXACT_UNITS = 256
# of B whose places are made together: bounds what they take beside it
_COLUMNS_AT_ONCE = 1 << 20
_NO_WEIGHT = 0.1


def exact_scale(index: int, router: RouterWeights) -> float:
    scales = _SCALES[router]
    return sign_of_scale(index) * scales[index % len(scales)]


def sign_of_scale(index: int) -> int:
    """Neighbouring slots, and neighbouring slices, have scales of different signs."""
    return -1 if index % 2 else 1


def exact_router_weights(draw: Draw, tokens: int, top_k: int) -> Tensor:
    """Of 1 and 2, and in a tenth of the pairs 0, as of a token beyond the capacity of an expert."""
    weights = draw.integers(1, 3, tokens, top_k).float()
    return weights.masked_fill(draw.uniform(0, 1, tokens, top_k) < _NO_WEIGHT, 0.0)


def exact_x(draw: Draw, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """[rows, width]. The last column is never zero; a second nonzero moves over the width."""
    columns = draw.integers(0, width, rows, X_NONZEROS)
    columns[:, 0] = width - 1
    walk = torch.arange(rows, device=draw.device) * max(1, width // max(rows, 1))
    columns[:, 1] = (walk + columns[:, 1] % max(1, width // max(rows, 1))) % width
    x = torch.zeros(rows, width, dtype=dtype, device=draw.device)
    return _place(x, columns, draw.signs(rows, X_NONZEROS))


def exact_a(draw: Draw, case: Case, experts: tuple[int, ...]) -> Tensor:
    shape = (case.slots, *experts, len(case.slices), case.rank, case.in_features)
    return draw.signs(*shape, dtype=torch_dtype(case.dtype))


def exact_b(
    draw: Draw, case: Case, experts: tuple[int, ...], ranks: tuple[tuple[int, ...], ...]
) -> tuple[Tensor, ...]:
    """Column j takes the next live ranks, beginning with the last, so that together the
    columns of a slot use as many ranks as they can."""
    parts = []
    for part, width in enumerate(case.slices):
        shape = (case.slots, *experts, width, case.rank)
        b = torch.zeros(shape, dtype=torch_dtype(case.dtype), device=draw.device)
        columns = prod(experts) * width
        place = torch.arange(columns * B_NONZEROS, device=draw.device)
        slots_at_once = max(1, _COLUMNS_AT_ONCE // columns)
        own = torch.tensor([max(row[part], 1) for row in ranks]).to(draw.device)[:, None]
        pieces = torch.split(b, slots_at_once), torch.split(own, slots_at_once)
        for some, live in zip(*pieces, strict=True):
            index = (live - 1 - place % live).view(-1, B_NONZEROS)
            signs = torch.cat([draw.signs(columns, B_NONZEROS) for _ in some])
            _place(some.view(-1, case.rank), index, signs)
        parts.append(b)
    return tuple(parts)


def _place(target: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    """Put values[:, j] into target[:, columns[:, j]]; of two for the same place the later wins."""
    # in a single scatter either could win on a GPU: different data from the same seed
    values = values.to(target.dtype)
    for column, value in zip(torch.split(columns, 1, 1), torch.split(values, 1, 1), strict=True):
        target.scatter_(1, column, value)
    return target


def exact_base_rows(draw: Draw, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Output of a base layer, for a site that adds to it."""
    return draw.integers(-8, 9, rows, width, dtype=dtype, then=lambda values: values * UNIT)


def exact_weight(draw: Draw, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return draw.signs(rows, width, dtype=dtype).mul_(UNIT)


def exact_bias(draw: Draw, rows: int) -> Tensor:
    return draw.integers(-4, 5, rows) * UNIT
