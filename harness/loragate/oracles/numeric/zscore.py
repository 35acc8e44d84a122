"""Small errors that many elements have in common: a factor on the delta, and one rounding more than
the subject promises. Both drown in the rounding of an element, and neither averages out.

For each (slot, slice), and at MoE sites each (slot, expert, slice), with e = subject - golden and
d = the golden delta:

* gain <e, d> / <d, d>, less that of eager, which rounds B as the subject does: the factor by which
  the delta is too large. Roundings to nearest have no gain on average; its standard deviation is at
  most that of all roundings that any subject makes, with the errors of a row wholly in common.
* spread sum(e^2), over what the promised roundings cost on average: half a step squared over three
  for each element that is rounded, and _MANTISSA of that bound for a number whose size is unknown.

|z| <= 6.5 for both: one false alarm in 10^10 for a normal sum. A gain below an eighth of the dtype's
epsilon and a spread below 1.25 pass whatever their z, for the model is no better than that: tensor
cores truncate fp32 sums, which is a gain of up to 2^-24 in 16 columns. Groups that are too small
for a spread to be nearly normal are not judged. In fp32 the rules of reference.py see a thousandth
of a percent, and quantised products have errors that are rare and large: neither is judged here.

Power in bf16 on 64 rows x 512 columns, rank 16, as z: a scale 0.5 % too large 34, 0.2 % 13; the rank
sums rounded twice 15, the delta rounded before it is added 90.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from loragate.inputs import torch_dtype
from loragate.inputs.pairs import OutRows
from loragate.matrix.case import (
    MOE_SITES,
    Case,
    Dtype,
    Parallel,
    Quantisation,
    Sharing,
    Site,
)
from loragate.oracles.numeric.compare import ranks_of_errors
from loragate.oracles.numeric.errors import MANTISSA, RowErrors
from loragate.protocol import Pool, Rounding

_LIMIT = 6.5
_SPREAD = 1.25
# so many independent errors make their sum of squares nearly normal
_ENOUGH = 100
# the fourth moment of a normal number, with a margin for sums over few features
_TAIL = 4.0


@dataclass(frozen=True, slots=True, order=True)
class Deviation:
    """The most significant one: `ratio` is z over its limit, 0 where nothing can be judged."""

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


def deviations(
    case: Case,
    pool: Pool,
    rows: OutRows,
    pairs: OutRows | None,
    errors: RowErrors,
    promised: Collection[Rounding] | None,
) -> tuple[Deviation, Deviation]:
    """The worst gain and the worst spread. `rows` are those of the output, `pairs` those of an MoE
    site; `promised` is None where the subject promises nothing about its roundings."""
    worst = Deviation(), Deviation(is_gain=False)
    if case.dtype is Dtype.FP32 or case.quantisation is not Quantisation.NONE:
        return worst
    groupings = [(rows.slots.long(), errors, None, case.slots, 1)]
    if pairs is not None and case.site in MOE_SITES:
        of_layer = case.site is Site.MOE_LAYER
        groups = torch.where(
            pairs.slots < 0, -1, pairs.slots.long() * case.experts + pairs.experts.cpu()
        )
        x_rows = pairs.x_rows if of_layer else None
        own = errors if x_rows is None else errors[x_rows]
        groupings.append((groups, own, x_rows, case.slots * case.experts, case.experts))
    for group, own, x_rows, count, experts in groupings:
        sums = _Sums(case, pool, own, group, count, experts, promised)
        found = sums.worst_gain(group, x_rows), sums.worst_spread(group, x_rows)
        worst = max(worst[0], found[0]), max(worst[1], found[1])
    return worst


class _Sums:
    """Statistics of groups of rows [groups, slices]; rows of group -1 belong to none."""

    def __init__(
        self,
        case: Case,
        pool: Pool,
        errors: RowErrors,
        group: Tensor,
        count: int,
        experts: int,
        promised: Collection[Rounding] | None,
    ) -> None:
        device = errors.gain.device
        kept = (group >= 0).nonzero().flatten().to(device)
        index = group.to(device)[kept]

        def total(values: Tensor) -> Tensor:
            empty = values.new_zeros(count, values.shape[1])
            return empty.index_add_(0, index, values[kept])

        shared = case.top_k if case.sharing is Sharing.SHARED_A else 1
        shrunk = MANTISSA * errors.shrunk_sq
        self.floor = torch.finfo(torch_dtype(case.dtype)).eps / 8
        self.floor += (case.in_features + case.rank) * 2.0**-28
        delta = total(errors.delta_sq)
        self.gain = torch.where(delta > 0, total(errors.gain - errors.eager_gain) / delta, 0.0)
        # twice: of the subject and of eager
        variance = 2 * total(errors.gain_noise + shared * shrunk * errors.delta_sq)
        self.gain_z = torch.where(delta > 0, self.gain * delta / variance.sqrt(), 0.0)

        noise, fourth = errors.noise_sq, errors.noise_4
        if promised is None or (case.parallel is Parallel.ROW and case.tp > 1):
            self.spread = self.spread_z = torch.zeros_like(delta)
            return
        if Rounding.DELTA in promised:
            noise, fourth = noise + errors.delta_noise_sq, fourth + errors.delta_noise_4
        if Rounding.SHRUNK not in promised and case.site is not Site.MOE_LAYER:
            shrunk = torch.zeros_like(shrunk)
        widths = torch.tensor(case.out_slices, device=device)
        ranks = torch.tensor(ranks_of_errors(pool), device=device).repeat_interleave(experts, 0).clamp(min=1)
        in_common = (_TAIL / ranks).clamp(max=1) + 1 / widths
        expected = total(noise + shrunk)
        variance = 2 * (total(fourth) + 2 * total(noise * shrunk / widths))
        variance += 2 * shared * total(shrunk.square()) * in_common
        self.spread = torch.where(expected > 0, total(errors.subject_sq) / expected, 0.0)
        self.spread_z = (self.spread - 1) * expected / variance.sqrt()
        few = (expected == 0) | (2 * expected.square() < _ENOUGH * variance)
        self.spread_z = torch.where(few, 0.0, self.spread_z)

    def worst_gain(self, group: Tensor, x_rows: Tensor | None) -> Deviation:
        counts = self.gain.abs() > self.floor
        return _worst(self.gain, self.gain_z, counts, group, x_rows, is_gain=True)

    def worst_spread(self, group: Tensor, x_rows: Tensor | None) -> Deviation:
        counts = self.spread > _SPREAD
        return _worst(self.spread, self.spread_z, counts, group, x_rows, is_gain=False)


def _worst(
    values: Tensor,
    z: Tensor,
    counts: Tensor,
    group: Tensor,
    x_rows: Tensor | None,
    *,
    is_gain: bool,
) -> Deviation:
    ratio = torch.where(counts, z.abs() if is_gain else z, 0.0) / _LIMIT
    worst, part = divmod(int(ratio.argmax()), ratio.shape[1])
    own = (group == worst).nonzero().flatten()
    if not len(own):
        return Deviation(is_gain=is_gain)
    row = int(own[0]) if x_rows is None else int(x_rows[own[0]])
    found = (ratio[worst, part].item(), z[worst, part].item(), values[worst, part].item())
    return Deviation(*found, row, part, is_gain)
