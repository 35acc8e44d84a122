"""Registers, spills and shared memory of a compiled kernel, read from its binary."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from loragate.core.resources import Resources

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_TIMEOUT_S = 60


def read_resources(cubin: bytes, shared_bytes: int) -> Resources:
    """Resources of the only kernel in `cubin`, which asks for `shared_bytes` when it is launched.

    Spills are bytes of stack: a Triton kernel has no other use for it. Shared memory is taken from
    the launch, because from sm_90 on the binary counts the driver's own share as well. Raises
    RuntimeError.
    """
    done = run_tool("cuobjdump", cubin, "-res-usage")
    found = _USAGE.findall(done.stdout)
    if done.returncode or len(found) != 1:
        raise RuntimeError(f"cuobjdump found {len(found)} kernels: {done.stderr.strip()}")
    registers, stack, _, local = map(int, found[0])
    return Resources(registers, stack + local, shared_bytes)


def run_tool(name: str, cubin: bytes, option: str) -> subprocess.CompletedProcess[str]:
    """What a tool says of `cubin`. It is the one in Triton's wheel, which supports every target
    that Triton supports."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__path__[0]) / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
