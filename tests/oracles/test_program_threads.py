"""Whatever an oracle runs in the interpreter, threads of a program that use what another one writes
need a barrier between, also where no result depends on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from loragate.core.verdict import Failure, OracleName, Verdict  # noqa: E402
from loragate.execution.program_threads import MissingBarrier  # noqa: E402
from loragate.execution.watched_launches import watched_launches  # noqa: E402
from loragate.matrix.case import Dtype  # noqa: E402
from loragate.oracles import ORACLES  # noqa: E402
from loragate.protocol import Trial  # noqa: E402
from loragate.run.trial import judge_with  # noqa: E402
from loragate.subjects.torch.subject import DenseDelta  # noqa: E402

LANES = 8


@triton.jit
def count_kernel(ids, counts, BINS: tl.constexpr, LANES: tl.constexpr, MEET: tl.constexpr):
    row = counts + tl.program_id(0) * BINS
    tl.store(row + tl.arange(0, BINS), tl.zeros([BINS], dtype=tl.int32))
    if MEET:
        tl.debug_barrier()
    tl.atomic_add(row + tl.load(ids + tl.arange(0, LANES)), 1)


@triton.jit
def turn_kernel(target, shift, LANES: tl.constexpr, MEET: tl.constexpr):
    lanes = tl.arange(0, LANES)
    tl.store(target + lanes, lanes.to(tl.float32))
    if MEET:
        tl.debug_barrier()
    values = tl.load(target + (lanes + shift) % LANES)
    if MEET:
        tl.debug_barrier()
    tl.store(target + LANES + lanes, values)


@triton.jit
def twice_kernel(target, first, second, place, LANES: tl.constexpr, MEET: tl.constexpr):
    lanes = tl.arange(0, LANES)
    tl.store(target + lanes, tl.zeros([LANES], dtype=tl.float32) + first)
    if MEET:
        tl.debug_barrier()
    tl.store(target + place, second, mask=place < LANES)


@triton.jit
def add_kernel(target, times, LANES: tl.constexpr):
    for _ in range(times):
        tl.atomic_add(target + tl.arange(0, LANES) // 2, 1.0)


@triton.jit
def share_kernel(target, LANES: tl.constexpr):
    # each program writes all places
    tl.store(target + tl.arange(0, LANES), tl.zeros([LANES], dtype=tl.float32) + tl.program_id(0))


@triton.jit
def grow_kernel(target, LANES: tl.constexpr):
    # in place: a read ahead of the write of the same thread
    lanes = tl.arange(0, LANES)
    for tile in range(4):
        places = target + tile * LANES + lanes
        tl.store(places, tl.load(places) + 1.0)


def counted(meet: bool) -> Tensor:
    ids = torch.tensor([0, 1, 1, 3, 3, 3, 2, 0], dtype=torch.int32)
    counts = torch.full((2, 4), 7, dtype=torch.int32)
    count_kernel[(2,)](ids, counts, 4, LANES, meet)
    return counts


def test_counters_that_are_reset_and_raised_without_a_barrier_are_refused() -> None:
    # the interpreter itself sees nothing
    assert counted(meet=False).tolist() == [[2, 2, 1, 3]] * 2
    with pytest.raises(MissingBarrier) as caught, watched_launches():
        counted(meet=False)
    assert str(caught.value) == (
        "kernel count_kernel: 8 elements written and then changed without a barrier between the "
        "threads, the first at byte 0 of counts"
    )


def test_behind_a_barrier_threads_may_use_what_others_have_written() -> None:
    with watched_launches():
        assert counted(meet=True).tolist() == [[2, 2, 1, 3]] * 2
        turn_kernel[(1,)](torch.zeros(2 * LANES), 3, LANES, True)
        twice_kernel[(1,)](torch.zeros(LANES), 1.0, 2.0, 3, LANES, True)


@pytest.mark.parametrize("shift", [0, 3])
def test_what_is_read_without_a_barrier_behind_its_write_is_refused(shift: int) -> None:
    message = "8 elements written and then read without a barrier .* byte 0 of target"
    with pytest.raises(MissingBarrier, match=message), watched_launches():
        turn_kernel[(1,)](torch.zeros(2 * LANES), shift, LANES, False)


def test_a_place_that_is_written_twice_has_two_values_without_a_barrier() -> None:
    message = "1 element written and then written without a barrier .* byte 12 of target"
    with pytest.raises(MissingBarrier, match=message), watched_launches():
        twice_kernel[(1,)](torch.zeros(LANES), 1.0, 2.0, 3, LANES, False)


@pytest.mark.parametrize(
    ("first", "second", "place"),
    # the same value, also where it is not equal to itself, and a write that is masked off
    [(1.0, 1.0, 3), (math.nan, math.nan, 3), (1.0, 2.0, LANES)],
)
def test_a_place_that_gets_one_value_only_may_be_written_by_several_threads(
    first: float, second: float, place: int
) -> None:
    with watched_launches():
        twice_kernel[(1,)](torch.zeros(LANES), first, second, place, LANES, False)


def test_atomic_operations_need_no_order_among_themselves() -> None:
    target = torch.zeros(LANES)
    with watched_launches():
        add_kernel[(1,)](target, 3, LANES)
    assert target.tolist() == [6.0] * 4 + [0.0] * 4


def test_programs_and_launches_are_judged_each_for_itself() -> None:
    target = torch.zeros(LANES)
    with watched_launches():
        share_kernel[(3,)](target, LANES)
        add_kernel[(1,)](target, 1, LANES)
    assert target.tolist() == [4.0] * 4 + [2.0] * 4


def test_a_program_may_write_what_it_has_read() -> None:
    target = torch.zeros(4 * LANES)
    with watched_launches():
        grow_kernel[(1,)](target, LANES)
    assert target.eq(1.0).all()


def test_a_missing_barrier_that_the_caller_swallows_is_raised_at_the_end() -> None:
    with pytest.raises(MissingBarrier), watched_launches(), suppress(MissingBarrier):
        counted(meet=False)


class CountsCarelessly(DenseDelta):
    """Counts something with a kernel that lacks a barrier, beside a right result."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        counted(meet=False)
        return super().apply(x, out)


def test_an_oracle_fails_a_kernel_that_lacks_a_barrier_as_a_race(
    make_trial: Callable[..., Trial],
) -> None:
    trial = make_trial(CountsCarelessly)
    shape = {"tokens": 6, "in_features": 8, "slices": (8,), "rank": 2, "slots": 3}
    case = replace(trial.case, dtype=Dtype.FP32, **shape)
    judgement = judge_with(ORACLES[OracleName.REFERENCE], replace(trial, case=case))
    assert judgement.verdict is Verdict.FAIL
    assert judgement.failure is Failure.RACE
    assert "count_kernel" in judgement.message
