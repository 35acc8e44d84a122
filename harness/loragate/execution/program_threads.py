"""The threads of a program meet at a barrier between a write and the next use of the same place.

The interpreter runs a program as one thread. Compiled, the elements of a block belong to many
threads, and which element to which thread differs from operation to operation. Nothing but a
barrier (`tl.debug_barrier`) orders what they do in global memory: one that reads may be ahead of
the one that writes (sglang #37663).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from loragate.core.plural import counted
from loragate.core.verdict import Failure
from loragate.execution.interpreter_calls import AccessKind, KernelFault, live_elements


class MissingBarrier(KernelFault):
    """Threads of a program use a place that another one writes, with no order between them."""

    failure = Failure.RACE


@dataclass(frozen=True, slots=True)
class _Access:
    """What one operation of a program accesses: addresses, sorted. `values` are what is stored
    there; None: it is read, or changed by an atomic operation."""

    kind: AccessKind
    places: Any
    values: Any

    def conflicts(self, later: _Access) -> Any:
        """The places that both access, where the result depends on which one is first."""
        if self.places[-1] < later.places[0] or later.places[-1] < self.places[0]:
            return later.places[:0]
        at = np.searchsorted(self.places, later.places).clip(max=len(self.places) - 1)
        is_same = self.places[at] == later.places
        if self.values is not None and later.values is not None:
            before, after = self.values[at], later.values
            # whoever is last leaves the same; NaN is not equal to itself
            is_same &= (before != after) & ~((before != before) & (after != after))
        return later.places[is_same]


class ProgramThreads:
    """Of the program that runs in a launch. place: says where an address lies."""

    def __init__(self, kernel: str, place: Callable[[int], str]) -> None:
        self._kernel, self._place = kernel, place
        # since the threads have last met
        self._written: list[_Access] = []

    def meet(self) -> None:
        """At a barrier, and at the start of a program."""
        self._written.clear()

    def check(self, kind: AccessKind, pointers: Any, mask: Any, value: Any) -> None:
        """Raises MissingBarrier. mask: None for no mask; value: what is stored, or None."""
        if kind is AccessKind.READ and not self._written:
            return
        access = _access(kind, pointers, mask, value)
        if access is None:
            return
        for earlier in self._written:
            # atomic operations may come in any order
            if earlier.kind is kind is AccessKind.ATOMIC:
                continue
            places = earlier.conflicts(access)
            if len(places):
                raise MissingBarrier(
                    f"kernel {self._kernel}: {counted(len(places), 'element')} {earlier.kind} and "
                    f"then {kind} without a barrier between the threads, the first "
                    f"{self._place(int(places[0]))}"
                )
        if kind is not AccessKind.READ:
            self._written.append(access)


def _access(kind: AccessKind, pointers: Any, mask: Any, value: Any) -> _Access | None:
    """None where no place is accessed."""
    block = np.asarray(pointers.data, dtype=np.uint64)
    places, values = live_elements(block, mask), None
    if value is not None:
        values = live_elements(np.broadcast_to(value.data, block.shape), mask)
    if not places.size:
        return None
    if (places[1:] < places[:-1]).any():
        order = np.argsort(places, kind="stable")
        places = places[order]
        values = None if values is None else values[order]
    return _Access(kind, places, values)
