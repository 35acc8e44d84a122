"""GPUs that this process may use, as NVML lists them, and how workers share them.

Invariants: the caller's CUDA_VISIBLE_DEVICES is indexed into, never widened; nothing here
initialises CUDA or imports torch.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pynvml

from loragate.core.machine import interpreter_is_on

_GIB = 1 << 30
# what a worker needs for all but a few cases: tensors, cached blocks, compiled kernels
GPU_BUDGET_BYTES = 8 * _GIB
# contexts and libraries lie outside of what torch accounts for
_USABLE = 0.9
_CUDA_SUCCESS = 0
# torch, the interpreter's numpy copies and references of one case
HOST_BUDGET_BYTES = 3 * _GIB // 2
# cases leave a GPU idle most of the time, between small kernels; four workers were hardly slower
# each than two. With this many on an H200 two of a hundred premerge cases need more than the part
# of a worker
MAX_WORKERS_PER_GPU = 14


# where NVIDIA's Multi-Process Service is reached
_MPS_PIPES, _USUAL_PIPES = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"
# for a process that is going to lose its device: clients of that service lose it together. Where
# there is no daemon a process uses the GPU by itself
WITHOUT_MPS: Mapping[str, str] = MappingProxyType({_MPS_PIPES: os.devnull})


class DriverError(Exception):
    """There is a driver and it does not answer. Not the same as a machine without a GPU."""

    def __init__(self, message: str) -> None:
        super().__init__(
            "the GPUs of this machine cannot be listed; fix that, or set CUDA_VISIBLE_DEVICES= to "
            f"run without them: {message}"
        )


@dataclass(frozen=True, slots=True)
class ListedGpu:
    """A GPU as the driver lists it; `index` in PCI order."""

    index: str
    uuid: str
    free_bytes: int


def cuda_is_initialised() -> bool:
    """Whether this process has initialised the CUDA driver, which its forks cannot use then."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    # of CUDA's calls the one that needs nothing but that
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == _CUDA_SUCCESS)


def mps_runs(environ: Mapping[str, str]) -> bool:
    """Whether processes with these variables share GPUs by the Multi-Process Service."""
    return Path(environ.get(_MPS_PIPES, _USUAL_PIPES), "control").exists()


def visible_gpus(environ: Mapping[str, str], listed: Sequence[ListedGpu]) -> tuple[str, ...]:
    """Values of CUDA_VISIBLE_DEVICES for one worker each, in the caller's order."""
    if "CUDA_VISIBLE_DEVICES" not in environ:
        # by uuid: CUDA numbers GPUs by speed, the driver by PCI bus
        return tuple(gpu.uuid for gpu in listed)
    handles = [handle.strip() for handle in environ["CUDA_VISIBLE_DEVICES"].split(",")]
    # CUDA itself ignores whatever follows the first invalid entry
    cut = next((i for i, handle in enumerate(handles) if handle in ("", "-1")), len(handles))
    return tuple(handles[:cut])


@dataclass(frozen=True, slots=True)
class GpuShare:
    """Device memory of one worker: `own_bytes` at any time, and the reserve of its GPU besides
    while its case needs more, which one worker at a time may use."""

    own_bytes: int
    reserve_bytes: int


def workers_per_gpu(
    handles: Sequence[str], listed: Sequence[ListedGpu], largest_case_bytes: int
) -> int:
    """How many workers fit on the GPU with the least free memory while one of them runs the
    largest case; 1 where its memory is unknown."""
    free = [gpu.free_bytes for gpu in listed if {gpu.index, gpu.uuid} & set(handles)]
    if not free:
        return 1
    largest = max(GPU_BUDGET_BYTES, largest_case_bytes)
    others = (int(min(free) * _USABLE) - largest) // GPU_BUDGET_BYTES
    return max(1, min(MAX_WORKERS_PER_GPU, 1 + others))


def share_of_gpu(free_bytes: int, workers: int, largest_case_bytes: int) -> GpuShare:
    """The memory of each of several workers, out of the `free_bytes` of their GPU: equal shares,
    as large as they can be beside a reserve for the largest case."""
    assert workers > 1, "a worker that is alone shares nothing"
    usable = int(free_bytes * _USABLE)
    beside_largest = (usable - largest_case_bytes) // (workers - 1)
    # more workers were asked for than fit: half for all of them, half for the largest case
    least = usable // (2 * workers)
    own = max(least, min(usable // workers, beside_largest))
    return GpuShare(own, usable - workers * own)


def beside_workers(free_bytes: int) -> int:
    """Bytes of a GPU that its workers leave to their contexts and to other processes."""
    return free_bytes - int(free_bytes * _USABLE)


def worker_count(num_gpus: int, per_gpu: int, cores: int, host_free_bytes: int) -> int:
    """Workers of a session: per GPU where there are GPUs, else per core; at least one."""
    bound = min(cores, host_free_bytes // HOST_BUDGET_BYTES)
    if num_gpus:
        # each GPU gets a worker, however few the cores
        bound = max(num_gpus, min(num_gpus * per_gpu, bound))
    return max(1, bound)


def free_bytes_of(handle: str, listed: Sequence[ListedGpu]) -> int:
    """What was free on the GPU that `handle` names; 0 where that is unknown."""
    return next((gpu.free_bytes for gpu in listed if handle in (gpu.index, gpu.uuid)), 0)


def workers_that_fit(free_bytes: int, each_bytes: int) -> int:
    """How many workers that need `each_bytes` fit into the free memory of a GPU."""
    return int(free_bytes * _USABLE) // each_bytes


def list_gpus(environ: Mapping[str, str]) -> tuple[ListedGpu, ...]:
    """GPUs that the driver lists; none on a machine without a driver.

    With all GPUs hidden by `environ`, or where this process runs the interpreter, there are none
    and the driver is not asked.
    Raises DriverError.
    """
    hidden = "CUDA_VISIBLE_DEVICES" in environ and not visible_gpus(environ, ())
    if hidden or interpreter_is_on():
        return ()
    try:
        with _nvml():
            gpus = tuple(map(_listed, range(pynvml.nvmlDeviceGetCount())))
    except pynvml.NVMLError_LibraryNotFound:
        return ()
    except pynvml.NVMLError as error:
        raise DriverError(f"NVML reports: {error}") from error
    if not gpus:
        raise DriverError("NVML lists no GPUs")
    return gpus


def driver_version() -> str | None:
    """Version of the NVIDIA driver; None where there is none or it does not answer."""
    try:
        with _nvml():
            return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


@contextmanager
def _nvml() -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _listed(index: int) -> ListedGpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    return ListedGpu(str(index), str(pynvml.nvmlDeviceGetUUID(handle)), _free_bytes(handle))


def _free_bytes(handle: Any) -> int:
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission):
        # unified-memory devices report no figure
        return 0
