"""Data of a whole MoE layer that leaves nothing to round.

silu rounds, except for arguments of at least 128 in magnitude: exp(-128) vanishes beside 1 and
exp(128) overflows fp32, so that silu gives its argument or zero in every dtype. By construction:

* a row of x has a single 1, A is all -1 and 1: the shrink output of gate and up is -1 or 1
* gate is 256 in one column of each expert, depending on the column of x, and -256 in all others;
  adapters add -128 or 128, so that silu(gate) is zero or 128 * n with n of 1 to 3
* up is -2 or 2, adapters add -1 or 1; without a gate, up is made like a gate
* act thus has one nonzero in a row, at most 9 * 128; down is -2/128 or 2/128, adapters add
  -1/128 or 1/128 of it: an output is an integer of at most 27
* router weights are 1 and 2 for few choices, else 0 and 1, of which at most 9 are 1: no sum of
  magnitudes is above 243, however many ranks of a group add up
* biases, where experts have them: -128 or 128 of gate, so that silu(gate) is zero or 128 * n with n
  of 1 to 4, -1 or 1 of up, and integers of at most 3 of down. An output is then at most 51, and
  fewer choices have a weight

gelu by tanh gives its argument or zero of such data as well.

Each B is divided by the scale of its adapter, a power of two: a lost scale changes the result.
None of that depends on the sizes of the layer or on the rank.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from loragate.inputs.draw import Draw, torch_dtype
from loragate.matrix.case import Bias, Case, RouterWeights

_GATE, _DOWN = 128.0, 1 / 128
# how many choices may have weights of 1 and 2 with all sums below 256, and how many a weight of 1
_MOST_TWICE = {RouterWeights.OUTPUT: 4, RouterWeights.INPUT: 2}
_MOST_ONCE = 9
# the same where experts have biases
_MOST_TWICE_BIASED, _MOST_ONCE_BIASED = 2, 4


def exact_layer_x(draw: Draw, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """[rows, width]. Every fourth row, the first one included, has its 1 in the last column."""
    column = draw.integers(0, width, rows, 1)
    column[::4] = width - 1
    return torch.zeros(rows, width, dtype=dtype, device=draw.device).scatter_(1, column, 1.0)


def exact_layer_weights(draw: Draw, case: Case) -> Tensor:
    """fp32 [tokens, top_k]"""
    shape = (case.tokens, case.top_k)
    biased = case.expert_bias is Bias.PRESENT
    if case.top_k <= (_MOST_TWICE_BIASED if biased else _MOST_TWICE[case.router]):
        return draw.integers(1, 3, *shape).float()
    place = torch.argsort(draw.uniform(0, 1, *shape), dim=1, stable=True)
    most = _MOST_ONCE_BIASED if biased else _MOST_ONCE
    return (place < min(case.top_k - 1, most)).float()


def exact_w13(draw: Draw, case: Case, dtype: torch.dtype) -> Tensor:
    """[experts, sum(slices), in_features]"""
    experts, width = case.experts, case.slices[0]
    positive = draw.integers(0, width, experts, 1, case.in_features)
    # a lost tail loses the last column first
    positive[draw.uniform(0, 1, *positive.shape) < 0.25] = width - 1
    shape = (experts, sum(case.slices), case.in_features)
    w13 = torch.full(shape, -2 * _GATE, dtype=dtype, device=draw.device)
    w13[:, :width].scatter_(1, positive, 2 * _GATE)
    if len(case.slices) == 2:
        w13[:, width:] = draw.signs(experts, width, case.in_features, dtype=dtype).mul_(2)
    return w13


def exact_w2(draw: Draw, case: Case, dtype: torch.dtype) -> Tensor:
    """[experts, in_features, intermediate]"""
    shape = (case.experts, case.in_features, case.slices[0])
    return draw.signs(*shape, dtype=dtype).mul_(2 * _DOWN)


def exact_biases(draw: Draw, case: Case) -> tuple[Tensor, Tensor]:
    """Of gate and up, or of up alone [experts, sum(slices)]; of down [experts, in_features]."""
    experts, width = case.experts, case.slices[0]
    first = _GATE * draw.signs(experts, width)
    if len(case.slices) == 2:
        first = torch.cat([first, draw.signs(experts, width)], 1)
    return first, draw.integers(-3, 4, experts, case.in_features).float()


def exact_layer_b(
    draw: Draw,
    case: Case,
    experts: tuple[int, ...],
    ranks: tuple[tuple[int, ...], ...],
    scales: tuple[tuple[float, ...], ...],
    *,
    is_down: bool,
) -> tuple[Tensor, ...]:
    """One number in each column; consecutive columns take consecutive live ranks, beginning
    with the last."""
    parts = []
    for part, width in enumerate(case.slices):
        shape = (case.slots, *experts, width, case.rank)
        b = torch.zeros(shape, dtype=torch_dtype(case.dtype), device=draw.device)
        columns = prod(experts) * width
        place = torch.arange(columns, device=draw.device)[:, None]
        unit = _DOWN if is_down else (_GATE, 1.0)[part]
        for slot, row in enumerate(ranks):
            rank = max(row[part], 1)
            values = unit / scales[slot][part] * draw.signs(columns, 1)
            b[slot].view(columns, case.rank).scatter_(
                1, rank - 1 - place % rank, values.to(b.dtype)
            )
        parts.append(b)
    return tuple(parts)
