"""Whatever an oracle runs in the interpreter, a kernel that leaves its tensors is wrong, also where
no result depends on what it reads there."""

from __future__ import annotations

import sys
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
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict  # noqa: E402
from loragate.execution.bounds import FalseClaim, OutOfBounds  # noqa: E402
from loragate.execution.watched_launches import watched_launches  # noqa: E402
from loragate.matrix.case import Dtype  # noqa: E402
from loragate.oracles import ORACLES  # noqa: E402
from loragate.protocol import Trial  # noqa: E402
from loragate.run.trial import judge_with  # noqa: E402
from loragate.subjects.torch.subject import DenseDelta  # noqa: E402

from ..far_memory import copied_memory, far  # noqa: E402, F401


@triton.jit
def copy_kernel(source, target, read, written, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    values = tl.load(source + offs, mask=offs < read, other=0.0)
    tl.store(target + offs, values, mask=offs < written)


@triton.jit
def shifted_kernel(source, target, start):
    offs = tl.arange(0, 8)
    tl.store(target + offs, tl.load(source + start + offs))


@triton.jit
def add_kernel(target, at):
    tl.atomic_add(target + at, 1.0)


@triton.jit
def swap_kernel(target, at):
    tl.atomic_cas(target + at, 0, 1)


@triton.jit
def follow_kernel(table, target):
    source = tl.load(table).to(tl.pointer_type(tl.float32))
    tl.store(target, tl.load(source))


@triton.jit
def given_kernel(address, target):
    tl.store(target, tl.load(address.to(tl.pointer_type(tl.float32))))


@triton.jit
def look_up_kernel(ids, source, target):
    tl.store(target, tl.load(source + tl.load(ids)))


@triton.jit
def move(source, target):
    tl.store(target, tl.load(source))


@triton.jit
def move_kernel(source, target, at):
    move(source + at, target)


@triton.jit
def described_kernel(source, target, row):
    tl.store(target + tl.arange(0, 4), tl.reshape(source.load([row, 0]), [4]))


@triton.jit
def aligned(value, MULTIPLE: tl.constexpr):
    return tl.multiple_of(value, MULTIPLE)


@triton.jit
def claiming_kernel(target, start, MULTIPLE: tl.constexpr):
    offs = tl.multiple_of(start + tl.arange(0, 4), MULTIPLE)
    tl.store(target + offs % 8, aligned(start, MULTIPLE))


# so large that it is mapped by itself: the heap of some builds of Python is close to address 0
_MAPPED = 1 << 24


def room(size: int = 64) -> tuple[Tensor, Tensor]:
    """Tensors of eight 1 and of eight 0 in the middle of memory that nothing else uses."""
    return torch.ones(size)[24:32], torch.zeros(size)[24:32]


def test_a_number_that_is_no_multiple_of_what_a_kernel_says_is_refused() -> None:
    _, target = room()
    with watched_launches():
        claiming_kernel[(1,)](target, 24, 8)
        claiming_kernel[(1,)](target, 0, 16)
    message = "kernel claiming_kernel: says that 24 is a multiple of 16"
    with pytest.raises(FalseClaim, match=message), watched_launches():
        claiming_kernel[(1,)](target, 24, 16)
    with pytest.raises(FalseClaim, match=message), watched_launches(), suppress(Exception):
        claiming_kernel[(1,)](target, 24, 16)
    # outside, the interpreter ignores it
    claiming_kernel[(1,)](target, 24, 16)


def test_accesses_within_the_tensors_of_a_launch_pass() -> None:
    source, target = room()
    with watched_launches():
        copy_kernel[(1,)](source, target, 8, 8, 16)
        add_kernel[(1,)](target, 7)
    assert target.tolist() == [1.0] * 7 + [2.0]


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (
            lambda source, target: copy_kernel[(1,)](source, target, 9, 8, 16),
            "kernel copy_kernel: 1 element read outside of its tensors, the first at byte 32 of "
            "source, which has 32 and is a view of 256",
        ),
        (
            lambda source, target: copy_kernel[(1,)](source, target, 8, 10, 16),
            "kernel copy_kernel: 2 elements written outside of its tensors, the first at byte 32 "
            "of target, which has 32 and is a view of 256",
        ),
        (
            lambda source, target: add_kernel[(1,)](target, 100),
            "kernel add_kernel: 1 element changed outside of its tensors, the first at byte 400 of "
            "target, which has 32",
        ),
        (
            lambda source, target: swap_kernel[(1,)](target.view(torch.int32), 8),
            "kernel swap_kernel: 1 element changed outside of its tensors, the first at byte 32 of "
            "target, which has 32 and is a view of 256",
        ),
        (
            lambda source, target: move_kernel[(1,)](source, target, 8),
            "kernel move_kernel: 1 element read outside of its tensors, the first at byte 32 of "
            "source, which has 32 and is a view of 256",
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
    with pytest.raises(OutOfBounds) as caught, watched_launches():
        launch(source, target)
    assert str(caught.value) == message
    base = target._base
    assert base is not None
    assert not base.any()


def test_rows_of_a_strided_view_may_be_read_from_the_first_to_the_last() -> None:
    source, (_, target) = torch.ones(4, 8)[:2, :3], room()
    with watched_launches():
        copy_kernel[(1,)](source, target, 8, 8, 16)
    with pytest.raises(OutOfBounds, match="at byte 44 of source"), watched_launches():
        copy_kernel[(1,)](source, torch.zeros(16), 12, 12, 16)


def test_an_argument_that_is_said_to_hold_an_address_stands_for_all_memory_of_its_tensor() -> None:
    source, target = room()
    stack = source._base
    assert stack is not None
    with watched_launches({("copy_kernel", "source")}):
        copy_kernel[(1,)](source, target, 9, 8, 16)
    for addresses in ({("copy_kernel", "target")}, {("add_kernel", "source")}, set()):
        with pytest.raises(OutOfBounds, match="read outside"), watched_launches(addresses):
            copy_kernel[(1,)](source, target, 9, 8, 16)
    beyond = stack[-8:]
    with pytest.raises(OutOfBounds), watched_launches({("copy_kernel", "source")}):
        copy_kernel[(1,)](beyond, target, 9, 8, 16)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_memory_behind_an_address_in_a_tensor_is_not_judged(dtype: torch.dtype) -> None:
    source, target = room()
    with watched_launches():
        follow_kernel[(1,)](torch.tensor([source.data_ptr()], dtype=dtype), target)
    assert target[0] == 1.0


def test_memory_behind_an_address_that_is_an_argument_is_not_judged() -> None:
    source, target = room(_MAPPED)
    with watched_launches():
        given_kernel[(1,)](source.data_ptr(), target)
    assert target[0] == 1.0


def test_a_large_integer_that_is_no_address_excuses_nothing() -> None:
    source, target = room()
    with pytest.raises(OutOfBounds, match="1 element read outside"), watched_launches():
        look_up_kernel[(1,)](torch.tensor([8, 1 << 40, 1 << 62]), source, target)


@pytest.mark.parametrize(
    ("start", "first"),
    [
        (-2, "ahead of all of them"),
        # between the two, the last elements lie in the second one
        (14, "at byte 56 of source, which has 32 and is a view of 256"),
    ],
)
def test_a_block_whose_last_elements_lie_in_a_tensor_may_not_begin_outside(
    start: int, first: str
) -> None:
    memory = torch.zeros(64)
    message = f"kernel shifted_kernel: 2 elements read outside of its tensors, the first {first}$"
    with pytest.raises(OutOfBounds, match=message), watched_launches():
        shifted_kernel[(1,)](memory[8:16], memory[24:32], start)


def test_no_size_excuses_an_access_far_ahead_of_all_tensors() -> None:
    source, target = room(_MAPPED)
    places = torch.zeros(_MAPPED, dtype=torch.int64)[:3]
    places.copy_(torch.tensor([-(1 << 36), 8, 1 << 20]))
    ahead = "the first ahead of all of them"
    with pytest.raises(OutOfBounds, match=ahead), watched_launches():
        look_up_kernel[(1,)](places, source, target)


@pytest.mark.usefixtures("copied_memory")
def test_tensors_of_a_device_are_judged_where_the_interpreter_has_copied_them() -> None:
    source, target = room()
    with watched_launches():
        copy_kernel[(1,)](far(source), far(target), 8, 8, BLOCK=16)
    assert torch.equal(target, source)
    source = torch.ones(8)
    with pytest.raises(OutOfBounds, match="1 element read outside"), watched_launches():
        copy_kernel[(1,)](far(source), far(target), 9, 8, BLOCK=16)


def test_blocks_of_a_tensor_descriptor_are_judged_as_well() -> None:
    source, (_, target) = torch.ones(4, 4), room()
    described = TensorDescriptor.from_tensor(source, [1, 4])
    with watched_launches():
        described_kernel[(1,)](described, target, 3)
    assert target[:4].tolist() == [1.0] * 4
    # what a descriptor says is larger than its tensor
    described = TensorDescriptor(source[:3], [4, 4], [4, 1], [1, 4])
    with pytest.raises(OutOfBounds, match="4 elements read outside"), watched_launches():
        described_kernel[(1,)](described, target, 3)


def test_a_descriptor_of_a_tensor_under_another_dtype_has_the_bytes_of_the_tensor() -> None:
    source, (_, target) = torch.ones(4, 4), room()
    with watched_launches():
        bits = triton.reinterpret(source.view(torch.int32), tl.float32)
        described_kernel[(1,)](TensorDescriptor(bits, [4, 4], [4, 1], [1, 4]), target, 3)
    assert target[:4].tolist() == [1.0] * 4


def test_a_launch_within_another_one_is_judged_by_its_own_tensors() -> None:
    _, target = room()

    def before(*args: object, **options: object) -> None:
        move_kernel[(1,)](*room(), 0)

    add_kernel.pre_run_hooks.append(before)
    try:
        with watched_launches():
            add_kernel[(1,)](target, 7)
    finally:
        add_kernel.pre_run_hooks.remove(before)
    assert target[7] == 1.0


def test_what_the_caller_of_a_kernel_swallows_is_raised_at_the_end() -> None:
    source, target = room()
    with (
        pytest.raises(OutOfBounds, match="byte 32 of source"),
        watched_launches(),
        suppress(OutOfBounds),
    ):
        copy_kernel[(1,)](source, target, 9, 8, 16)


@pytest.mark.parametrize(
    ("own", "raised"),
    [
        (RuntimeError("the kernel failed"), OutOfBounds),
        (AssertionError("another result"), OutOfBounds),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=lambda one: (one if isinstance(one, type) else type(one)).__name__,
)
def test_no_error_but_the_end_of_the_process_hides_an_access_outside(
    own: BaseException, raised: type[BaseException]
) -> None:
    def fails() -> None:
        with suppress(Exception):
            copy_kernel[(1,)](*room(), 9, 8, 16)
        raise own

    with pytest.raises(raised), watched_launches():
        fails()


def test_without_triton_nothing_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loragate.execution.watched_launches.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "triton.runtime.interpreter", None)
    with watched_launches():
        pass


class ReadsTooFar(DenseDelta):
    """Reads as many numbers behind its input as there are base rows, and uses none of them."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        self.read()
        return super().apply(x, out)

    def read(self) -> None:
        read = 8 + int((self.token_slots < 0).sum())
        copy_kernel[(1,)](*room(), read, 8, 16)


class FallsBack(ReadsTooFar):
    def read(self) -> None:
        with suppress(Exception):
            super().read()


class SaysThatItFailed(ReadsTooFar):
    def read(self) -> None:
        try:
            super().read()
        except Exception as error:
            raise RuntimeError("the launch failed") from error


def judged(trial: Trial, oracle: OracleName) -> Judgement:
    shape = {"tokens": 6, "in_features": 8, "slices": (8,), "rank": 2, "slots": 3}
    case = replace(trial.case, dtype=Dtype.FP32, **shape)
    return judge_with(ORACLES[oracle], replace(trial, case=case))


@pytest.mark.parametrize("subject", [ReadsTooFar, FallsBack, SaysThatItFailed])
@pytest.mark.parametrize(
    "oracle",
    [
        OracleName.REFERENCE,
        OracleName.EXACT,
        OracleName.CANARY,
        OracleName.PERMUTE,
    ],
)
def test_every_oracle_fails_a_kernel_that_reads_outside(
    oracle: OracleName, subject: type[DenseDelta], make_trial: Callable[..., Trial]
) -> None:
    judgement = judged(make_trial(subject), oracle)
    assert judgement.verdict is Verdict.FAIL
    assert judgement.failure is Failure.FOREIGN_MEMORY
    assert "copy_kernel" in judgement.message
    assert "byte 32 of source" in judgement.message
