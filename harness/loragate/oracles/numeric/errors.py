"""Error statistics of the reference oracle: pure functions on tensors.

Everything is per (row, slice), so that a small slice is not drowned by a wide one, and then
per population: all rows of one slot, for one slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import reduce

import torch
from torch import Tensor

from loragate.matrix.case import IN_PLACE_SITES, LINEAR_SITES, Case, Parallel, Site
from loragate.oracles.numeric.golden import Golden

_MANTISSA = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23}
_UNIT_ROUNDOFF_FP32 = 2.0**-24
# mean square of a rounding error, over its bound: half a step is up to twice as large relative to
# one number as to another, and the digits of numbers of any size are spread evenly on a log scale
MANTISSA = 3 / (8 * math.log(2))
# the largest of thousands of elements lies at four to five sigma
TAIL = 4.0
# parts that a base product adds up in 16 bits, over those of a plain product of another layout: a
# margin, for an H200 has shown 1.02 times the error that as many parts would allow
_PARTS_OF_ANOTHER_ALGORITHM = 2.0
# how many jumps of the largest size may meet in a row: with two, one of twelve layers failed that
# only add up in fp32
JUMPS = 3.0


@dataclass(frozen=True, slots=True)
class RowErrors:
    """fp64 [rows, slices] each; `*_sq` are sums of squares over the slice's columns.

    `bound_*`: largest and sum of squares of what rounding may cost an element at worst.
    `floor_sq`: what rounding the golden output once costs. `shrunk_*`: what rounding the shrink
    output, or in an MoE layer everything between its products, costs on average; eager does not
    round it. `jump_sq`: what single elements of a row may suffer beyond that average.
    `gain` and `eager_gain`: sum of error * delta. `noise_sq`: what the rounding of the output costs
    on average, and not less than what it costs in the golden output; at a linear site
    also what the base costs. `delta_noise_sq`: that of the delta; `*_4`: sums of the squares of an
    element's share. `gain_noise`: variance of `gain` from all of these.
    """

    delta_sq: Tensor
    subject_sq: Tensor
    eager_sq: Tensor
    bound_sq: Tensor
    floor_sq: Tensor
    subject_max: Tensor
    eager_max: Tensor
    bound_max: Tensor
    shrunk_sq: Tensor
    shrunk_max: Tensor
    jump_sq: Tensor
    worst_column: Tensor
    gain: Tensor
    eager_gain: Tensor
    noise_sq: Tensor
    noise_4: Tensor
    delta_noise_sq: Tensor
    delta_noise_4: Tensor
    gain_noise: Tensor

    def __getitem__(self, rows: Tensor) -> RowErrors:
        return RowErrors(*(getattr(self, f.name)[rows] for f in fields(RowErrors)))


def row_errors(
    case: Case, right: Golden, eager: Tensor, subject: Tensor, bases: Sequence[Tensor] = ()
) -> RowErrors:
    """Errors of `eager` and `subject` [rows, out_features] against `right`. Elements that are
    not finite in the golden output count as no error: their positions are checked before. `bases`:
    the output of the base layer alone in the dtype, where the case has one that is not cut, in each
    of the ways that a subject may compute it."""
    slices = _Slices(list(case.out_slices), right.out.isfinite())
    delta = slices.finite(right.delta)
    wrong, plain = (slices.finite(values.double() - right.out) for values in (subject, eager))
    shrunk = slices.finite(right.terms_sq) * _shrunk_variance(case, eager.dtype)
    jump = torch.zeros_like(shrunk) if right.jump_sq is None else right.jump_sq
    drift = _accumulation(case) * slices.sums(slices.finite(_accumulated(case, right)))
    rounded = slices.finite(right.out.to(eager.dtype).double() - right.out)
    # few ranks times few digits of B make sums whose roundings are alike, and far from average
    floor = slices.sums(rounded.square())
    missed = _missed(right, bases, slices)
    bound_sq, bound_max = _bounds(case, right, eager.dtype, missed, slices)
    noise = _noise(case, right, eager.dtype, missed, slices)
    return RowErrors(
        delta_sq=slices.sums(delta.square()),
        subject_sq=slices.sums(wrong.square()),
        eager_sq=slices.sums(plain.square()),
        bound_sq=bound_sq + drift,
        floor_sq=floor + drift,
        subject_max=slices.tops(wrong.abs()),
        eager_max=slices.tops(plain.abs()),
        bound_max=bound_max
        + TAIL * (drift / torch.tensor(slices.widths, device=drift.device)).sqrt(),
        shrunk_sq=slices.sums(shrunk),
        shrunk_max=slices.tops(shrunk + (JUMPS / TAIL) ** 2 * jump).sqrt(),
        jump_sq=slices.sums(jump),
        worst_column=slices.places(wrong.abs()),
        gain=slices.sums(wrong * delta),
        eager_gain=slices.sums(plain * delta),
        noise_sq=noise.of_output_sq.maximum(floor) + noise.of_base_sq + drift,
        noise_4=slices.sums(noise.of_sum.square()),
        delta_noise_sq=slices.sums(noise.of_delta),
        delta_noise_4=slices.sums(noise.of_delta.square()),
        gain_noise=slices.sums((noise.of_sum + noise.of_delta) * delta.square()),
    )


@dataclass(frozen=True, slots=True)
class _Slices:
    """Reductions of [rows, out_features] to [rows, slices], over the columns of each slice.
    `is_finite`: which elements of the golden output are."""

    widths: list[int]
    is_finite: Tensor

    def finite(self, values: Tensor) -> Tensor:
        """Zero where the golden output is not finite."""
        return torch.where(self.is_finite, values, 0.0)

    def sums(self, values: Tensor) -> Tensor:
        return self._stacked(part.sum(1) for part in torch.split(values, self.widths, 1))

    def tops(self, values: Tensor) -> Tensor:
        return self._stacked(part.amax(1) for part in torch.split(values, self.widths, 1))

    def places(self, values: Tensor) -> Tensor:
        """Of the largest values."""
        return self._stacked(part.argmax(1) for part in torch.split(values, self.widths, 1))

    def _stacked(self, parts: Iterable[Tensor]) -> Tensor:
        return torch.stack(list(parts), 1)


@dataclass(frozen=True, slots=True)
class _Noise:
    """What roundings cost on average: each element of the sum of base and delta and of the delta
    [rows, out_features], and the output and the base of each slice."""

    of_sum: Tensor
    of_delta: Tensor
    of_output_sq: Tensor
    of_base_sq: Tensor


def _missed(right: Golden, bases: Sequence[Tensor], slices: _Slices) -> Tensor | None:
    """The largest error of each element of the base output, of all ways that compute it. cuBLAS
    splits K and may add up the parts in 16 bits."""
    if not bases:
        return None
    missed = reduce(torch.maximum, ((base.double() - right.base).abs() for base in bases))
    return slices.finite(missed)


def _bounds(
    case: Case, right: Golden, dtype: torch.dtype, missed: Tensor | None, slices: _Slices
) -> tuple[Tensor, Tensor]:
    """What rounding may cost at worst, squared and added up, and of one element."""
    bound = slices.finite(_rounding_bound(case, right, dtype))
    bound_sq, bound_max = slices.sums(bound.square()), slices.tops(bound)
    if missed is None:
        return bound_sq, bound_max
    # not always in the same elements, for it takes another algorithm for another layout
    beyond = (missed - half_ulp(right.base, dtype)).clamp(min=0)
    beyond *= math.sqrt(_PARTS_OF_ANOTHER_ALGORITHM)
    return (
        bound_sq + _most(slices.sums(beyond.square())),
        bound_max + _most(slices.tops(beyond)),
    )


def _noise(
    case: Case, right: Golden, dtype: torch.dtype, missed: Tensor | None, slices: _Slices
) -> _Noise:
    of_output, of_base, of_delta = map(slices.finite, _rounding_noise(case, right, dtype))
    base_sq = slices.sums(of_base)
    if missed is not None:
        base_sq = base_sq.maximum(slices.sums(missed.square()))
    return _Noise(of_output + of_base, of_delta, slices.sums(of_output), base_sq)


def _most(values: Tensor) -> Tensor:
    """The largest of all rows, for each slice."""
    return values.amax(0) if len(values) else values.new_zeros(values.shape[1])


def concatenated(pieces: list[RowErrors]) -> RowErrors:
    return RowErrors(*(torch.cat([getattr(p, f.name) for p in pieces]) for f in fields(RowErrors)))


def half_ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Largest error of rounding each of `values` (fp64) to `dtype`; 0 for 0."""
    exponent = torch.frexp(values).exponent - 2 - _MANTISSA[dtype]
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
    step = torch.exp2(exponent.double()).clamp(min=smallest)
    return torch.where(values == 0, 0.0, step)


