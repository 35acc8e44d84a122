"""EXACT data with large terms that cancel, so that what is added has more digits than the dtype and
the results have as few as before. Whoever rounds in between loses the small terms.

The first column of x is 1. One rank of each adapter, the last live one, reads that column alone,
and subtracts a large number of alternating sign from every column of the output.

* Where a delta is added to a base output, the base output is that large number: a delta that is
  rounded before it is added loses what the other ranks give.
* In moe_layer the first column of x adds the large number to up. The other terms of the base
  product are added to it before the delta is, so that the base product must not be rounded either.
* act has a single value in a row. The weights of down have a large number in common, which the last
  rank of down subtracts. Every second expert gives a multiple of what the others give, so that a
  sum over the choices of a token has more digits than its terms: the result is rounded once.

By construction no sum leaves 2^17 units of the smallest term, which fp32 holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from loragate.inputs.base_experts import in_halves, laid_out
from loragate.inputs.batch import copy_batch
from loragate.inputs.pairs import out_rows
from loragate.inputs.pool_changes import copied
from loragate.matrix.case import (
    Activation,
    Case,
    Dtype,
    Parallel,
    Quantisation,
    Site,
    Write,
)
from loragate.protocol import BaseExperts, BaseLayer, Batch, Pool

_SITES = frozenset(
    {Site.DENSE_DELTA, Site.LORA_LINEAR, Site.GDN_IN_PROJ, Site.MOE_DELTA, Site.MOE_LAYER}
)
# beside which a few units are lost, whatever the scale; half a scale and a router weight of 2 leave
# it in the range of the dtype
_LARGE: Mapping[Dtype, float] = MappingProxyType({Dtype.FP16: 2.0**14, Dtype.BF16: 2.0**13})
# in units of the smallest weight of down: odd, so that multiples of a sum with 2 have many digits,
# and a number of the dtype with 2 more or less
_OF_DOWN: Mapping[Dtype, int] = MappingProxyType({Dtype.FP16: 1373, Dtype.BF16: 173})
_DOWN = 1 / 128
# of every second expert. An output is at most 27 with a router weight of 1, or 54 with 2, and a sum
# over choices stays in the range of the dtype
_MULTIPLE: Mapping[Dtype, int] = MappingProxyType({Dtype.FP16: 256, Dtype.BF16: 64})


@dataclass(frozen=True, slots=True)
class Cancelling:
    """`rows` bool [rows of the output], on the CPU: those in which all large terms cancel."""

    pool: Pool
    batch: Batch
    base: BaseLayer | None
    rows: Tensor


def has_cancelling(case: Case) -> bool:
    """Whether a case has such data. What ranks add up to an output is rounded one by one."""
    if case.site not in _SITES or case.dtype not in _LARGE or case.in_features < 2:
        return False
    if case.quantisation is not Quantisation.NONE or case.write is Write.STORE:
        return False
    adds_up = case.site is Site.MOE_LAYER or case.parallel is Parallel.ROW
    if adds_up and case.tp * case.ep > 1:
        return False
    return case.activation is not Activation.SWIGLU_OAI


def cancelling(case: Case, pool: Pool, batch: Batch, base: BaseLayer | None) -> Cancelling:
    """Made of EXACT data, which stay as they are."""
    pool, batch, large = _with_all_slices(copied(pool)), copy_batch(batch), _LARGE[case.dtype]
    if case.site is Site.MOE_LAYER:
        # a row has its 1 elsewhere
        batch.x[:, -1] += batch.x[:, 0]
    batch.x[:, 0] = 1
    for part in range(len(case.slices)):
        size = 0.0 if _is_activated(case, part) else large
        _read_first_column(pool, part, size * _signs(case.slices, batch.x)[part])
    rows = torch.ones(len(batch.out), dtype=torch.bool)
    if isinstance(base, BaseExperts):
        base = _large_experts(case, pool, base)
        rows = batch.token_slots.cpu() >= 0
    elif base is not None:
        weight = torch.zeros_like(base.weight)
        weight[:, 0] = large * torch.cat(_signs(case.slices, weight))
        base = BaseLayer(weight, None if base.bias is None else torch.zeros_like(base.bias))
    else:
        weights = out_rows(batch).weights
        start = large * torch.cat(_signs(case.slices, batch.out))
        batch.out.copy_(start if weights is None else weights[:, None] * start)
    return Cancelling(pool, batch, base, rows)


def _is_gated(case: Case) -> bool:
    return len(case.slices) == 2


def _is_activated(case: Case, part: int) -> bool:
    """Whether silu takes the slice: gate, or up where there is no gate."""
    return case.site is Site.MOE_LAYER and part == 0


def _signs(widths: Sequence[int], like: Tensor) -> tuple[Tensor, ...]:
    """fp32 [width] for each slice: -1 and 1 in turn."""
    signs = 1.0 - 2.0 * (torch.arange(sum(widths), device=like.device) % 2)
    return torch.split(signs, list(widths))


def _read_first_column(pool: Pool, part: int, columns: Tensor) -> None:
    """The last live rank of a slice subtracts `columns` wherever the first column of x is 1; the
    others do not read that column."""
    for a, b, rank, scale in _adapters(pool, part):
        a[..., :rank, 0] = 0
        a[..., rank - 1, :] = 0
        a[..., rank - 1, 0] = 1
        b[..., rank - 1] = (-columns / scale).to(b.dtype)


def _read_all_columns(pool: Pool, columns: Tensor) -> None:
    """The last live rank subtracts `columns` times the sum of a row."""
    for a, b, rank, scale in _adapters(pool, 0):
        a[..., rank - 1, :] = 1
        b[..., rank - 1] = (-columns / scale).to(b.dtype)


def _with_all_slices(pool: Pool) -> Pool:
    """The same adapters with a rank of 1, all zero, in slices that they do not have."""
    ranks = tuple(tuple(max(rank, 1) for rank in row) for row in pool.ranks)
    return replace(pool, ranks=ranks, down=pool.down and _with_all_slices(pool.down))


def _adapters(pool: Pool, part: int) -> list[tuple[Tensor, Tensor, int, float]]:
    """A, B, rank and scale of a slice in all slots."""
    return [
        (pool.a[slot][..., part, :, :], pool.b[part][slot], row[part], pool.scales[slot][part])
        for slot, row in enumerate(pool.ranks)
    ]


def _large_experts(case: Case, pool: Pool, base: BaseExperts) -> BaseExperts:
    """The layer whose large terms the adapters subtract; those of down are made to, too."""
    assert pool.down is not None
    halves, width = in_halves(case, base.weight).clone(), case.slices[0]
    halves[..., 0] = 0
    if _is_gated(case):
        up = _LARGE[case.dtype] * _signs(case.slices, halves)[1]
        halves[:, width:, 0] = up.to(halves.dtype)
    common = _OF_DOWN[case.dtype] * _DOWN * _signs(case.out_slices, halves)[0]
    _read_all_columns(pool.down, common)
    down, b = base.down + common[:, None].to(base.down.dtype), pool.down.b[0]
    # the output of a pair is rounded, to which a bias would add digits
    if b.shape[1] == case.experts and base.down_bias is None:
        b[:, 1::2] *= _MULTIPLE[case.dtype]
        down[1::2] *= _MULTIPLE[case.dtype]
    return replace(base, weight=laid_out(case, halves), down=down)
