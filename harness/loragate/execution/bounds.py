"""Kernels in Triton's interpreter stay within the tensors that they are given.

The interpreter reads and writes any address of the process. On a GPU the same access fails, or
reads what another tensor holds, also where no result depends on it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from loragate.core.plural import counted
from loragate.execution.streams.arguments import tensors_of

# no integer that is not an address is as large
_LEAST_ADDRESS = 1 << 32


class OutOfBounds(Exception):
    """A kernel accesses memory outside of all tensors of its launch."""


@contextmanager
def bounded_launches() -> Iterator[None]:
    """Within, a kernel that is interpreted raises OutOfBounds ahead of an access that lies outside
    of the tensors of its launch. A launch that is given addresses in a tensor is not judged."""
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def launched(executor: Any, *args: Any, **kwargs: Any) -> None:
        tensors = tensors_of(executor.arg_names, args, kwargs)
        if any(_holds_addresses(tensor) for _, tensor in tensors):
            run(executor, *args, **kwargs)
            return
        with _checked(_Extents(executor.fn.__name__, tensors)):
            run(executor, *args, **kwargs)

    with patch.object(GridExecutor, "__call__", launched):
        yield


class _Extents:
    """The bytes from the first to the last element of each tensor of a launch, joined where they
    overlap."""

    def __init__(self, kernel: str, tensors: list[tuple[str, Tensor]]) -> None:
        self._kernel = kernel
        self._named = sorted((*_extent(tensor), name) for name, tensor in tensors if tensor.numel())
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end, _ in self._named:
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def check(self, what: str, pointers: Any, mask: Any = None) -> None:
        """Raises OutOfBounds if an access that is not masked off lies outside."""
        places = np.asarray(pointers.data, dtype=np.uint64)
        size = max(1, int(pointers.get_element_ty().primitive_bitwidth) // 8)
        # most blocks lie within one tensor, masked off or not
        if self._hold_all(places, size):
            return
        if mask is not None:
            places = places[np.broadcast_to(mask.data, places.shape) != 0]
        if not places.size or self._hold_all(places, size):
            return
        outside = [place for place in np.unique(places).tolist() if not self._holds(place, size)]
        if outside:
            elements = counted(len(outside), "element")
            where = f"{elements} {what} outside of its tensors, the first {self._near(outside[0])}"
            raise OutOfBounds(f"kernel {self._kernel}: {where}")

    def _hold_all(self, places: Any, size: int) -> bool:
        """Whether the same extent holds all of `places`."""
        index = bisect_right(self._starts, int(places.min())) - 1
        return index >= 0 and int(places.max()) + size <= self._ends[index]

    def _holds(self, place: int, size: int) -> bool:
        index = bisect_right(self._starts, place) - 1
        return index >= 0 and place + size <= self._ends[index]

    def _near(self, place: int) -> str:
        """Where an address lies, from the tensor that begins at or below it."""
        below = [one for one in self._named if one[0] <= place]
        if not below:
            return "ahead of all of them"
        start, end, name = below[-1]
        return f"at byte {place - start} of {name}, which has {end - start}"


@contextmanager
def _checked(extents: _Extents) -> Iterator[None]:
    from triton.runtime.errors import InterpreterError
    from triton.runtime.interpreter import InterpreterBuilder

    checks: dict[str, Callable[..., None]] = {
        "create_masked_load": lambda ptrs, mask, *rest: extents.check("read", ptrs, mask),
        "create_masked_store": lambda ptrs, value, mask, *rest: extents.check(
            "written", ptrs, mask
        ),
        "create_atomic_rmw": lambda op, ptr, val, mask, *rest: extents.check("changed", ptr, mask),
        "create_atomic_cas": lambda ptr, *rest: extents.check("changed", ptr),
    }
    with ExitStack() as stack:
        for name, check in checks.items():
            original = getattr(InterpreterBuilder, name)
            stack.enter_context(patch.object(InterpreterBuilder, name, _ahead(original, check)))
        try:
            yield
        except InterpreterError as error:
            outside = _cause(error)
            if outside is not None:
                raise outside from None
            raise


def _ahead(original: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    def checking(builder: Any, *args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return original(builder, *args, **kwargs)

    return checking


def _cause(error: BaseException | None) -> OutOfBounds | None:
    # the interpreter wraps an error once for every function of the kernel
    while error is not None and not isinstance(error, OutOfBounds):
        error = error.__cause__
    return error


def _extent(tensor: Tensor) -> tuple[int, int]:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _holds_addresses(tensor: Tensor) -> bool:
    if tensor.dtype not in (torch.int64, torch.uint64) or not tensor.numel():
        return False
    return int(tensor.max()) >= _LEAST_ADDRESS
