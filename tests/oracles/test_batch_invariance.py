"""The batch_invariance oracle compares what a subject promises, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict  # noqa: E402
from loragate.matrix.case import Dtype, Plans  # noqa: E402
from loragate.oracles import ORACLES  # noqa: E402
from loragate.protocol import Others, Trial  # noqa: E402
from loragate.subjects.torch.subject import DenseDelta  # noqa: E402

ORACLE = ORACLES[OracleName.BATCH_INVARIANCE]


class RowByRow(DenseDelta):
    """Each row is computed by itself."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        mapping = self.token_slots
        for row in range(len(x)):
            self.token_slots = mapping[row : row + 1]
            super().apply(x[row : row + 1], out[row : row + 1])
        self.token_slots = mapping
        return out


class RoundedByTheLargest(DenseDelta):
    """Inputs are rounded to a grid that depends on the largest one of the batch."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        step = x.float().abs().max() * 2.0**-20
        super().apply((x.float() / step).round().mul(step), out)
        return out


class OrderFollowsTheBatch(RowByRow):
    """Features are summed in an order that depends on how many adapters the batch has."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        start = int(self.token_slots.clamp(min=-1).sum()) % x.shape[1]
        slots = self.slots
        self.slots = {
            slot: [(a.roll(start, 1), b, scale) for a, b, scale in factors]
            for slot, factors in slots.items()
        }
        super().apply(x.roll(start, 1), out)
        self.slots = slots
        return out


class OrderFollowsTheCount(RowByRow):
    """Features are summed in an order that depends on how many rows the batch has."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        slots, start = self.slots, len(x)
        self.slots = {
            slot: [(a.roll(start, 1), b, scale) for a, b, scale in factors]
            for slot, factors in slots.items()
        }
        super().apply(x.roll(start, 1), out)
        self.slots = slots
        return out


class OrderOfASingleRow(OrderFollowsTheCount):
    """Features are summed in another order in a batch of one row alone."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        return (super() if len(x) == 1 else super(OrderFollowsTheCount, self)).apply(x, out)


@triton.jit
def touch_kernel(values, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    tl.store(values + offs, tl.load(values + offs))


class OtherConstants(RowByRow):
    """Launches a kernel whose constant follows from the number of rows, and changes nothing."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        touch_kernel[(1,)](x, SIZE=8 if len(x) > 20 else 4)
        return super().apply(x, out)


class OneKernelMore(RowByRow):
    """Launches a kernel for many rows only, behind one for any number."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        for size in (8, 4) if len(x) > 20 else (8,):
            touch_kernel[(1,)](x, SIZE=size)
        return super().apply(x, out)


def judge(
    make_trial: Callable[..., Trial],
    instance: type[DenseDelta],
    seed: int,
    *promised: Others,
    plans: Plans = Plans.BATCH,
) -> Judgement:
    promises = {"batch_invariant": frozenset(promised)}
    trial = make_trial(instance, seed, promises, tokens=40, dtype=Dtype.FP32, plans=plans)
    assert ORACLE.applies(trial) is None
    return ORACLE.judge(trial)


def test_a_row_that_depends_on_the_values_of_others_fails(make_trial: Callable[..., Trial]) -> None:
    for seed in range(5):
        judgement = judge(make_trial, RoundedByTheLargest, seed, Others.VALUES)
        assert judgement.failure is Failure.BATCH_DEPENDENT, judgement
        assert "other values" in judgement.message


def test_a_row_that_depends_on_the_adapters_of_others_fails_where_that_is_promised(
    make_trial: Callable[..., Trial],
) -> None:
    for seed in range(5):
        judgement = judge(make_trial, OrderFollowsTheBatch, seed, *Others)
        assert judgement.failure is Failure.BATCH_DEPENDENT, judgement
        assert "other adapters" in judgement.message
        promised_less = judge(make_trial, OrderFollowsTheBatch, seed, Others.VALUES)
        assert promised_less.verdict is Verdict.PASS


def test_rows_that_are_computed_one_by_one_pass(make_trial: Callable[..., Trial]) -> None:
    for seed in range(20):
        assert judge(make_trial, RowByRow, seed, *Others).verdict is Verdict.PASS


def test_a_row_that_depends_on_the_number_of_others_fails_where_there_is_one_plan(
    make_trial: Callable[..., Trial],
) -> None:
    for seed in range(5):
        judgement = judge(make_trial, OrderFollowsTheCount, seed, *Others, plans=Plans.ONE)
        assert judgement.failure is Failure.BATCH_DEPENDENT, judgement
        assert "fewer rows" in judgement.message
        several = judge(make_trial, OrderFollowsTheCount, seed, *Others)
        assert several.verdict is Verdict.PASS
        promised_less = (Others.VALUES, Others.SLOTS)
        less = judge(make_trial, OrderFollowsTheCount, seed, *promised_less, plans=Plans.ONE)
        assert less.verdict is Verdict.PASS


def test_every_smaller_batch_is_compared(make_trial: Callable[..., Trial]) -> None:
    for seed in range(5):
        judgement = judge(make_trial, OrderOfASingleRow, seed, *Others, plans=Plans.ONE)
        assert judgement.failure is Failure.BATCH_DEPENDENT, judgement
        assert "(1 of 40)" in judgement.message


@pytest.mark.parametrize(
    ("instance", "said"),
    [
        (OtherConstants, "touch_kernel(SIZE=8) and touch_kernel(SIZE=4)"),
        (OneKernelMore, "touch_kernel(SIZE=4) and none"),
    ],
)
def test_other_kernels_for_fewer_rows_fail_although_the_bits_are_equal(
    instance: type[DenseDelta], said: str, make_trial: Callable[..., Trial]
) -> None:
    judgement = judge(make_trial, instance, 1, Others.COUNT, plans=Plans.ONE)
    assert judgement.failure is Failure.BATCH_DEPENDENT, judgement
    assert said in judgement.message
    assert judge(make_trial, instance, 1, Others.COUNT).verdict is Verdict.PASS


def test_rows_that_are_computed_one_by_one_pass_with_one_plan(
    make_trial: Callable[..., Trial],
) -> None:
    for seed in range(5):
        judgement = judge(make_trial, RowByRow, seed, *Others, plans=Plans.ONE)
        assert judgement.verdict is Verdict.PASS, judgement


def test_a_subject_that_promises_nothing_is_not_judged(make_trial: Callable[..., Trial]) -> None:
    reason = ORACLE.applies(make_trial(DenseDelta, promises={"batch_invariant": frozenset()}))
    assert reason is not None
    assert "does not promise" in reason
