"""How much Triton's interpreter computes and moves: the only place that counts it.

Memory is counted as a GPU accesses it: an element that is masked off costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch


@dataclass(slots=True)
class Work:
    """Programs of all launches; multiplications and additions of their dots; bytes that they load
    and store, and on which they work atomically."""

    programs: int = 0
    dot_operations: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0


@contextmanager
def counted_work() -> Iterator[Work]:
    """The work of all kernels that are interpreted within."""
    from triton.runtime.interpreter import InterpreterBuilder

    work = Work()
    counters: dict[str, Callable[..., None]] = {
        "set_grid_idx": lambda x, y, z: _add(work, programs=1),
        "create_dot": lambda a, b, *rest: _add(
            work, dot_operations=2 * a.data.size * b.data.shape[-1]
        ),
        "create_masked_load": lambda ptrs, mask, *rest: _add(work, bytes_loaded=_bytes(ptrs, mask)),
        "create_masked_store": lambda ptrs, value, mask, *rest: _add(
            work, bytes_stored=_bytes(ptrs, mask)
        ),
        "create_atomic_rmw": lambda op, ptr, val, mask, *rest: _add(
            work, bytes_loaded=_bytes(ptr, mask), bytes_stored=_bytes(ptr, mask)
        ),
    }
    with ExitStack() as stack:
        for name, count in counters.items():
            original = getattr(InterpreterBuilder, name)
            stack.enter_context(patch.object(InterpreterBuilder, name, _counting(original, count)))
        yield work


def _counting(original: Callable[..., Any], count: Callable[..., None]) -> Callable[..., Any]:
    def counting(builder: Any, *args: Any, **kwargs: Any) -> Any:
        count(*args, **kwargs)
        return original(builder, *args, **kwargs)

    return counting


def _add(work: Work, **amounts: int) -> None:
    for name, amount in amounts.items():
        setattr(work, name, getattr(work, name) + amount)


def _bytes(pointers: Any, mask: Any) -> int:
    live = pointers.data.size if mask is None else int(mask.data.sum())
    return live * int(pointers.get_element_ty().primitive_bitwidth) // 8
