"""GPUs and cores that this process may use, without initialising CUDA. Imports no torch.

Invariant: the caller's CUDA_VISIBLE_DEVICES is indexed into, never widened.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_GIB = 1 << 30
# what a worker needs for all but a few cases: tensors, cached blocks, compiled kernels
GPU_BUDGET_BYTES = 8 * _GIB
# contexts and libraries lie outside of what torch accounts for
_USABLE = 0.9
# torch, the interpreter's numpy copies and references of one case
HOST_BUDGET_BYTES = 3 * _GIB // 2
# cases leave a GPU idle most of the time, between small kernels; four workers were hardly slower
# each than two, and this many still leave cores for the controller
MAX_WORKERS_PER_GPU = 8


class DriverError(Exception):
    """There is a driver and it does not answer as it should: that is no machine without a GPU."""

    def __init__(self, message: str) -> None:
        super().__init__(
            "the GPUs of this machine cannot be listed; mend that, or set CUDA_VISIBLE_DEVICES= to "
            f"run without them: {message}"
        )


@dataclass(frozen=True, slots=True)
class ListedGpu:
    """A GPU as the driver lists it; `index` in PCI order."""

    index: str
    uuid: str
    free_bytes: int


def visible_gpus(environ: Mapping[str, str], listed: Sequence[ListedGpu]) -> tuple[str, ...]:
    """Handles for CUDA_VISIBLE_DEVICES of one worker each, in the caller's order."""
    if "CUDA_VISIBLE_DEVICES" not in environ:
        # by uuid: CUDA numbers GPUs by speed, the driver by PCI bus
        return tuple(gpu.uuid for gpu in listed)
    handles = [handle.strip() for handle in environ["CUDA_VISIBLE_DEVICES"].split(",")]
    # CUDA itself ignores whatever follows the first invalid entry
    cut = next((i for i, handle in enumerate(handles) if handle in ("", "-1")), len(handles))
    return tuple(handles[:cut])


@dataclass(frozen=True, slots=True)
class GpuShare:
    """Device memory of one worker: `own_bytes` at any time, and `spare_bytes` that all workers of
    its GPU lend to those whose case needs more."""

    own_bytes: int
    spare_bytes: int


def workers_per_gpu(
    handles: Sequence[str], listed: Sequence[ListedGpu], largest_case_bytes: int
) -> int:
    """How many workers fit into the fullest of the GPUs while one of them runs the largest case;
    1 where its memory is unknown."""
    free = [gpu.free_bytes for gpu in listed if {gpu.index, gpu.uuid} & set(handles)]
    if not free:
        return 1
    largest = max(GPU_BUDGET_BYTES, largest_case_bytes)
    others = (int(min(free) * _USABLE) - largest) // GPU_BUDGET_BYTES
    return max(1, min(MAX_WORKERS_PER_GPU, 1 + others))


def share_of_gpu(free_bytes: int, workers: int, largest_case_bytes: int) -> GpuShare:
    """What each of several workers may use of what was free on a GPU, so that one can run the
    largest case while all others run ordinary ones."""
    assert workers > 1, "a worker that is alone shares nothing"
    usable = int(free_bytes * _USABLE)
    beside_largest = (usable - largest_case_bytes) // (workers - 1)
    # more workers were asked for than there is room for: half for all, half for one
    least = usable // (2 * workers)
    own = max(least, min(usable // workers, beside_largest))
    return GpuShare(own, usable - workers * own)


def worker_count(num_gpus: int, per_gpu: int, cores: int, host_free_bytes: int) -> int:
    """Workers of a session: per GPU where there are GPUs, else per core; at least one."""
    bound = min(cores, host_free_bytes // HOST_BUDGET_BYTES)
    if num_gpus:
        # each GPU gets a worker, however few the cores
        bound = max(num_gpus, min(num_gpus * per_gpu, bound))
    return max(1, bound)


def list_gpus(environ: Mapping[str, str]) -> tuple[ListedGpu, ...]:
    """GPUs that the driver lists; empty without a driver, and not asked for where the caller does
    without. Raises DriverError."""
    hidden = "CUDA_VISIBLE_DEVICES" in environ and not visible_gpus(environ, ())
    tool = shutil.which("nvidia-smi")
    if tool is None or hidden or environ.get("TRITON_INTERPRET") == "1":
        return ()
    query = ["--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run([tool, *query], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise DriverError(f"{error}") from error
    output = f"{answer.stdout}{answer.stderr}".strip() or "nothing"
    if answer.returncode != 0:
        raise DriverError(f"{tool} exited with {answer.returncode} and said: {output}")
    try:
        gpus = parse_gpu_list(answer.stdout)
    except ValueError as error:
        raise DriverError(f"{tool} lists no GPUs and said: {output}") from error
    if not gpus:
        raise DriverError(f"{tool} lists no GPUs and said: {output}")
    return gpus


def parse_gpu_list(text: str) -> tuple[ListedGpu, ...]:
    """Raises ValueError for anything but one GPU a line."""
    gpus = []
    for line in text.splitlines():
        index, uuid, free_mib = (field.strip() for field in line.split(","))
        # unified-memory devices report no figure
        free = int(free_mib) << 20 if free_mib.isdecimal() else 0
        gpus.append(ListedGpu(index, uuid, free))
    return tuple(gpus)


def free_bytes_of(handle: str, listed: Sequence[ListedGpu]) -> int:
    """What was free on the GPU that `handle` names; 0 where that is unknown."""
    return next((gpu.free_bytes for gpu in listed if handle in (gpu.index, gpu.uuid)), 0)


def usable_cores() -> int:
    """Cores that the scheduler and the container grant, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _cgroup_cores(Path("/sys/fs/cgroup/cpu.max"))
    return max(1, min(cores or 1, quota)) if quota else max(1, cores or 1)


def free_host_bytes() -> int:
    """Memory that can be had without swapping; a large number where it cannot be told."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 1 << 60


def _cgroup_cores(path: Path) -> int | None:
    try:
        quota, period = path.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, int(quota) // int(period))
