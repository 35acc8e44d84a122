"""Inputs of a step: one block, one copy, and nothing of the step before."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lorakernels.runtime import streams
from lorakernels.runtime.staging import Staging
from lorakernels.serving.inputs import InputSpec, StepInputs

MOST = 7
SPECS = {
    "input_ids": InputSpec(dtype=torch.int64, padding=3),
    "positions": InputSpec(dtype=torch.int64, shape=(2,), padding=-5),
    "length": InputSpec(dtype=torch.int32, per_token=False),
    "scale": InputSpec(dtype=torch.bfloat16, shape=(3,), padding=0.5),
}


def made() -> StepInputs:
    return StepInputs(SPECS, max_tokens=MOST, device="cpu")


def step(rows: int, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    values = {
        "input_ids": torch.arange(rows) + 100 * seed,
        "positions": torch.arange(2 * rows).view(rows, 2) + 1000 * seed,
        "length": torch.tensor([rows + seed], dtype=torch.int32),
        "scale": torch.full((rows, 3), float(seed), dtype=torch.bfloat16),
    }
    return torch.full((rows,), seed % 3, dtype=torch.int32), values


@given(st.lists(st.tuples(st.integers(0, MOST), st.integers(0, 9)), min_size=1, max_size=5))
def test_rows_behind_the_live_ones_are_padding_whatever_came_before(
    steps: list[tuple[int, int]],
) -> None:
    inputs = made()
    for rows, seed in steps:
        slots, values = step(rows, seed)
        inputs.write(slots, values)
        for name, spec in SPECS.items():
            live = rows if spec.per_token else 1
            assert inputs[name].dtype == spec.dtype
            assert torch.equal(inputs[name][:live], values[name]), name
            assert (inputs[name][live:] == spec.padding).all(), name
        assert inputs.token_slots.tolist() == slots.tolist() + [-1] * (MOST - rows)


@pytest.mark.parametrize(
    "values",
    [
        torch.imag(torch.ones(4, dtype=torch.complex64).conj()),
        torch.ones(4, dtype=torch.complex64).conj(),
        torch.ones(4).to_sparse(),
    ],
    ids=["negated", "conjugated", "sparse"],
)
def test_an_input_whose_values_are_not_in_memory_is_refused_before_any_is_written(
    values: Tensor,
) -> None:
    specs = {"x": InputSpec(dtype=torch.float32), "y": InputSpec(dtype=values.dtype)}
    inputs = StepInputs(specs, max_tokens=MOST, device="cpu")
    ones = torch.ones(4)
    with pytest.raises(ValueError, match="y must hold its values in memory"):
        inputs.write(torch.zeros(4, dtype=torch.int32), {"x": ones, "y": values})
    one = torch.zeros(1, dtype=torch.int32)
    inputs.write(one, {"x": ones[:1], "y": ones[:1].to(values.dtype)})
    assert inputs["x"].tolist() == inputs["y"].tolist() == [1] + [0] * (MOST - 1)


def test_inputs_are_staged_on_the_host_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        inputs = made()
    slots, values = step(3, seed=1)
    inputs.write(slots, values)
    assert torch.equal(inputs["input_ids"][:3], values["input_ids"])
    assert inputs.token_slots.tolist()[:3] == slots.tolist()


def test_all_rows_are_padding_before_the_first_step_and_after_a_reset() -> None:
    inputs = made()
    for _ in range(2):
        assert inputs.token_slots.tolist() == [-1] * MOST
        assert inputs["input_ids"].tolist() == [3] * MOST
        assert inputs["length"].tolist() == [0]
        inputs.write(*step(4, 5))
        inputs.reset()


def test_slots_of_a_reset_are_gone_after_a_shorter_step() -> None:
    inputs = made()
    inputs.reset([2, 1, 0, 1, 2])
    assert inputs.token_slots.tolist() == [2, 1, 0, 1, 2, -1, -1]
    slots, values = step(2, 4)
    inputs.write(slots, values)
    assert inputs.token_slots.tolist() == [*slots.tolist(), *[-1] * (MOST - 2)]


def test_every_tensor_keeps_its_address_and_lies_in_one_block() -> None:
    inputs = made()
    before = {name: tensor.data_ptr() for name, tensor in inputs.tensors.items()}
    inputs.write(*step(MOST, 1))
    start, end = inputs.block.data_ptr(), inputs.block.data_ptr() + inputs.num_bytes
    spans = []
    for name, tensor in inputs.tensors.items():
        assert tensor.data_ptr() == before[name]
        assert start <= tensor.data_ptr() <= end - tensor.nbytes
        spans.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
    spans.sort()
    for (_, stop), (begin, _) in pairwise(spans):
        assert stop <= begin, "no two of them share memory"


class BusyDevice(TorchFunctionMode):
    """Models pinned memory, and a device that runs no copy before `finish` is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        # what each copy reads, and what that was when it was queued
        self.queued: list[tuple[Tensor, Tensor]] = []
        self.num_run = 0
        self.pinned: list[Tensor] = []
        monkeypatch.setattr(streams, "stream_module", lambda device: self)

    def Event(self) -> Event:
        return Event(self)

    def current_stream(self, device: torch.device) -> None:
        return None

    def finish(self, count: int | None = None) -> list[Tensor]:
        """Runs the next copies, or all that are queued; what they read."""
        end = len(self.queued) if count is None else self.num_run + count
        read = self.queued[self.num_run : end]
        self.num_run = end
        for source, queued in read:
            # a copy may run at once, or late
            assert torch.equal(source, queued), "its memory changed before it had run"
        return [queued for _, queued in read]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is Tensor.copy_ and options.pop("non_blocking", False):
            assert self.is_pinned(args[1]), "a pageable copy waits for the device"
            self.queued.append((args[1], args[1].clone()))
            return args[0]
        if options.pop("pin_memory", False):
            block = func(*args, **options)
            self.pinned.append(block)
            return block
        return func(*args, **(kwargs or {}))

    def is_pinned(self, source: Tensor) -> bool:
        memory = source.untyped_storage().data_ptr()
        return any(block.untyped_storage().data_ptr() == memory for block in self.pinned)

    @property
    def pinned_bytes(self) -> int:
        return sum(block.nbytes for block in self.pinned)


