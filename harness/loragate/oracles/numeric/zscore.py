"""Small errors that many elements have in common: a factor on the delta, and one rounding more than
the subject promises. Both drown in the rounding of an element, and neither averages out.

For each (slot, slice), and at MoE sites each (slot, expert, slice), with e = subject - golden and
d = the golden delta:

* gain: <e, d> / <d, d>, less that of eager, which rounds B as the subject does. It is the factor
  by which the delta is too large. Roundings to nearest have no gain on average; its standard
  deviation is at most that of all roundings that any subject makes, with the errors of a row wholly
  in common.
* spread: sum(e^2), over what the promised roundings cost on average. That is a third of the square
  of half a step, or MANTISSA of its bound for a number whose size is unknown.

|z| <= 5 for both: one false alarm in two million for a normal sum. The variances are upper bounds:
of 26,000 right results of an H200 the largest z was 3.6, of 4,000 of the interpreter 2.5. A gain
below an eighth of the dtype's epsilon and a spread below 1.25 pass whatever their z, because the
model is no better than that: tensor cores truncate fp32 sums, which is a gain of up to 2^-24 for
each 16 features. Groups that are too small for their sum of squares to be nearly normal have no
spread. In fp32 the rules of reference.py see a thousandth of a percent, and quantised products have
errors that are rare and large: neither is judged here.

Power on 64 rows x 512 columns, rank 16, as the smallest z of six seeds, in bf16 / fp16: a scale
0.5 % too large 92 / 5900, 0.2 % too large 13 / 940; rank sums truncated 30 / 2600; rank sums
rounded twice 7 / 9; the delta rounded before it is added 11 / 10. Promised roundings stay below 3.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from loragate.inputs import torch_dtype
from loragate.inputs.pairs import OutRows
from loragate.matrix.case import (
    Case,
    Dtype,
    Parallel,
    Quantisation,
    Sharing,
    Site,
)
from loragate.oracles.numeric.compare import largest_of, ranks_of_errors
from loragate.oracles.numeric.errors import MANTISSA, RowErrors
from loragate.protocol import Pool, Rounding

_LIMIT = 5.0
_SPREAD = 1.25
# so many independent errors make their sum of squares nearly normal
_ENOUGH = 100
# the fourth moment of a normal number, with a margin for sums over few features
FOURTH_MOMENT = 4.0
# the same of the rounding errors of act, which is a product: few of them are large. 11 for normal
# gate and up, and more for gates of other sizes
_ACT_TAIL = 40.0


@dataclass(frozen=True, slots=True, order=True)
class Deviation:
    """`ratio` is |z| over its limit; 0 where nothing can be judged. `row` is one of the group."""

    ratio: float = 0.0
    z: float = 0.0
    value: float = 0.0
    row: int = 0
    part: int = 0
    is_gain: bool = True

    @property
    def sentence(self) -> str:
        if self.is_gain:
            size = "large" if self.value > 0 else "small"
            return f"the delta is {abs(self.value):.2%} too {size}, {abs(self.z):.3g} sigma"
        return (
            f"the squared errors are {self.value:.3g} times what the promised roundings cost, "
            f"{self.z:.3g} sigma: something else is rounded"
        )


@dataclass(frozen=True, slots=True)
class _Groups:
    """`of` int64 [rows], on the CPU as `rows` is: the group of each row, -1 for none. `rows` of the
    output."""

    of: Tensor
    rows: Tensor
    errors: RowErrors
    count: int
    experts: int

    def total(self, values: Tensor) -> Tensor:
        """[groups, slices] from [rows, slices]."""
        kept = (self.of >= 0).nonzero().flatten().to(values.device)
        sums = values.new_zeros(self.count, values.shape[1])
        return sums.index_add_(0, self.of.to(values.device)[kept], values[kept])

    def worst(self, z: Tensor, values: Tensor, *, is_gain: bool) -> Deviation:
        ratio = z.abs() / _LIMIT
        (group, part), found = largest_of(ratio, z, values)
        own = self.rows[self.of == group]
        if not len(own):
            return Deviation(is_gain=is_gain)
        return Deviation(*found, int(own[0]), part, is_gain)


def worst_deviation(
    case: Case,
    pool: Pool,
    rows: OutRows,
    pairs: OutRows | None,
    errors: RowErrors,
    promised: Collection[Rounding] | None,
) -> Deviation:
    """The most significant gain or spread. `rows` are those of the output, `pairs` those of an MoE
    site; `promised` is None where the subject promises nothing about its roundings."""
    if case.dtype is Dtype.FP32 or case.quantisation is not Quantisation.NONE:
        return Deviation()
    found = []
    for groups in _groups(case, rows, pairs, errors):
        found.append(_worst_gain(case, groups))
        # partial outputs of a row-parallel layer are rounded one by one
        if promised is not None and not (case.parallel is Parallel.ROW and case.tp > 1):
            found.append(_worst_spread(case, pool, groups, promised))
    return max(found)


def _groups(
    case: Case, rows: OutRows, pairs: OutRows | None, errors: RowErrors
) -> Iterator[_Groups]:
    every = torch.arange(len(rows.slots))
    yield _Groups(rows.slots.long(), every, errors, case.slots, 1)
    if pairs is None:
        return
    of = torch.where(pairs.slots < 0, -1, pairs.slots.long() * case.experts + pairs.experts.cpu())
    if case.site is Site.MOE_LAYER:
        every, errors = pairs.x_rows.cpu(), errors[pairs.x_rows]
    yield _Groups(of, every, errors, case.slots * case.experts, case.experts)


def _worst_gain(case: Case, groups: _Groups) -> Deviation:
    errors = groups.errors
    delta = groups.total(errors.delta_sq)
    total = groups.total(errors.gain - errors.eager_gain)
    shrunk = _pairs_alike(case) * MANTISSA * errors.shrunk_sq
    # twice: the errors of the subject and of eager
    variance = 2 * _rows_alike(case) * groups.total(errors.gain_noise + shrunk * errors.delta_sq)
    gain = torch.where(delta > 0, total / delta, 0.0)
    floor = torch.finfo(torch_dtype(case.dtype)).eps / 8
    floor += (case.x_columns + case.rank) * 2.0**-28
    z = torch.where(gain.abs() > floor, total / variance.sqrt(), 0.0)
    return groups.worst(z, gain, is_gain=True)


def _worst_spread(
    case: Case, pool: Pool, groups: _Groups, promised: Collection[Rounding]
) -> Deviation:
    errors, device = groups.errors, groups.errors.gain.device
    noise, fourth = errors.noise_sq, errors.noise_4
    if Rounding.DELTA in promised:
        noise, fourth = noise + errors.delta_noise_sq, fourth + errors.delta_noise_4
    shrunk = MANTISSA * errors.shrunk_sq
    if Rounding.SHRUNK not in promised and case.site is not Site.MOE_LAYER:
        shrunk = torch.zeros_like(shrunk)
    widths = torch.tensor(case.out_slices, device=device)
    ranks = torch.tensor(ranks_of_errors(pool), device=device)
    ranks = ranks.repeat_interleave(groups.experts, 0).clamp(min=1)
    # errors of the shrink output are common to all columns
    in_common = (FOURTH_MOMENT / ranks + act_in_common(case)).clamp(max=1) + 1 / widths
    variance = 2 * groups.total(fourth + 2 * noise * shrunk / widths)
    variance += 2 * _pairs_alike(case) * groups.total(shrunk.square()) * in_common
    variance *= _rows_alike(case)
    expected = groups.total(noise + shrunk)
    spread = torch.where(expected > 0, groups.total(errors.subject_sq) / expected, 0.0)
    judged = (spread > _SPREAD) & (2 * expected.square() > _ENOUGH * variance)
    z = torch.where(judged, (spread - 1) * expected / variance.sqrt(), 0.0)
    return groups.worst(z, spread, is_gain=False)


def act_in_common(case: Case) -> float:
    """The share of the squared errors of an MoE layer's act that a row has in common."""
    return _ACT_TAIL / case.slices[0] if case.site is Site.MOE_LAYER else 0.0


def _pairs_alike(case: Case) -> int:
    """How many rows may have the same shrink output: the pairs of a token, if experts share A."""
    return case.top_k if case.sharing is Sharing.SHARED_A else 1


def _rows_alike(case: Case) -> int:
    """How many rows may have all their errors in common: those of an id of an embedding, and all of
    them where x has one column, for they are multiples of each other."""
    if case.site is Site.EMBEDDING:
        return max(1, -(-case.tokens // case.in_features))
    cut = case.tp if case.parallel is Parallel.ROW else 1
    return max(1, case.tokens * case.top_k) if case.in_features <= cut else 1
