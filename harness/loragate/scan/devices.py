"""Where a scan runs: GPUs, how many processes run beside each other, and the memory of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from loragate.core.gpus import (
    GpuShare,
    ListedGpu,
    free_bytes_of,
    list_gpus,
    share_of_gpu,
    visible_gpus,
    worker_count,
    workers_per_gpu,
)
from loragate.core.host import free_host_bytes, usable_cores


@dataclass(frozen=True, slots=True)
class Devices:
    """`gpus` are handles; none where trials run on the CPU. largest: bytes that the largest of all
    cases needs."""

    gpus: tuple[str, ...] = ()
    listed: tuple[ListedGpu, ...] = ()
    largest: int = 0

    def workers(self) -> int:
        """Processes at the same time on each GPU, as many as the gate has there, or on the CPU."""
        if not self.gpus:
            return usable_cores()
        per_gpu = workers_per_gpu(self.gpus, self.listed, self.largest)
        count = worker_count(len(self.gpus), per_gpu, usable_cores(), free_host_bytes())
        return max(1, count // len(self.gpus))

    def shares(self, workers: int) -> dict[str, GpuShare]:
        """The memory of each of `workers` on a GPU, by its handle; none where one is alone, or
        where it is unknown how much is free."""
        free = {gpu: free_bytes_of(gpu, self.listed) for gpu in self.gpus if workers > 1}
        return {
            gpu: share_of_gpu(free_bytes, workers, self.largest)
            for gpu, free_bytes in free.items()
            if free_bytes
        }

    def too_large(self, workers: int, sizes: Mapping[str, int]) -> frozenset[str]:
        """Of cases with the bytes that each needs, those for which the memory of a worker is too
        small, so that they wait for the reserve of their GPU."""
        own = min((share.own_bytes for share in self.shares(workers).values()), default=math.inf)
        return frozenset(name for name, size in sizes.items() if size > own)


def devices_of(environ: Mapping[str, str], largest: int) -> Devices:
    """Of the GPUs that are visible there. Raises DriverError."""
    listed = list_gpus(environ)
    return Devices(visible_gpus(environ, listed), listed, largest)