class Event:
    """Done when all copies have run that were queued before it was recorded."""

    def __init__(self, device: BusyDevice) -> None:
        self.device, self.position = device, 0

    def record(self, stream: None) -> None:
        self.position = len(self.device.queued)

    def query(self) -> bool:
        return self.position <= self.device.num_run


def busy_inputs(monkeypatch: pytest.MonkeyPatch) -> tuple[StepInputs, BusyDevice]:
    inputs = made()
    inputs.block = torch.empty_like(inputs.block, device="meta")
    return inputs, BusyDevice(monkeypatch)


# more than share one event
STEPS = [step(seed % (MOST + 1), seed) for seed in range(40)]


@pytest.mark.parametrize("queued", [1, 3, 16, 17, 40])
def test_a_step_is_one_copy_from_memory_that_no_later_step_writes(
    monkeypatch: pytest.MonkeyPatch, queued: int
) -> None:
    inputs, busy = busy_inputs(monkeypatch)
    with busy:
        for _ in range(4):
            wanted = []
            for slots, values in STEPS[:queued]:
                inputs.write(slots, values)
                wanted.append(torch.from_numpy(inputs._host).clone())
            found = busy.finish()
            assert len(found) == queued
            for source, host in zip(found, wanted, strict=True):
                assert torch.equal(source, host)


@pytest.mark.parametrize("queued", [1, 15, 16, 17, 31, 32, 33])
def test_a_device_that_is_some_steps_behind_reads_the_inputs_of_each_step(
    monkeypatch: pytest.MonkeyPatch, queued: int
) -> None:
    for run in range(queued + 1):
        inputs, busy = busy_inputs(monkeypatch)
        wanted, found = [], []
        with busy:
            # the second time all blocks of the first may be used again
            for _ in range(2):
                for count, finished in ((queued, run), (len(STEPS), None)):
                    for slots, values in STEPS[:count]:
                        inputs.write(slots, values)
                        wanted.append(torch.from_numpy(inputs._host).clone())
                    found += busy.finish(finished)
        assert len(found) == len(wanted)
        for source, host in zip(found, wanted, strict=True):
            assert torch.equal(source, host), f"{run} of {queued} had run"


