"""Finite, and right, wherever a plain layer in the dtype is.

Data that leaves nothing to round (inputs/exactness.py, inputs/exact_layer.py) is multiplied by
powers of two, some of which cancel: sums over in_features near the largest number of the dtype,
scales of thousands with a small B, scales of thousandths with a large one, results near either end
of the range. Whatever a plain layer rounds to the dtype - x, A, B, x @ A.T, its product with B,
that times the scale, the output - is then still a number of the dtype, and all products fit into
fp32. So the bits must be those of the exact result; what overflows or vanishes is a number that a
plain layer never rounds, such as a scaled sum over in_features. All zeros of x and of the base are
negative.

Subnormal numbers occur in fp16 only: in the other dtypes they are subnormal in fp32 as well, where
a compiler may flush them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loragate.core.verdict import Failure, Judgement, OracleName
from loragate.execution.session import Session, inputs_of
from loragate.inputs import DataKind, copy_batch
from loragate.inputs.exactness import X_NONZEROS
from loragate.inputs.vocabulary import as_linear
from loragate.matrix.case import Bias, Case, Dtype, Quantisation, Site
from loragate.oracles.evidence import judge_bits, passed
from loragate.oracles.numeric.golden import chunks
from loragate.oracles.numeric.golden_layer import golden_of, rounds_always
from loragate.protocol import BaseExperts, BaseLayer, Batch, Pool, Trial

# the largest sums over in_features, of x and of act, and the largest sum of magnitudes in an
# output, before anything is shifted: see inputs/exactness.py and inputs/exact_layer.py
_TOP_SHRUNK, _TOP_OUT = X_NONZEROS, 116
_TOP_SHRUNK_OF_LAYER, _TOP_SHRUNK_OF_ACT, _TOP_OUT_OF_LAYER = 1, 9 * 128, 243
# a scaled sum over in_features of the dtypes that have the range of fp32
_LIMIT = 2.0**120


@dataclass(frozen=True, slots=True)
class Shift:
    """Exponents of the powers of two that multiply a step. `shrunk` and `act_shrunk`: x @ A.T, of
    the second product of a layer as well; `scale`; `out`: the delta and the base. `in_x`: whether
    x takes a part; ids do not."""

    what: str
    shrunk: int = 0
    act_shrunk: int = 0
    scale: int = 0
    out: int = 0
    in_x: bool = True


class Range:
    name = OracleName.RANGE

    def applies(self, trial: Trial) -> str | None:
        if trial.case.quantisation is not Quantisation.NONE:
            return "a quantised product rounds on any data"
        if trial.case.expert_bias is Bias.PRESENT:
            return "experts with biases have no data whose parts can be shifted"
        return rounds_always(trial.case) or (None if trial.case.tokens else "the batch has no rows")

    def judge(self, trial: Trial) -> Judgement:
        pool, batch, base = inputs_of(trial, DataKind.EXACT)
        factors, rows, layer = as_linear(trial.case, pool, batch, base)
        exact = [
            golden_of(trial.case, factors, piece, layer).out.to(batch.out.dtype)
            for _, piece in chunks(rows, sum(trial.case.slices))
        ]
        wanted, shifts = torch.cat(exact), _shifts(trial.case)
        for shift in shifts:
            session = Session(trial, _shifted_base(base, shift), _shifted_pool(pool, shift))
            wrong = judge_bits(
                trial,
                batch,
                # the sign of a zero sum depends on the order of its terms
                session.step(_shifted_batch(batch, shift)) + 0.0,
                _times(wanted, shift.out) + 0.0,
                oracle=self.name,
                failure=Failure.WRONG_ANSWER,
                claim=f"the exact result ({shift.what})",
            )
            if wrong is not None:
                return wrong
        return passed(self.name, scenes=float(len(shifts)))


def _shifts(case: Case) -> tuple[Shift, ...]:
    layer, half = case.site is Site.MOE_LAYER, case.dtype is Dtype.FP16
    limit = torch.finfo(torch.float16).max if half else _LIMIT
    shrunk = _exponent(limit / (_TOP_SHRUNK_OF_LAYER if layer else _TOP_SHRUNK))
    act = _exponent(limit / _TOP_SHRUNK_OF_ACT)
    most = _exponent(limit / (_TOP_OUT_OF_LAYER if layer else _TOP_OUT))
    # half a unit is the smallest number of fp16, or a small normal one of the others. The weights
    # of a layer are smaller than its results, and B of its gate cannot be larger
    small = (-17 if layer else -23) if half else -115
    sums = 0 if layer else small // 2
    shifts = (
        # with any scale of the data the scaled sums are beyond the largest number of fp16, and B is
        # still normal
        Shift("sums over in_features near the largest number", shrunk, act, 5, 3),
        Shift("a large scale", shrunk - 10, act - 10, 10),
        # B and its products are larger by as much, and are no larger than fp16 has
        Shift("a small scale", scale=-7 if layer else -10),
        Shift("results near the largest number", out=most),
        Shift("results near the smallest number", sums, small // 2, 0, small),
    )
    return tuple(replace(shift, in_x=case.site is not Site.EMBEDDING) for shift in shifts)


def _exponent(number: float) -> int:
    return math.floor(math.log2(number))


def _in_x(shift: Shift) -> int:
    """Half of the exponent of x @ A.T is in x, if x are numbers."""
    return shift.shrunk // 2 if shift.in_x else 0


def _shifted_batch(batch: Batch, shift: Shift) -> Batch:
    batch = copy_batch(batch)
    for values, exponent in ((batch.x, _in_x(shift)), (batch.out, shift.out)):
        if values.is_floating_point():
            values.mul_(2.0**exponent).masked_fill_(values == 0, -0.0)
    return batch


def _shifted_pool(pool: Pool, shift: Shift) -> Pool:
    inner = 0 if pool.down is not None else shift.out
    first = _shifted_factors(pool, shift.shrunk - _in_x(shift), shift.shrunk, shift.scale, inner)
    if pool.down is None:
        return first
    act = shift.act_shrunk
    return replace(first, down=_shifted_factors(pool.down, act, act, shift.scale, shift.out))


def _shifted_factors(pool: Pool, a: int, shrunk: int, scale: int, delta: int) -> Pool:
    """B takes what A, x and the scale leave of the exponent of the delta."""
    b = tuple(_times(part, delta - shrunk - scale) for part in pool.b)
    scales = tuple(tuple(value * 2.0**scale for value in row) for row in pool.scales)
    return replace(pool, a=_times(pool.a, a), b=b, scales=scales)


def _shifted_base(base: BaseLayer | None, shift: Shift) -> BaseLayer | None:
    if base is None:
        return None
    if isinstance(base, BaseExperts):
        weight, down = _times(base.weight, -_in_x(shift)), _times(base.down, shift.out)
        return replace(base, weight=weight, down=down)
    bias = None if base.bias is None else _times(base.bias, shift.out)
    return BaseLayer(_times(base.weight, shift.out - _in_x(shift)), bias)


def _times(values: Tensor, exponent: int) -> Tensor:
    return values * 2.0**exponent
