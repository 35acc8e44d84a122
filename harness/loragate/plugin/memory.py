"""Device memory of a worker: a share of its own, and for the few cases that need more, a part of
what the workers of a GPU have in common.

Invariant: workers together never ask a GPU for more than was free when they started, whatever
their cases need and however a worker ends. A case that has to wait for memory does so before its
deadline starts.
"""

from __future__ import annotations

import fcntl
import gc
import os
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import pytest

from loragate.core.gpus import share_of_gpu
from loragate.matrix.footprint import footprint_bytes
from loragate.plugin.collection import case_run_of
from loragate.plugin.options import SETTINGS, Role

# how many workers share the worker's GPU, the bytes that were free on it before the first of them
# started (0: unknown), and the bytes that the largest of all cases needs
WORKER_INPUT_SHARING = "loragate_gpu_sharing"
WORKER_INPUT_FREE = "loragate_gpu_free"
WORKER_INPUT_LARGEST = "loragate_largest_case"
_UNIT = 1 << 28
_RETRY_S = 0.05


class Allocator(Protocol):
    total: int

    def limit(self, size: int) -> None:
        """Allow the process `size` bytes of `total`."""

    def trim(self) -> None:
        """Give back what is cached."""


class SpareRoom:
    """Units of memory, each lent to one process at a time.

    A unit is a locked byte of a file: the kernel unlocks those of a process that dies.
    """

    def __init__(self, path: Path, units: int) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self.units = units

    @contextmanager
    def borrow(self, count: int) -> Iterator[None]:
        """Hold `count` units; waits until there are that many side by side."""
        assert count <= self.units, f"{count} of {self.units} units"
        file = self._open()
        start = self._take(file, count)
        try:
            yield
        finally:
            fcntl.lockf(file, fcntl.LOCK_UN, count, start)

    def _take(self, file: IO[bytes], count: int) -> int:
        # no queue: only the few large cases compete, so each has its turn in the end
        while True:
            for start in range(self.units - count + 1):
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, count, start)
                except OSError:
                    continue
                return start
            time.sleep(_RETRY_S)

    def _open(self) -> IO[bytes]:
        # by the first large case only: until then an earlier report may be moved aside
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab")
        return self._file


class WorkerMemory:
    def __init__(self, own_bytes: int, spare: SpareRoom, allocator: Allocator) -> None:
        self._own_bytes = own_bytes
        self._spare = spare
        self._allocator = allocator
        allocator.limit(own_bytes)

    @contextmanager
    def room_for(self, case_bytes: int) -> Iterator[None]:
        """Inside, a case of that size has its memory."""
        # an estimate may exceed all there is; the case then gets that
        units = min(self._spare.units, -(-(case_bytes - self._own_bytes) // _UNIT))
        if units <= 0:
            yield
            return
        with self._spare.borrow(units):
            self._allocator.limit(self._own_bytes + units * _UNIT)
            try:
                yield
            finally:
                self._allocator.trim()
                self._allocator.limit(self._own_bytes)


MEMORY = pytest.StashKey[WorkerMemory]()


def divide(
    path: Path, sharing: int, largest: int, allocator: Allocator, *, free: int
) -> WorkerMemory:
    """The memory of one of `sharing` workers, all of which name the same `path` and divide the
    same `free` bytes. What is free by now would not do: it tells who started first."""
    # units are whole: one more makes up for the parts that are lost
    share = share_of_gpu(free or allocator.total, sharing, largest + _UNIT)
    spare = SpareRoom(path, share.spare_bytes // _UNIT)
    return WorkerMemory(share.own_bytes, spare, allocator)


def pytest_sessionstart(session: pytest.Session) -> None:
    settings = session.config.stash[SETTINGS]
    if settings.role is not Role.WORKER:
        return
    worker_input: dict[str, Any] = session.config.workerinput  # type: ignore[attr-defined]
    if WORKER_INPUT_SHARING not in worker_input:
        return
    import torch

    if torch.cuda.is_available():
        session.config.stash[MEMORY] = divide(
            settings.room_file(os.environ.get("CUDA_VISIBLE_DEVICES", "")),
            worker_input[WORKER_INPUT_SHARING],
            worker_input[WORKER_INPUT_LARGEST],
            TorchAllocator(),
            free=worker_input[WORKER_INPUT_FREE],
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    run, memory = case_run_of(item), item.config.stash.get(MEMORY, None)
    if run is None or memory is None:
        return (yield)
    with memory.room_for(footprint_bytes(run.case)):
        return (yield)


class TorchAllocator:
    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        self.total = torch.cuda.get_device_properties(0).total_memory

    def limit(self, size: int) -> None:
        self._cuda.set_per_process_memory_fraction(min(1.0, size / self.total))

    def trim(self) -> None:
        # tensors of a failed case may hang in the cycles of its traceback
        gc.collect()
        self._cuda.empty_cache()