@pytest.mark.parametrize("queued", [1, 2, 16, 40])
def test_steps_whose_copies_have_run_leave_their_memory_to_the_next_ones(
    monkeypatch: pytest.MonkeyPatch, queued: int
) -> None:
    inputs, busy = busy_inputs(monkeypatch)
    with busy:
        made = []
        for _ in range(50):
            for slots, values in STEPS[:queued]:
                inputs.write(slots, values)
            busy.finish()
            made.append(busy.pinned_bytes)
    assert made[-1] == made[3], "the memory of the first rounds is enough for all others"
    # what is in flight, and what shares an event with the oldest and with the newest of it
    assert made[-1] <= (queued + 32) * inputs.num_bytes


# the second one fits once and a half into what may wait
@pytest.mark.parametrize("size", [3 << 20, (1 << 20) * 2 // 3])
def test_large_inputs_share_an_event_with_few_others_so_that_little_memory_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    busy, target = BusyDevice(monkeypatch), torch.empty(size, dtype=torch.uint8, device="meta")
    staging = Staging()
    with busy:
        for number in range(4):
            staging.upload(np.full(target.shape, number, dtype=np.uint8), target)
            assert [int(source[0]) for source in busy.finish()] == [number]
    assert busy.pinned_bytes == target.nbytes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies are queued on a GPU")
def test_steps_queued_behind_a_busy_gpu_get_the_inputs_of_their_own_time() -> None:
    inputs = StepInputs(SPECS, max_tokens=MOST, device="cuda")
    for _ in range(2):
        # twice, since the second time all blocks of the first are free
        torch.cuda.synchronize()
        torch.cuda._sleep(1 << 30)
        behind = torch.cuda.Event()
        found = []
        for seed in range(64):
            inputs.write(*step(seed % MOST, seed))
            found.append(inputs.block.clone())
        behind.record()
        assert not behind.query(), "the device was not busy: nothing was queued"
        for seed, block in enumerate(found):
            wanted = made()
            wanted.write(*step(seed % MOST, seed))
            assert torch.equal(block.cpu(), wanted.block), f"the inputs of step {seed}"


def change(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda values: values.__setitem__(name, value)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            change("input_ids", torch.zeros(3, dtype=torch.int32)),
            r"input_ids must be torch.int64 \[3\] on cpu \(got torch.int32 \[3\] on cpu\)",
        ),
        (change("input_ids", torch.zeros(2, dtype=torch.int64)), r"input_ids must be .*\[3\]"),
        (
            change("length", torch.zeros(3, dtype=torch.int32)),
            r"length must be torch.int32 \[1\] on cpu \(got torch.int32 \[3\]",
        ),
        (
            change("input_ids", torch.zeros(3, dtype=torch.int64, device="meta")),
            r"on cpu \(got torch.int64 \[3\] on meta\)",
        ),
        (lambda values: values.pop("scale"), r"inputs must be .*scale.* \(got input_ids"),
        (change("more", torch.zeros(3)), r"inputs must be .*\(got .*more"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_with_nothing_changed(
    spoil: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    inputs = made()
    inputs.write(*step(5, 1))
    before = inputs.block.clone()
    slots, values = step(3, 2)
    spoil(values)
    with pytest.raises(ValueError, match=message):
        inputs.write(slots, values)
    assert torch.equal(inputs.block, before)
    # rows of the step before are padding afterwards, however few the refused step had
    inputs.write(*step(4, 1))
    alone = made()
    alone.write(*step(4, 1))
    assert torch.equal(inputs.block, alone.block)


def test_more_rows_than_the_largest_batch_are_refused_by_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"a step may have 7 rows, max_tokens \(got 8\)"):
        made().write(*step(MOST + 1, 1))


@pytest.mark.parametrize(
    ("specs", "most", "message"),
    [
        ({}, 0, r"max_tokens must be at least 1 \(got 0\)"),
        ({"token_slots": InputSpec(dtype=torch.int32)}, 3, "specs must not name token_slots"),
    ],
)
def test_inputs_that_cannot_be_made_are_refused(
    specs: dict[str, InputSpec], most: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        StepInputs(specs, max_tokens=most, device="cpu")


def test_inputs_of_a_single_row_can_be_made() -> None:
    inputs = StepInputs(SPECS, max_tokens=1, device="cpu")
    slots, values = step(1, 2)
    inputs.write(slots, values)
    assert inputs.token_slots.tolist() == slots.tolist()
