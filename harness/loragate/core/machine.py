"""The device that this process runs on. The only module that asks torch for devices, and the only
one that asks Triton for its interpreter."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

from loragate.core.errors import CommandError
from loragate.core.verdict import ExitCode

_SWITCH = "TRITON_INTERPRET"
# of oneDNN, which multiplies bf16 matrices for torch; above it come the tiles of AMX
_LARGEST_ISA = ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


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
        os.environ.setdefault(_SWITCH, "1")
    if os.environ.get(_SWITCH):
        # seen with torch 2.11 on a processor with AMX: where the rows of x have another length than
        # a multiple of 32, a NaN in one row of a bf16 product makes the row before it NaN as well,
        # and padded rows hold NaN here
        os.environ.setdefault(*_LARGEST_ISA)


def interpreter_is_on() -> bool:
    """Whether Triton runs kernels in its interpreter, as it reads TRITON_INTERPRET itself.

    Imports Triton only where the variable is set: `select_interpreter` does not change it then, so
    kernels may be defined.
    """
    if not os.environ.get(_SWITCH):
        return False
    if find_spec("triton") is None:
        # there are no kernels, and the rest runs on the CPU as it does beside the interpreter
        return True
    from triton import knobs

    return bool(knobs.runtime.interpret)


def check_kernels_can_run() -> None:
    """Raises CommandError where there is no GPU and the interpreter is switched off. After
    `select_interpreter`."""
    import torch

    if not torch.cuda.is_available() and not interpreter_is_on():
        given = os.environ.get(_SWITCH, "")
        raise CommandError(
            f"kernels can run nowhere: there is no GPU, and {_SWITCH}={given!r} switches Triton's "
            f"interpreter off; unset {_SWITCH}",
            ExitCode.INFRASTRUCTURE,
        )


@cache
def detect_machine() -> Machine:
    import torch

    if interpreter_is_on() or not torch.cuda.is_available():
        return Machine("cpu", platform.processor() or platform.machine(), None, 1, 0)
    properties = torch.cuda.get_device_properties(0)
    return Machine(
        device="cuda",
        name=properties.name,
        compute_capability=(properties.major, properties.minor),
        num_sms=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
    )
