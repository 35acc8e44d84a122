"""The device that this process runs on. The only module that asks torch for devices."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Machine:
    """`device` is "cuda" or "cpu"; on "cpu" Triton kernels run in its interpreter."""

    device: str
    name: str
    compute_capability: tuple[int, int] | None
    num_sms: int
    memory_bytes: int

    @property
    def interpreted(self) -> bool:
        return self.device == "cpu"


def select_interpreter() -> None:
    """Turn on Triton's interpreter where no GPU can run kernels, and fix the compiler options
    whose defaults change results from release to release.

    Must run before any module with a @triton.jit function is imported: the decorator reads
    the switch when it is applied.
    """
    import torch

    # on by default up to Triton 3.9, off from 3.10: numbers are compared across releases
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


@cache
def detect_machine() -> Machine:
    import torch

    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        return Machine("cpu", platform.processor() or platform.machine(), None, 1, 0)
    properties = torch.cuda.get_device_properties(0)
    return Machine(
        device="cuda",
        name=properties.name,
        compute_capability=(properties.major, properties.minor),
        num_sms=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
    )
