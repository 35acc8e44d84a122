"""Device memory of a worker: a share of its own and, for the few cases that need more, a part of
the capacity that the workers of a GPU have in common.

Invariant: together, workers never ask a GPU for more than was free when they started, whatever
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
        """Release cached memory."""


class SharedCapacity:
    """Units of memory that several processes borrow, each unit by one process at a time.

    A unit is a locked byte of a file, so that the system frees the units of a process that dies.
    """

    def __init__(self, path: Path, units: int) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self.units = units

    @contextmanager
    def borrow(self, count: int) -> Iterator[None]:
        """Hold `count` units; waits until that many adjacent units are free."""
        assert count <= self.units, f"{count} of {self.units} units"
        file = self._open()
        start = self._take(file, count)
        try:
            yield
        finally:
            fcntl.lockf(file, fcntl.LOCK_UN, count, start)

    def _take(self, file: IO[bytes], count: int) -> int:
        # no queue: only few large cases compete, so each of them gets its units in the end
        while True:
            for start in range(self.units - count + 1):
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, count, start)
                except OSError:
                    continue
                return start
            time.sleep(_RETRY_S)

    def _open(self) -> IO[bytes]:
        # opened by the first large case only: before, an earlier report may be moved aside
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab")
        return self._file


class WorkerMemory:
    """Limits the allocator of a worker to `own_bytes`, and to more while a large case runs."""

    def __init__(self, own_bytes: int, shared: SharedCapacity, allocator: Allocator) -> None:
        self._own_bytes = own_bytes
        self._shared = shared
        self._allocator = allocator
        allocator.limit(own_bytes)

    @contextmanager
    def reserve(self, case_bytes: int) -> Iterator[None]:
        """Within, a case of that size may be allocated; waits for the memory if necessary."""
        # if the estimate exceeds all the memory, the case gets all of it
        units = min(self._shared.units, -(-(case_bytes - self._own_bytes) // _UNIT))
        if units <= 0:
            yield
            return
        with self._shared.borrow(units):
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
    """The memory of one of `sharing` workers.

    All of them pass the same `path` and the same number of `free` bytes. The bytes that are free
    now would be wrong, because they depend on which workers have started.
    """
    # one unit more makes up for rounding down to whole units
    share = share_of_gpu(free or allocator.total, sharing, largest + _UNIT)
    shared = SharedCapacity(path, share.spare_bytes // _UNIT)
    return WorkerMemory(share.own_bytes, shared, allocator)


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
            settings.capacity_file(os.environ.get("CUDA_VISIBLE_DEVICES", "")),
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
    with memory.reserve(footprint_bytes(run.case)):
        return (yield)


class TorchAllocator:
    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        self.total = torch.cuda.get_device_properties(0).total_memory

    def limit(self, size: int) -> None:
        self._cuda.set_per_process_memory_fraction(min(1.0, size / self.total))

    def trim(self) -> None:
        # reference cycles in the traceback of a failed case may keep its tensors
        gc.collect()
        self._cuda.empty_cache()
