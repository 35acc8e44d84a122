"""A GPU with room for one block at a time, as it may be while others use it. Needs compiled
kernels.

Blocks of a launch that are otherwise there at once then run one after the other, in an order that
nothing promises. A result that depends on blocks which run side by side is wrong there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

# of a block, the most that there are: two such blocks fill a multiprocessor of 2048 threads
_THREADS = 1024
# until the device is free again whatever becomes of the host; other processes may have it in turns
_LIMIT_S = 2.0


@contextmanager
def room_for_one_block(device: torch.device) -> Iterator[None]:
    """Within, kernels of other streams have room for one block of up to 1024 threads. Waits for
    what the current stream has been given. Raises TimeoutError if others keep the device."""
    found = torch.cuda.get_device_properties(device)
    per_processor = found.max_threads_per_multi_processor // _THREADS
    blocks = found.multi_processor_count * per_processor - 1
    resident = torch.zeros(blocks, dtype=torch.int32).pin_memory()
    released = torch.zeros(1, dtype=torch.int32).pin_memory()
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        hold_kernel[(blocks,)](
            resident, released, int(_LIMIT_S * 1e9), num_warps=_THREADS // 32, num_ctas=1
        )
    try:
        _wait_for(resident)
        yield
        torch.cuda.current_stream(device).synchronize()
    finally:
        released.fill_(1)
        stream.synchronize()


def _wait_for(resident: torch.Tensor) -> None:
    end = time.monotonic() + _LIMIT_S
    while not bool(resident.all()):
        if time.monotonic() > end:
            raise TimeoutError(f"the device was not filled within {_LIMIT_S:g} s")


@triton.jit
def hold_kernel(resident_ptr, released_ptr, limit_ns):  # type: ignore[no-untyped-def]
    begin = globaltimer()
    tl.store(resident_ptr + tl.program_id(0), 1)
    released = tl.load(released_ptr, volatile=True)
    while (released == 0) & (globaltimer() - begin < limit_ns):
        released = tl.load(released_ptr, volatile=True)
