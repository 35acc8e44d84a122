"""The range oracle fails subjects that overflow or vanish where a plain layer does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.verdict import Failure, OracleName, Verdict
from loragate.matrix.case import Dtype, RouterWeights, Site
from loragate.oracles import ORACLES
from loragate.protocol import Trial
from loragate.subjects.torch.subject import DenseDelta

RANGE = ORACLES[OracleName.RANGE]


class Plain(DenseDelta):
    """`shrunk` is what lies between the two products."""

    def shrunk(self, values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        return values * scale

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        for slot, factors in self.slots.items():
            rows = (self.token_slots == slot).nonzero().flatten()
            column = 0
            for a, b, scale in factors:
                columns = slice(column, column + b.shape[0])
                shrunk = self.shrunk(x[rows].float() @ a.float().T, scale, out.dtype)
                total = out[rows, columns].float() + shrunk @ b.float().T
                out[rows, columns] = total.to(out.dtype)
                column = columns.stop
        return out


class ScaledSumsRounded(Plain):
    def shrunk(self, values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        return (values * scale).to(dtype).float()


class SumsRounded(Plain):
    def shrunk(self, values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        return values.to(dtype).float() * scale


class SmallSumsFlushed(Plain):
    def shrunk(self, values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        return torch.where(values.abs() < 2.0**-9, 0.0, values * scale)


class ClampedLikeFp16(Plain):
    def shrunk(self, values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        return values.clamp(-65504, 65504) * scale


class SmallScalesFlushed(Plain):
    def shrunk(self, values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        return values * (scale if abs(scale) > 1e-2 else 0.0)


class ScalesInSteps(Plain):
    def shrunk(self, values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        return values * (round(scale * 256) / 256)


class LargeResultsClamped(Plain):
    """Keeps results below a sixteenth of the largest number that the data may have."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        most = 2.0**12 if out.dtype is torch.float16 else 2.0**116
        return super().apply(x, out).clamp_(-most, most)


class ReadsNegativeZerosAsNan(Plain):
    """As formats of 8 bits do that have no negative zero."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        return super().apply(torch.where((x == 0) & x.signbit(), torch.nan, x), out)


@pytest.mark.parametrize(
    ("instance", "dtype"),
    [
        (ReadsNegativeZerosAsNan, Dtype.BF16),
        (SmallScalesFlushed, Dtype.FP16),
        (LargeResultsClamped, Dtype.FP16),
        (LargeResultsClamped, Dtype.BF16),
        (ScalesInSteps, Dtype.BF16),
        (ScaledSumsRounded, Dtype.FP16),
        (SmallSumsFlushed, Dtype.FP16),
        (SmallSumsFlushed, Dtype.BF16),
        (ClampedLikeFp16, Dtype.BF16),
        (ClampedLikeFp16, Dtype.FP32),
    ],
)
def test_what_overflows_or_vanishes_between_the_products_fails(
    instance: type[DenseDelta], dtype: Dtype, make_trial: Callable[..., Trial]
) -> None:
    for seed in range(5):
        judgement = RANGE.judge(make_trial(instance, seed, dtype=dtype))
        assert judgement.failure is Failure.WRONG_ANSWER, judgement


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("instance", [DenseDelta, Plain, SumsRounded])
def test_what_has_the_range_of_the_dtype_passes(
    instance: type[DenseDelta], dtype: Dtype, make_trial: Callable[..., Trial]
) -> None:
    for seed in range(7):
        judgement = RANGE.judge(make_trial(instance, seed, dtype=dtype))
        assert judgement.verdict is Verdict.PASS, judgement


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize(
    "axes",
    [
        {"site": Site.LORA_LINEAR},
        {"site": Site.MOE_DELTA, "experts": 3, "top_k": 2, "router": RouterWeights.OUTPUT},
        {"site": Site.MOE_LAYER, "experts": 3, "top_k": 2, "router": RouterWeights.INPUT},
        {"site": Site.MOE_LAYER, "experts": 3, "top_k": 1, "router": RouterWeights.OUTPUT},
    ],
)
def test_the_torch_subject_has_the_range_at_every_site(
    axes: dict[str, Any], dtype: Dtype, make_trial: Callable[..., Trial]
) -> None:
    shape = {"tokens": 7, "slots": 3, "in_features": 24, "slices": (16, 16), "dtype": dtype}
    for seed in range(3):
        judgement = RANGE.judge(make_trial(None, seed, **shape, **axes))
        assert judgement.verdict is Verdict.PASS, judgement
