"""Whatever an oracle runs in the interpreter, a kernel that leaves its tensors is wrong, also where
no result depends on what it reads there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict  # noqa: E402
from loragate.execution.bounds import OutOfBounds, bounded_launches  # noqa: E402
from loragate.matrix.case import Dtype  # noqa: E402
from loragate.oracles import ORACLES  # noqa: E402
from loragate.protocol import Trial  # noqa: E402
from loragate.run.trial import judge_with  # noqa: E402
from loragate.subjects.torch.subject import DenseDelta  # noqa: E402


@triton.jit
def copy_kernel(source, target, read, written, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    values = tl.load(source + offs, mask=offs < read, other=0.0)
    tl.store(target + offs, values, mask=offs < written)


@triton.jit
def add_kernel(target, at):
    tl.atomic_add(target + at, 1.0)


@triton.jit
def follow_kernel(table, target):
    source = tl.load(table).to(tl.pointer_type(tl.float32))
    tl.store(target, tl.load(source))


def room() -> tuple[Tensor, Tensor]:
    """Two tensors of 8 numbers in the middle of memory that nothing else uses."""
    return torch.zeros(64)[24:32], torch.zeros(64)[24:32]


def test_accesses_within_the_tensors_of_a_launch_pass() -> None:
    source, target = room()
    with bounded_launches():
        copy_kernel[(1,)](source, target, 8, 8, 16)
        add_kernel[(1,)](target, 7)
    assert target.tolist() == [0.0] * 7 + [1.0]


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (
            lambda source, target: copy_kernel[(1,)](source, target, 9, 8, 16),
            "kernel copy_kernel: 1 element read outside of its tensors, the first at byte 32 of "
            "source, which has 32",
        ),
        (
            lambda source, target: copy_kernel[(1,)](source, target, 8, 10, 16),
            "kernel copy_kernel: 2 elements written outside of its tensors, the first at byte 32 "
            "of target, which has 32",
        ),
        (
            lambda source, target: add_kernel[(1,)](target, 9),
            "kernel add_kernel: 1 element changed outside of its tensors, the first at byte 36 of "
            "target, which has 32",
        ),
        (
            lambda source, target: add_kernel[(1,)](target, -1),
            "kernel add_kernel: 1 element changed outside of its tensors, the first ahead of all "
            "of them",
        ),
    ],
)
def test_an_access_outside_is_refused_before_it_happens(
    launch: Callable[[Tensor, Tensor], None], message: str
) -> None:
    source, target = room()
    with bounded_launches(), pytest.raises(OutOfBounds) as caught:
        launch(source, target)
    assert str(caught.value) == message
    base = target._base
    assert base is not None
    assert not base.any()


def test_rows_of_a_strided_view_may_be_read_from_the_first_to_the_last() -> None:
    source, (_, target) = torch.ones(4, 8)[:2, :3], room()
    with bounded_launches():
        copy_kernel[(1,)](source, target, 8, 8, 16)
        with pytest.raises(OutOfBounds, match="at byte 44 of source"):
            copy_kernel[(1,)](source, torch.zeros(16), 12, 12, 16)


def test_memory_behind_an_address_in_a_tensor_is_not_judged() -> None:
    source, target = room()
    with bounded_launches():
        follow_kernel[(1,)](torch.tensor([source.fill_(3.0).data_ptr()]), target)
    assert target[0] == 3.0


class ReadsTooFar(DenseDelta):
    """Reads as many numbers behind its input as there are base rows, and uses none of them."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        read = 8 + int((self.token_slots < 0).sum())
        copy_kernel[(1,)](*room(), read, 8, 16)
        return super().apply(x, out)


def judged(make_trial: Callable[..., Trial], oracle: OracleName, **axes: Any) -> Judgement:
    shape = {"tokens": 6, "in_features": 8, "slices": (8,), "rank": 2, "slots": 3}
    trial = make_trial(ReadsTooFar, **(shape | {"dtype": Dtype.FP32} | axes))
    return judge_with(ORACLES[oracle], trial)


@pytest.mark.parametrize(
    "oracle", [OracleName.REFERENCE, OracleName.EXACT, OracleName.CANARY, OracleName.PERMUTE]
)
def test_every_oracle_fails_a_kernel_that_reads_outside(
    oracle: OracleName, make_trial: Callable[..., Trial]
) -> None:
    judgement = judged(make_trial, oracle)
    assert judgement.verdict is Verdict.FAIL
    assert judgement.failure is Failure.FOREIGN_MEMORY
    assert "copy_kernel" in judgement.message
    assert "byte 32 of source" in judgement.message
