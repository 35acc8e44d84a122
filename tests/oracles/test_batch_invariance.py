"""The batch_invariance oracle compares what a subject promises, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.matrix.case import Dtype, Plans
from loragate.oracles import ORACLES
from loragate.protocol import Others, Trial
from loragate.subjects.torch.subject import DenseDelta

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
