"""How much Triton's interpreter computes and moves: the only place that counts it.

Memory is counted as a GPU accesses it: an element that is masked off costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from loragate.execution.interpreter_calls import (
    AccessKind,
    Hook,
    access_hooks,
    element_size,
    hooked,
)


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
    work = Work()
    counters: dict[str, Hook] = {
        "set_grid_idx": lambda x, y, z: _add(work, programs=1),
        "create_dot": lambda a, b, *rest: _add(
            work, dot_operations=2 * a.data.size * b.data.shape[-1]
        ),
    }
    with hooked(counters | access_hooks(partial(_add_access, work))):
        yield work


def _add(work: Work, **amounts: int) -> None:
    for name, amount in amounts.items():
        setattr(work, name, getattr(work, name) + amount)


def _add_access(work: Work, kind: AccessKind, pointers: Any, mask: Any, value: Any) -> None:
    live = pointers.data.size if mask is None else int(mask.data.sum())
    size = live * element_size(pointers)
    if kind is not AccessKind.WRITE:
        work.bytes_loaded += size
    if kind is not AccessKind.READ:
        work.bytes_stored += size
