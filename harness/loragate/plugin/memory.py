"""Device memory of a worker: its own share and, for a large case, the one reserve of its GPU.

Invariant: workers together never ask a GPU for more than was free when they started, however a
worker ends. A case that has to wait for memory does so before its deadline starts.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from loragate.core.files import lock_of
from loragate.core.gpus import GpuShare, share_of_gpu
from loragate.matrix.footprint import footprint_bytes
from loragate.plugin.collection import case_run_of
from loragate.plugin.options import SETTINGS, Role

# how many workers share the worker's GPU, the bytes that were free on it before the first of them
# started (0: unknown), and the bytes that the largest of all cases needs
WORKER_INPUT_SHARING = "loragate_gpu_sharing"
WORKER_INPUT_FREE = "loragate_gpu_free"
WORKER_INPUT_LARGEST = "loragate_largest_case"


class TorchAllocator:
    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        self.total = torch.cuda.get_device_properties(0).total_memory

    def limit(self, size: int) -> None:
        """Allow the process `size` bytes of `total`."""
        self._cuda.set_per_process_memory_fraction(min(1.0, size / self.total))

    def trim(self) -> None:
        """Release cached memory, also where reference cycles of a failed case keep tensors."""
        gc.collect()
        self._cuda.empty_cache()


class WorkerMemory:
    """Limits the allocator of a worker to its own share, and to more while a large case runs."""

    def __init__(self, share: GpuShare, lock: FileLock, allocator: TorchAllocator) -> None:
        self._share, self._lock, self._allocator = share, lock, allocator
        allocator.limit(share.own_bytes)

    @contextmanager
    def reserve(self, case_bytes: int) -> Iterator[None]:
        """Within, a case of that size may be allocated; waits for the memory if necessary."""
        if case_bytes <= self._share.own_bytes:
            yield
            return
        # the system releases the lock of a process that dies
        with self._lock:
            # if the estimate exceeds all the memory, the case gets all of it
            self._allocator.limit(self._share.own_bytes + self._share.reserve_bytes)
            try:
                yield
            finally:
                self._allocator.trim()
                self._allocator.limit(self._share.own_bytes)


MEMORY = pytest.StashKey[WorkerMemory]()


def pytest_sessionstart(session: pytest.Session) -> None:
    settings = session.config.stash[SETTINGS]
    given: dict[str, Any] = getattr(session.config, "workerinput", {})
    if settings.role is not Role.WORKER or WORKER_INPUT_SHARING not in given:
        return
    import torch

    if torch.cuda.is_available():
        allocator = TorchAllocator()
        # what is free now would be wrong: it depends on which workers have started
        free = given[WORKER_INPUT_FREE] or allocator.total
        share = share_of_gpu(free, given[WORKER_INPUT_SHARING], given[WORKER_INPUT_LARGEST])
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        # one for each run and GPU
        lock = lock_of(Path(settings.run, gpu))
        session.config.stash[MEMORY] = WorkerMemory(share, lock, allocator)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    run, memory = case_run_of(item), item.config.stash.get(MEMORY, None)
    if run is None or memory is None:
        return (yield)
    with memory.reserve(footprint_bytes(run.case)):
        return (yield)
