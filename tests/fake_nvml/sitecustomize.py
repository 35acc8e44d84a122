"""Put this folder on PYTHONPATH: a child process then finds the GPUs that FAKE_GPUS describes.

`FAKE_GPUS="GPU-a:512 GPU-b:1024"` names each GPU with its free MiB; `FAKE_GPUS=mismatch` is a
driver whose library does not fit its kernel module.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pynvml

_LISTED = os.environ.get("FAKE_GPUS")


def _initialise() -> None:
    if _LISTED == "mismatch":
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)


if _LISTED is not None:
    _gpus = [entry.split(":") for entry in _LISTED.split() if ":" in entry]
    pynvml.nvmlInit = _initialise
    pynvml.nvmlShutdown = lambda: None
    pynvml.nvmlDeviceGetCount = lambda: len(_gpus)
    pynvml.nvmlDeviceGetHandleByIndex = lambda index: _gpus[index]
    pynvml.nvmlDeviceGetUUID = lambda gpu: gpu[0]
    pynvml.nvmlDeviceGetMemoryInfo = lambda gpu: SimpleNamespace(free=int(gpu[1]) << 20)