def _shrunk_variance(case: Case, dtype: torch.dtype) -> float:
    """Relative variance of a term when the shrink output is rounded to the operands' dtype. Every
    subject on tensor cores does that (vllm lora_expand casts to the dtype of B), `eager` does not.
    Between the products of an MoE layer everything is rounded in every dtype."""
    spared = dtype == torch.float32 and case.site is not Site.MOE_LAYER
    return 0.0 if spared else (2.0 ** -(_MANTISSA[dtype] + 1)) ** 2 / 3


def _rounding_bound(case: Case, right: Golden, dtype: torch.dtype) -> Tensor:
    """At worst the delta, the base and their sum are rounded, once for each shard. What an MoE
    layer rounds before its output is in `terms_sq`."""
    if case.site is Site.MOE_LAYER:
        return half_ulp(right.out, dtype)
    shards = case.tp if case.parallel is Parallel.ROW else 1
    bound = half_ulp(right.delta, dtype) + half_ulp(right.out, dtype)
    if case.site in LINEAR_SITES:
        bound += half_ulp(right.base, dtype)
    return shards * bound


def _rounding_noise(case: Case, right: Golden, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Variance of each element from rounding the output, the base of a linear site and the
    delta, once for each shard. What an MoE layer rounds before its output is in `terms_sq`."""
    noise = half_ulp(right.out, dtype).square() / 3
    nothing = torch.zeros_like(noise)
    if case.site is Site.MOE_LAYER:
        return noise, nothing, nothing
    shards = case.tp if case.parallel is Parallel.ROW else 1
    of_delta = shards * half_ulp(right.delta, dtype).square() / 3
    if case.site not in LINEAR_SITES:
        return shards * noise, nothing, of_delta
    return shards * noise, shards * half_ulp(right.base, dtype).square() / 3, of_delta


def _accumulated(case: Case, right: Golden) -> Tensor:
    """The squares of what the site itself sums up: dense_delta is given its base, and an embedding
    looks it up."""
    has_base = case.site not in IN_PLACE_SITES | {Site.EMBEDDING}
    size = (right.out if has_base else right.delta).square()
    if right.addends_sq is not None:
        size = size.maximum(right.addends_sq)
    return size


def _accumulation(case: Case) -> float:
    """Relative variance of an fp32 sum over in_features and the ranks, in any order; in an MoE
    layer also of the sum over the intermediate size."""
    second = case.slices[0] + case.rank if case.site is Site.MOE_LAYER else 0
    return _UNIT_ROUNDOFF_FP32**2 * (case.x_columns + case.rank + second)
