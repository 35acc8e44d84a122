"""Copies to a device are queued: what they read must not change before they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.runtime import device as runtime

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="copies are queued on a GPU")


class BusyDevice(TorchFunctionMode):
    """Models pinned memory and a device that runs no copy before `finish` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.queued: list[Tensor] = []
        self.pinned: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is Tensor.pin_memory:
            # what is pinned already is returned as it is
            return args[0] if args[0].data_ptr() in self.pinned else self.pin(args[0].clone())
        if func is Tensor.to and given.pop("non_blocking", False):
            self.queued.append(args[0])
            return torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
        if given.pop("pin_memory", False):
            return self.pin(func(*args, **given))
        return func(*args, **(kwargs or {}))

    def pin(self, block: Tensor) -> Tensor:
        self.pinned.add(block.data_ptr())
        return block

    def finish(self) -> list[list[int]]:
        """What the queued copies read."""
        return [source.tolist() for source in self.queued]


@pytest.mark.parametrize("pinned", [False, True])
def test_a_host_buffer_may_be_overwritten_as_soon_as_its_copy_is_queued(pinned: bool) -> None:
    busy, steps = BusyDevice(), [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    host = torch.zeros(3, dtype=torch.int32)
    if pinned:
        busy.pin(host)
    for step in steps:
        host.copy_(torch.tensor(step))
        with busy:
            runtime.upload(host, torch.device("cuda", 0))
    host.fill_(-1)
    assert busy.finish() == steps


@needs_gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_queued_steps_get_the_values_of_their_own_time(pinned: bool) -> None:
    where = torch.device("cuda", torch.cuda.current_device())
    host = torch.zeros(4096, dtype=torch.int32, pin_memory=pinned)
    torch.cuda._sleep(1 << 30)
    behind = torch.cuda.Event()
    copies = []
    for step in range(64):
        host.fill_(step)
        copies.append(runtime.upload(host, where))
    host.fill_(-1)
    behind.record()
    assert not behind.query(), "the device was not busy: nothing was queued"
    torch.cuda.synchronize()
    assert [copy.unique().tolist() for copy in copies] == [[step] for step in range(64)]


def test_a_mapping_on_another_device_is_refused() -> None:
    metadata = BatchMetadata(max_tokens=4, max_slots=2, device="cpu")
    metadata.prepare(torch.tensor([1], dtype=torch.int32))
    message = r"token_slots must be on cpu \(got meta\)"
    with pytest.raises(ValueError, match=message):
        metadata.prepare(torch.zeros(3, dtype=torch.int32, device="meta"))
    assert metadata.num_rows == 1
    assert metadata.token_slots.tolist() == [1, -1, -1, -1]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_mapping_on_another_gpu_is_refused() -> None:
    metadata = BatchMetadata(max_tokens=4, max_slots=2, device="cuda:1")
    message = r"token_slots must be on cuda:1 or cpu \(got cuda:0\)"
    with pytest.raises(ValueError, match=message):
        metadata.prepare(torch.zeros(3, dtype=torch.int32, device="cuda:0"))
