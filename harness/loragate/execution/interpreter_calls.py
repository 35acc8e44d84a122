"""What kernels do in Triton's interpreter, seen ahead of each operation of its builder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import StrEnum
from typing import Any, ClassVar, TypeVar
from unittest.mock import patch

import numpy as np

from loragate.core.verdict import Failure

_ErrorT = TypeVar("_ErrorT", bound=BaseException)

# called with the arguments of an operation
Hook = Callable[..., None]


class AccessKind(StrEnum):
    READ = "read"
    WRITE = "written"
    ATOMIC = "changed"


class KernelFault(Exception):
    """A kernel did in the interpreter what is wrong when it is compiled, whatever its result here.
    The message is one line."""

    failure: ClassVar[Failure]


def patches(hooks: Mapping[str, Hook]) -> list[AbstractContextManager[Any]]:
    """Within each of these, a hook is called ahead of the method of the builder of its name."""
    from triton.runtime.interpreter import InterpreterBuilder

    return [
        patch.object(InterpreterBuilder, name, _hooked(getattr(InterpreterBuilder, name), hook))
        for name, hook in hooks.items()
    ]


@contextmanager
def hooked(hooks: Mapping[str, Hook]) -> Iterator[None]:
    """Within, all hooks are called."""
    with ExitStack() as stack:
        for each in patches(hooks):
            stack.enter_context(each)
        yield


def access_hooks(note: Callable[[AccessKind, Any, Any, Any], None]) -> dict[str, Hook]:
    """Hooks that call `note` with each access of memory, its pointers, its mask (None: no mask) and
    what it stores (None: nothing, or what an atomic operation makes of it). Block pointers and
    tensor descriptors come down to these as well."""

    def load(pointers: Any, mask: Any, *rest: Any, **options: Any) -> None:
        note(AccessKind.READ, pointers, mask, None)

    def store(pointers: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> None:
        note(AccessKind.WRITE, pointers, mask, value)

    def change(operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **_: Any) -> None:
        note(AccessKind.ATOMIC, pointers, mask, None)

    def compare(pointers: Any, *rest: Any, **options: Any) -> None:
        note(AccessKind.ATOMIC, pointers, None, None)

    return {
        "create_masked_load": load,
        "create_masked_store": store,
        "create_atomic_rmw": change,
        "create_atomic_cas": compare,
    }


def live_elements(block: Any, mask: Any) -> Any:
    """The elements of an array that are not masked off, in one dimension; None is no mask."""
    if mask is None:
        return block.reshape(-1)
    # a mask may consist of integers, which numpy would take for indices
    live = np.broadcast_to(mask.data, block.shape) != 0
    return block.reshape(-1) if live.all() else block[live]


def element_size(pointers: Any) -> int:
    """Bytes of what each of `pointers` points to."""
    return max(1, int(pointers.get_element_ty().primitive_bitwidth) // 8)


def cause_of(error: BaseException | None, kind: type[_ErrorT]) -> _ErrorT | None:
    """What a hook has raised: the interpreter wraps an error once for each function of a kernel."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__
    return error


def _hooked(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def hooked_method(builder: Any, *args: Any, **kwargs: Any) -> Any:
        hook(*args, **kwargs)
        return original(builder, *args, **kwargs)

    return hooked_method
