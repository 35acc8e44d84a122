"""Kernels in Triton's interpreter stay within the tensors that they are given.

The interpreter reads and writes any address of the process. On a GPU an access beyond all tensors
may fail, and one into another tensor reads what that holds. Where no result depends on it, neither
shows. A compiled kernel also believes `tl.multiple_of`, and accesses whole vectors from an address
that is said to be aligned; the interpreter ignores it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from loragate.core.plural import counted
from loragate.core.verdict import Failure
from loragate.execution.interpreter_calls import (
    AccessKind,
    KernelFault,
    element_size,
    live_elements,
)
from loragate.execution.streams.arguments import held_integers, tensors_of


class OutOfBounds(KernelFault):
    """A kernel accesses memory outside of all tensors of its launch."""

    failure = Failure.FOREIGN_MEMORY


class FalseClaim(OutOfBounds):
    """A kernel says that a number is a multiple of another, which it is not: compiled, it may
    access other memory."""


class LaunchBounds:
    """The bytes from the first to the last element of each tensor of a launch, or all of its memory
    where `whole` names it."""

    def __init__(
        self,
        kernel: str,
        names: Sequence[str],
        args: Sequence[Any],
        options: Mapping[str, Any],
        whole: Collection[str],
    ) -> None:
        self._kernel = kernel
        self._arguments = names, args, options
        tensors = tensors_of(names, args, options)
        self._named = sorted(
            (
                (*(_memory(tensor) if name in whole else _extent(tensor)), name, tensor)
                for name, tensor in tensors
                if tensor.numel()
            ),
            key=lambda one: one[:2],
        )
        # joined where they overlap or touch
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end, _, _ in self._named:
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def check(self, kind: AccessKind, pointers: Any, mask: Any) -> None:
        """Raises OutOfBounds if an access that is not masked off lies outside."""
        places, size = np.asarray(pointers.data, dtype=np.uint64), element_size(pointers)
        # most blocks lie within one tensor, masked off or not
        if self._hold_all(places, size):
            return
        places = live_elements(places, mask)
        if not places.size or self._hold_all(places, size):
            return
        outside = [place for place in np.unique(places).tolist() if not self._holds(place, size)]
        outside = self._unexplained(outside)
        if outside:
            where = f"{kind} outside of its tensors, the first {self._near(outside[0])}"
            raise OutOfBounds(f"kernel {self._kernel}: {counted(len(outside), 'element')} {where}")

    def check_multiple(self, handle: Any, values: Sequence[int]) -> None:
        """Raises FalseClaim. Of a block only the first number is judged."""
        value = int(np.asarray(handle.data).flat[0])
        for wanted in values:
            if value % wanted:
                claim = f"says that {value} is a multiple of {wanted}"
                raise FalseClaim(f"kernel {self._kernel}: {claim}")

    def _hold_all(self, places: Any, size: int) -> bool:
        """Whether the same extent holds all of `places`."""
        index = bisect_right(self._starts, int(places.min())) - 1
        return index >= 0 and int(places.max()) + size <= self._ends[index]

    def _holds(self, place: int, size: int) -> bool:
        index = bisect_right(self._starts, place) - 1
        return index >= 0 and place + size <= self._ends[index]

    def _unexplained(self, outside: list[int]) -> list[int]:
        """Without places behind an address that the kernel was given as an integer, which is an
        argument or an element of one: it is nearer than any tensor that begins below the place."""
        if not outside:
            return outside
        held = sorted(value for value, _ in held_integers(*self._arguments))
        starts = [0, *self._starts]

        def is_explained(place: int) -> bool:
            # a size is no address, and no tensor takes half of all memory below one
            least = max(starts[bisect_right(self._starts, place)], place // 2)
            index = bisect_right(held, place) - 1
            return index >= 0 and held[index] > least

        return [place for place in outside if not is_explained(place)]

    def place(self, address: int) -> str:
        """Where an address lies, from the tensor that begins at or below it."""
        below = self._below(address)
        if below is None:
            return "ahead of all of them"
        start, _, name, _ = below
        return f"at byte {address - start} of {name}"

    def _near(self, address: int) -> str:
        """`place`, with the size of the tensor."""
        text, below = self.place(address), self._below(address)
        if below is None:
            return text
        start, end, _, tensor = below
        storage = tensor.untyped_storage()
        text += f", which has {end - start}"
        if address < storage.data_ptr() + storage.nbytes():
            text += f" and is a view of {storage.nbytes()}"
        return text

    def _below(self, address: int) -> tuple[int, int, str, Tensor] | None:
        """The last tensor that begins at or below an address."""
        return next((one for one in reversed(self._named) if one[0] <= address), None)


def _extent(tensor: Tensor) -> tuple[int, int]:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _memory(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
