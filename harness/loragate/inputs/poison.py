"""Fresh allocations hold values that must not be read.

`torch.empty` mostly returns zeros in a test but old numbers in a server. Inside the context every
uninitialised tensor that Python code allocates holds 0x7f bytes: a huge index, and NaN (0x7fff,
0x7fffffff) for floats. Or it holds zeros, as most memory of a fresh process does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

_ALLOCATORS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_permuted"),
    (torch, "empty_strided"),
    (Tensor, "new_empty"),
    (Tensor, "new_empty_strided"),
)


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    with _filled(_poison):
        yield


@contextmanager
def zeroed_allocations() -> Iterator[None]:
    with _filled(Tensor.zero_):
        yield


@contextmanager
def marked_allocations(*, warn_only: bool = False) -> Iterator[None]:
    """Floats hold NaN and integers their largest value, by torch's own mode of deterministic
    algorithms: also what torch allocates itself. warn_only: of operations that have none."""
    memory: Any = torch.utils.deterministic
    fill, strict = memory.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        memory.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(strict, warn_only=warned_only)


@contextmanager
def _filled(fill: Callable[[Tensor], Tensor]) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name in _ALLOCATORS:
            allocate = getattr(owner, name)
            stack.enter_context(patch.object(owner, name, _filling(allocate, fill)))
        yield


def _filling(
    allocate: Callable[..., Tensor], fill: Callable[[Tensor], Tensor]
) -> Callable[..., Tensor]:
    def filled(*args: Any, **kwargs: Any) -> Tensor:
        return fill(allocate(*args, **kwargs))

    return filled


def _poison(tensor: Tensor) -> Tensor:
    if tensor.device.type == "meta" or not tensor.numel():
        return tensor
    if tensor.dtype is torch.float4_e2m1fn_x2:
        # two numbers in a byte, which torch cannot fill; none of them is NaN
        tensor.view(torch.uint8).fill_(0x7F)
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    if tensor.dtype is torch.bool:
        return tensor.fill_(True)
    pattern = int.from_bytes(b"\x7f" * tensor.element_size(), "big")
    return tensor.fill_(pattern)
