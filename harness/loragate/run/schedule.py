"""What runs beside what: legs that need cores alone beside those that need the GPU. No torch.

The workers of a GPU leave cores idle on most machines: their number is bounded by the memory of the
GPU. The other legs are kept to the cores that are left, or to a quarter of all cores where fewer
are left. The workers are kept to no cores: they share those of the other legs, and have them to
themselves once these have ended. With cores for each alone, on an H200 with 16 cores, those of the
other legs were idle for the last third of a run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from loragate.core.errors import CommandError
from loragate.core.gpus import (
    HOST_BUDGET_BYTES,
    DriverError,
    ListedGpu,
    beside_workers,
    list_gpus,
    visible_gpus,
    worker_count,
    workers_per_gpu,
)
from loragate.core.host import free_host_bytes, usable_cores
from loragate.core.verdict import ExitCode
from loragate.run.legs import Leg, Needs

# of the gate itself, and of the process that hands cases to the workers of the GPUs
_CORES_OF_CONTROLLERS = 1
# of each GPU, for the contexts of the workers and for the few host tests that run on a GPU
_GPU_BYTES = 6 << 30
# of the cores, for legs beside the cases, however many workers there are
_PART = 4
# with fewer, legs that run beside the cases might take longer than after them on all cores
_FEWEST_CORES = 2


@dataclass(frozen=True, slots=True)
class Lane:
    """Legs that run one after the other; kept to `cores`, unless there are none."""

    legs: tuple[Leg, ...]
    cores: frozenset[int] = frozenset()


# lanes that run at the same time
Stage = tuple[Lane, ...]


def stages(legs: Sequence[Leg], spare: frozenset[int]) -> tuple[Stage, ...]:
    """The legs in stages, one stage after the other; `spare` is of `spare_cores`."""
    by_need = {need: tuple(leg for leg in legs if leg.needs is need) for need in Needs}
    if not (spare and by_need[Needs.GPU] and by_need[Needs.CORES]):
        return ((Lane(tuple(legs)),),)
    side_by_side = (Lane(by_need[Needs.GPU]), Lane(by_need[Needs.CORES], spare))
    # whatever times something has the machine to itself
    return (side_by_side, (Lane(by_need[Needs.MACHINE]),))


def describe(stage: Stage) -> str:
    """One line about what runs beside what; "" if nothing does."""
    if len(stage) == 1:
        return ""
    names = [", then ".join(leg.name for leg in lane.legs) for lane in stage]
    count = len(stage[-1].cores)
    return f"side by side: {'; '.join(names)} (on {count} cores)"


def listed_gpus() -> tuple[ListedGpu, ...]:
    """The GPUs that the driver lists. Raises CommandError."""
    try:
        return list_gpus(os.environ)
    except DriverError as error:
        raise CommandError(str(error), ExitCode.INFRASTRUCTURE) from error


def spare_cores() -> frozenset[int]:
    """The cores for other legs beside the workers of all visible GPUs. Raises CommandError.

    None without a GPU, where the cores are too few or too little memory is left, and where the
    system cannot keep a process to some of its cores.
    """
    listed = listed_gpus()
    handles = visible_gpus(os.environ, listed) if listed else ()
    # whoever sets the variable has counted the workers of one leg
    if not handles or "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return frozenset()
    if not hasattr(os, "sched_setaffinity"):
        return frozenset()
    count = _spare_count(handles, listed, usable_cores(), free_host_bytes())
    return frozenset(sorted(os.sched_getaffinity(0))[-count:]) if count else frozenset()


def _spare_count(
    handles: Sequence[str], listed: Sequence[ListedGpu], cores: int, memory: int
) -> int:
    """How many cores the other legs get, with memory for a worker each; 0 if nothing may run on
    them."""
    free = [gpu.free_bytes for gpu in listed if {gpu.index, gpu.uuid} & set(handles)]
    if not free or beside_workers(min(free)) < _GPU_BYTES:
        return 0
    # the largest case may leave room for fewer workers, never for more
    per_gpu = workers_per_gpu(handles, listed, 0)
    workers = worker_count(len(handles), per_gpu, cores, memory)
    count = max(cores - _CORES_OF_CONTROLLERS - workers, cores // _PART)
    count = min(count, memory // HOST_BUDGET_BYTES - workers)
    return count if count >= _FEWEST_CORES else 0
