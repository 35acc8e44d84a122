"""What this GPU offers beyond the common subset, decided in one place."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from lorakernels.runtime.kernels import probe_dot


@cache
def supports_pdl(device: torch.device) -> bool:
    """Whether kernels may use programmatic dependent launch, where a kernel starts while the one
    before it still runs.

    A kernel that waits before its first read or write may always be launched so. The expands and
    the product that folds one in read before they wait, and trust the kernel before them on their
    stream: what they read must have been complete when that kernel started. There are two such
    places. Directly behind their shrink, which has waited itself or is not launched so; not behind
    another kernel (vllm #31777). And directly behind a base product that is not launched so, with
    BEHIND_BASE or to add a stored delta: before the wait, only what is older than the product is
    read. What other streams did is complete at the wait in either case, because the launch waits
    for their events.
    """
    # the interpreter does not implement it, and accepts tensors of a GPU, too
    is_compiled = isinstance(probe_dot, JITFunction)
    on_gpu = is_compiled and device.type == "cuda"
    return on_gpu and torch.cuda.get_device_capability(device) >= (9, 0)


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the device of a tensor the current one while kernels that use it are launched: Triton
    takes the device and the stream from the current device, not from the tensors."""
    # by its number, which torch takes as it is
    return torch.cuda.device(tensor.get_device()) if tensor.is_cuda else nullcontext()


def keep_address(buffer: Tensor) -> Tensor:
    """The buffer itself, after telling torch.compile that it stays where it is. A CUDA graph then
    reads and writes it in place; any other input is copied before each replay, and torch records
    no graph at all around an operator that writes one."""
    if _may_be_in_a_graph(buffer):
        # takes a second to import
        from torch._dynamo import mark_static_address

        mark_static_address(buffer, guard=False)
    return buffer


def _may_be_in_a_graph(buffer: Tensor) -> bool:
    return buffer.is_cuda


def allocated_bytes(device: torch.device) -> int:
    """Bytes of a GPU that torch's tensors take now, what its allocator rounds up included; 0 for
    another device."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def upload(host: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU tensor on a GPU, queued without waiting; the caller may overwrite `host`,
    pinned or not, as soon as this returns."""
    # a fresh pinned block each time: the allocator reuses it only after the copy has run, while a
    # pinned buffer of the caller would be read when it has changed (vllm #36013)
    staged = torch.empty(host.shape, dtype=host.dtype, device="cpu", pin_memory=True)
    return staged.copy_(host).to(device, non_blocking=True)


def launch_options(pdl: bool, registers: int | None = None) -> dict[str, int]:
    """The launch options of a kernel: `launch_pdl` with PDL alone. registers: most of a thread;
    None leaves them to the compiler. The interpreter takes no notice of either."""
    limit = {} if registers is None else {"maxnreg": registers}
    return {"launch_pdl": True, **limit} if pdl else limit
