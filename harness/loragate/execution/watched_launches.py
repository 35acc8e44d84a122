"""Launches in Triton's interpreter, watched for what is wrong in a compiled kernel and shows in no
result: accesses outside of its tensors (`bounds.py`), and threads of a program that use what
another one writes (`program_threads.py`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from types import TracebackType
from typing import Any
from unittest.mock import patch

from loragate.execution.bounds import LaunchBounds
from loragate.execution.interpreter_calls import (
    AccessKind,
    KernelFault,
    access_hooks,
    cause_of,
    patches,
)
from loragate.execution.program_threads import ProgramThreads
from loragate.execution.streams.arguments import tensors_of


def watched_launches(addresses: Collection[tuple[str, str]] = ()) -> _WatchedLaunches:
    """Within, a launch in the interpreter ends ahead of an access that is wrong, and at a false
    claim. The first KernelFault is raised at the end as well, whoever caught it meanwhile.

    addresses: by the names of kernels and of their arguments, tensors that say where more memory
        begins. Such a one may be the first of several, as slot 0 of a stack that vLLM gives to its
        kernels: all memory that it is a view of belongs to the launch.
    """
    return _WatchedLaunches(frozenset(addresses))


@dataclass(frozen=True, slots=True)
class _Launch:
    bounds: LaunchBounds
    threads: ProgramThreads

    def check(self, kind: AccessKind, pointers: Any, mask: Any, value: Any) -> None:
        """Raises KernelFault."""
        self.bounds.check(kind, pointers, mask)
        self.threads.check(kind, pointers, mask, value)


class _WatchedLaunches:
    # a class, because contextlib assigns to exceptions: see protocol/error_origin.py

    def __init__(self, addresses: frozenset[tuple[str, str]]) -> None:
        self._addresses = addresses
        # that are running, the innermost last: hooks of a kernel may launch another one
        self._launches: list[_Launch] = []
        self._first: KernelFault | None = None
        self._patches = ExitStack()

    def __enter__(self) -> None:
        if find_spec("triton") is None:
            return
        from triton.runtime.interpreter import GridExecutor, TensorHandle

        launched = self._launched(GridExecutor.__call__)
        hooks = {"create_barrier": self._met, "set_grid_idx": self._met}
        for each in (
            patch.object(GridExecutor, "__call__", launched),
            patch.object(TensorHandle, "set_attr", self._claimed(TensorHandle.set_attr)),
            *patches(hooks | access_hooks(self._check)),
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
            if _on_host(executor.arg_names, args, kwargs):
                return watched(executor, *args, **kwargs)
            # the interpreter works on copies, which are at other addresses
            copies, options = executor._init_args_hst(args, kwargs)
            watched(executor, *copies, **options)
            executor._restore_args_dev(args, copies, kwargs, options)

        def watched(executor: Any, *args: Any, **kwargs: Any) -> None:
            kernel = executor.fn.__name__
            whole = {name for of, name in self._addresses if of == kernel}
            bounds = LaunchBounds(kernel, executor.arg_names, args, kwargs, whole)
            self._launches.append(_Launch(bounds, ProgramThreads(kernel, bounds.place)))
            try:
                run(executor, *args, **kwargs)
            except InterpreterError as error:
                fault = cause_of(error, KernelFault)
                if fault is not None:
                    raise fault from None
                raise
            finally:
                self._launches.pop()

        return launched

    def _claimed(self, set_attr: Callable[..., None]) -> Callable[..., None]:
        def claimed(handle: Any, name: str, values: Any) -> None:
            if name == "tt.divisibility" and self._launches:
                bounds = self._launches[-1].bounds
                self._note(lambda: bounds.check_multiple(handle, values))
            set_attr(handle, name, values)

        return claimed

    def _met(self, *where: Any) -> None:
        if self._launches:
            self._launches[-1].threads.meet()

    def _check(self, kind: AccessKind, pointers: Any, mask: Any, value: Any) -> None:
        if self._launches:
            self._note(lambda: self._launches[-1].check(kind, pointers, mask, value))

    def _note(self, check: Callable[[], None]) -> None:
        try:
            check()
        except KernelFault as error:
            self._first = self._first or error
            raise


def _on_host(names: Sequence[str], args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    return all(tensor.is_cpu for _, tensor in tensors_of(names, args, options))
