"""The work oracle fails kernels whose work depends on idle slots or on the numbers of slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import Machine, select_interpreter

select_interpreter()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from loragate.core.verdict import Failure, OracleName, Verdict  # noqa: E402
from loragate.execution.kernel_work import counted_work  # noqa: E402
from loragate.matrix.case import Dtype, Execution, Mix  # noqa: E402
from loragate.oracles import ORACLES  # noqa: E402
from loragate.protocol import Trial  # noqa: E402
from loragate.subjects.torch.subject import DenseDelta  # noqa: E402

WORK = ORACLES[OracleName.WORK]
CPU = Machine("cpu", "test", None, 1, 0)


@triton.jit
def copy_kernel(source, target, size, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + offs, mask=offs < size, other=0.0)
    tl.store(target + offs, values, mask=offs < size)


@triton.jit
def dot_kernel(x, y, out):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))


@triton.jit
def add_kernel(target):
    tl.atomic_add(target + tl.arange(0, 16), 1.0)


def copy(values: int) -> None:
    copy_kernel[(triton.cdiv(values, 16),)](torch.zeros(values), torch.zeros(values), values, 16)


class ByLiveRows(DenseDelta):
    """Copies a number for each row that has an adapter."""

    def amount(self) -> int:
        return int((self.token_slots >= 0).sum())

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        if self.amount():
            copy(self.amount())
        return super().apply(x, out)


class ByLoadedSlots(ByLiveRows):
    def amount(self) -> int:
        return len(self.slots)


class BySlotNumbers(ByLiveRows):
    def amount(self) -> int:
        used = self.token_slots[self.token_slots >= 0]
        return int(used.max() - used.min()) + 1 if len(used) else 0


class BySquare(ByLiveRows):
    def amount(self) -> int:
        return super().amount() ** 2 // 64


class OneMoreInTheSecondTile(ByLiveRows):
    def amount(self) -> int:
        rows = super().amount()
        return rows + (rows > 128)


class OneMoreBesideConstantWork(OneMoreInTheSecondTile):
    """A step has work of its own, also without adapters."""

    def amount(self) -> int:
        return super().amount() + 64


def trial_of(make_trial: Callable[..., Trial], instance: type[DenseDelta], **axes: Any) -> Trial:
    shape = {"tokens": 9, "in_features": 8, "slices": (8,), "rank": 2, "slots": 6}
    promises = {"work_follows_tiles": True}
    trial = make_trial(instance, promises=promises, **(shape | {"dtype": Dtype.FP32} | axes))
    assert WORK.applies(trial) is None
    return trial


def test_elements_that_are_masked_off_do_not_count() -> None:
    with counted_work() as work:
        copy(20)
    assert (work.programs, work.bytes_loaded, work.bytes_stored) == (2, 80, 80)


def test_operations_of_a_dot_are_counted() -> None:
    with counted_work() as work:
        dot_kernel[(1,)](torch.ones(16, 16), torch.ones(16, 16), torch.empty(16, 16))
    assert (work.dot_operations, work.bytes_loaded) == (2 * 16**3, 2 * 16 * 16 * 4)


def test_what_is_added_atomically_counts_as_loaded_and_as_stored() -> None:
    with counted_work() as work:
        add_kernel[(2,)](torch.zeros(16))
    assert (work.bytes_loaded, work.bytes_stored) == (2 * 16 * 4, 2 * 16 * 4)


def test_nothing_is_counted_afterwards() -> None:
    with counted_work() as work:
        pass
    copy(20)
    assert work.programs == 0


@pytest.mark.parametrize(
    ("instance", "axes", "said"),
    [
        (ByLoadedSlots, {"mix": Mix.LAST_SLOT}, "empty idle slots"),
        (BySlotNumbers, {"mix": Mix.RAGGED}, "in place of"),
        (BySquare, {"tokens": 260}, "growth in proportion"),
        (OneMoreInTheSecondTile, {"tokens": 260}, "growth in proportion"),
        (OneMoreBesideConstantWork, {"tokens": 260}, "growth in proportion"),
    ],
)
def test_work_that_does_not_follow_from_the_tiles_fails(
    instance: type[DenseDelta], axes: dict[str, Any], said: str, make_trial: Callable[..., Trial]
) -> None:
    for seed in range(5):
        judgement = WORK.judge(trial_of(make_trial, instance, seed=seed, **axes))
        assert judgement.failure is Failure.EXTRA_WORK, judgement
        assert said in judgement.message


@pytest.mark.parametrize("axes", [{"mix": Mix.LAST_SLOT}, {"mix": Mix.RAGGED}, {"tokens": 260}])
def test_work_that_follows_from_the_live_rows_passes(
    axes: dict[str, Any], make_trial: Callable[..., Trial]
) -> None:
    for seed in range(10):
        judgement = WORK.judge(trial_of(make_trial, ByLiveRows, seed=seed, **axes))
        assert judgement.verdict is Verdict.PASS, judgement


def test_compiled_kernels_are_not_judged(make_trial: Callable[..., Trial]) -> None:
    trial = make_trial(ByLiveRows, promises={"work_follows_tiles": True})
    assert WORK.applies(replace(trial, machine=replace(CPU, device="cuda"))) is not None


def test_captures_are_not_judged(make_trial: Callable[..., Trial]) -> None:
    """They warm up with batches of their own."""
    promises = {"work_follows_tiles": True}
    said = [
        WORK.applies(make_trial(ByLiveRows, promises=promises, execution=execution))
        for execution in (Execution.EAGER, Execution.GRAPH)
    ]
    assert said[0] is None
    assert "warms up" in str(said[1])
