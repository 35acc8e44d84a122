"""Device memory of a process: its own share and, for a large case, the one reserve of its GPU.

Invariant: processes together never ask a GPU for more than was free when they started, however one
of them ends. A case that has to wait for memory does so before its deadline starts.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from filelock import FileLock

from loragate.core.gpus import GpuShare


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
