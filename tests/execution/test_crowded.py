"""How much of a GPU is left while it is held; no device is needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.execution import crowded
from loragate.execution.crowded import room_for_one_block
from loragate.execution.streams.model import modelled_streams

DEVICE = torch.device("cuda", 0)
LARGEST_BLOCK = 1024


class Gpu:
    """Multiprocessors that take blocks as long as these fit, and the kernel that holds them. It
    notes the streams that the host waits for, and the room that there is then."""

    def __init__(self, processors: int, threads: int) -> None:
        self.properties = SimpleNamespace(
            multi_processor_count=processors, max_threads_per_multi_processor=threads
        )
        # of blocks, and what releases them
        self._held: list[tuple[int, Tensor]] = []
        self.waits: list[tuple[int | None, int]] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., Any]:
        def launch(resident: Tensor, released: Tensor, limit: int, *, num_warps: int) -> Any:
            assert num_warps * 32 == LARGEST_BLOCK
            resident[: grid[0]] = 1
            if not released.item():
                self._held.append((grid[0], released))
            assert self.room() >= 0
            return SimpleNamespace(function=0)

        return launch

    def room(self) -> int:
        """How many blocks of 1024 threads have room."""
        found = self.properties
        all_blocks = found.multi_processor_count * (
            found.max_threads_per_multi_processor // LARGEST_BLOCK
        )
        held = sum(blocks for blocks, released in self._held if not released.item())
        return int(all_blocks - held)

    def sync(self, *, stream: int | None = None, event: int | None = None) -> None:
        self.waits.append((stream, self.room()))


@pytest.fixture(
    params=[(132, 2048), (5, 2048), (84, 1536), (2, 1024)],
    ids=lambda sizes: "{} of {} threads".format(*sizes),
)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu(*request.param)
    driver: Any = SimpleNamespace(
        CUfunction=lambda function: function,
        CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT=0),
        cuFuncSetAttribute=lambda *arguments: (0,),
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    monkeypatch.setattr(crowded, "hold_kernel", made)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: made.properties)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    return made


def test_one_block_of_1024_threads_has_room_within_and_as_many_as_before_behind_it(
    gpu: Gpu,
) -> None:
    before = gpu.room()
    with modelled_streams():
        with room_for_one_block(DEVICE):
            assert gpu.room() == 1
        assert gpu.room() == before
        with suppress(KeyError), room_for_one_block(DEVICE):
            raise KeyError
        assert gpu.room() == before


def test_the_device_is_held_until_the_work_of_the_caller_has_ended(gpu: Gpu) -> None:
    observer: Any = gpu
    with modelled_streams(observer):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            with room_for_one_block(DEVICE):
                gpu.waits.clear()
            waits = gpu.waits
    assert [room for stream, room in waits if stream == side.stream_id] == [1]
