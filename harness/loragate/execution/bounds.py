"""Kernels in Triton's interpreter stay within the tensors that they are given.

The interpreter reads and writes any address of the process. On a GPU an access beyond all tensors
may fail, and one into another tensor reads what that holds. Where no result depends on it, neither
shows. A compiled kernel also believes `tl.multiple_of`, and accesses whole vectors from an address
that is said to be aligned; the interpreter ignores it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from types import TracebackType
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor

from loragate.core.plural import counted
from loragate.execution.interpreter_calls import (
    AccessKind,
    access_hooks,
    cause_of,
    element_size,
    patches,
)
from loragate.execution.streams.arguments import held_integers, tensors_of


class OutOfBounds(Exception):
    """A kernel accesses memory outside of all tensors of its launch."""


class FalseClaim(OutOfBounds):
    """A kernel says that a number is a multiple of another, which it is not: compiled, it may
    access other memory."""


def bounded_launches(addresses: Collection[tuple[str, str]] = ()) -> _BoundedLaunches:
    """Within, a launch in the interpreter ends ahead of an access that lies outside of its tensors,
    and at a false claim. The first OutOfBounds is raised at the end as well, whoever caught it
    meanwhile.

    addresses: by the names of kernels and of their arguments, tensors that say where more memory
        begins. Such a one may be the first of several, as slot 0 of a stack that vLLM gives to its
        kernels: all memory that it is a view of belongs to the launch.
    """
    return _BoundedLaunches(frozenset(addresses))


class _BoundedLaunches:
    # a class, because contextlib assigns to exceptions: see protocol/error_origin.py

    def __init__(self, addresses: frozenset[tuple[str, str]]) -> None:
        self._addresses = addresses
        # that are running, the innermost last: hooks of a kernel may launch another one
        self._launches: list[_Launch] = []
        self._first: OutOfBounds | None = None
        self._patches = ExitStack()

    def __enter__(self) -> None:
        if find_spec("triton") is None:
            return
        from triton.runtime.interpreter import GridExecutor, TensorHandle

        launched = self._launched(GridExecutor.__call__)
        for each in (
            patch.object(GridExecutor, "__call__", launched),
            patch.object(TensorHandle, "set_attr", self._claimed(TensorHandle.set_attr)),
            *patches(access_hooks(self._check)),
        ):
            self._patches.enter_context(each)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._patches.close()
        if self._first is not None and (error is None or isinstance(error, Exception)):
            raise self._first from None

    def _launched(self, run: Callable[..., None]) -> Callable[..., None]:
        from triton.runtime.errors import InterpreterError

        def launched(executor: Any, *args: Any, **kwargs: Any) -> None:
            kernel = executor.fn.__name__
            whole = {name for of, name in self._addresses if of == kernel}
            self._launches.append(_Launch(kernel, executor.arg_names, args, kwargs, whole))
            try:
                run(executor, *args, **kwargs)
            except InterpreterError as error:
                outside = cause_of(error, OutOfBounds)
                if outside is not None:
                    raise outside from None
                raise
            finally:
                self._launches.pop()

        return launched

    def _claimed(self, set_attr: Callable[..., None]) -> Callable[..., None]:
        def claimed(handle: Any, name: str, values: Any) -> None:
            if name == "tt.divisibility" and self._launches:
                self._note(lambda: self._launches[-1].check_multiple(handle, values))
            set_attr(handle, name, values)

        return claimed

    def _check(self, kind: AccessKind, pointers: Any, mask: Any) -> None:
        if self._launches:
            self._note(lambda: self._launches[-1].check(kind, pointers, mask))

    def _note(self, check: Callable[[], None]) -> None:
        try:
            check()
        except OutOfBounds as error:
            self._first = self._first or error
            raise


class _Launch:
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
        if mask is not None:
            places = places[np.broadcast_to(mask.data, places.shape) != 0]
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

    def _near(self, place: int) -> str:
        """Where an address lies, from the tensor that begins at or below it."""
        below = [one for one in self._named if one[0] <= place]
        if not below:
            return "ahead of all of them"
        start, end, name, tensor = below[-1]
        storage = tensor.untyped_storage()
        text = f"at byte {place - start} of {name}, which has {end - start}"
        if place < storage.data_ptr() + storage.nbytes():
            text += f" and is a view of {storage.nbytes()}"
        return text


def _extent(tensor: Tensor) -> tuple[int, int]:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _memory(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
