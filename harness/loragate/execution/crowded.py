"""A GPU with room for one block at a time, as it may be while others use it. Needs compiled
kernels.

Blocks of a launch that are otherwise there at once then run one after the other, in an order that
nothing promises. A result that depends on blocks which run side by side is wrong there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from loragate.execution.graph_nodes import checked

# of a block, the most that there are: two such blocks fill a multiprocessor of 2048 threads
_THREADS = 1024
_WARPS = _THREADS // 32
# until the device is free again whatever becomes of the host. Other processes have the device in
# turns: beside twelve that keep it busy, what takes 0.1 s alone took up to 3 s
_LIMIT_S = 10.0
_ALL_PERCENT = 100


@contextmanager
def room_for_one_block(device: torch.device) -> Iterator[None]:
    """Within, kernels of other streams have room for one block of up to 1024 threads. Waits for
    what the current stream has been given. A kernel that does not fit at all waits for ten seconds.
    Raises TimeoutError if others keep the device."""
    found = torch.cuda.get_device_properties(device)
    per_processor = found.max_threads_per_multi_processor // _THREADS
    blocks = found.multi_processor_count * per_processor - 1
    resident = torch.zeros(blocks, dtype=torch.int32).pin_memory()
    released = torch.ones(1, dtype=torch.int32).pin_memory()
    limit_us = int(_LIMIT_S * 1e6)
    # one that ends at once: what is loaded later would wait for all that runs
    _divide_memory(hold_kernel[(1,)](resident, released, limit_us, num_warps=_WARPS))
    torch.cuda.synchronize(device)
    resident.zero_()
    released.zero_()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        hold_kernel[(blocks,)](resident, released, limit_us, num_warps=_WARPS)
    try:
        _wait_for(resident)
        yield
        torch.cuda.current_stream(device).synchronize()
    finally:
        released.fill_(1)
        stream.synchronize()


def _divide_memory(kernel: Any) -> None:
    """Have multiprocessors give all memory that they divide to blocks, and none to their cache. One
    that is in use keeps its division, and takes no block for which that leaves too little."""
    driver = import_module("cuda.bindings.driver")
    share = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    checked(driver.cuFuncSetAttribute(driver.CUfunction(kernel.function), share, _ALL_PERCENT))


def _wait_for(resident: torch.Tensor) -> None:
    end = time.monotonic() + _LIMIT_S
    while not bool(resident.all()):
        if time.monotonic() > end:
            raise TimeoutError(f"the device was not filled within {_LIMIT_S:g} s")


@triton.jit
def hold_kernel(resident_ptr, released_ptr, limit_us):  # type: ignore[no-untyped-def]
    begin = globaltimer()
    tl.store(resident_ptr + tl.program_id(0), 1)
    released = tl.load(released_ptr, volatile=True)
    while (released == 0) & ((globaltimer() - begin) // 1000 < limit_us):
        released = tl.load(released_ptr, volatile=True)
