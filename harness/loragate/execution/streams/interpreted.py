"""Triton launches in the interpreter: the exact bytes that their programs load and store.

A kernel that waits for memory which no other launch has written would never end here, as on a
device that does its launches in this order: NeverSatisfied is raised in its place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor

from loragate.execution.interpreter_calls import (
    AccessKind,
    access_hooks,
    cause_of,
    element_size,
    hooked,
    live_elements,
)
from loragate.execution.streams.arguments import holders, tensors_of
from loragate.execution.streams.memory import Addresses, Block
from loragate.execution.streams.recorder import Recorder
from loragate.execution.trace.operations import Access
from loragate.execution.trace.spans import Spans, merged

# times that a program reads the same place, and nothing else, until it counts as a wait
_MOST_READS = 20_000
# no program polls more places at once
_MOST_POLLED = 128


class NeverSatisfied(Exception):
    """A kernel waits for what nothing before it does."""


@contextmanager
def recorded_launches(recorder: Recorder) -> Iterator[None]:
    """Within, launches in the interpreter are operations of the recorder."""
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def launched(executor: Any, *args: Any, **kwargs: Any) -> None:
        # addresses must not belong to memory that has been freed as well
        recorder.note_freed()
        recorder.next_call()
        stream = recorder.current()
        name = executor.fn.__name__
        tensors = tensors_of(executor.arg_names, args, kwargs)
        names = _blocks_by_argument(recorder, name, tensors)
        with recorder.muted(), _watched(name) as watch:
            watch.addresses = recorder.blocks.addresses()
            run(executor, *args, **kwargs)
            unknown = holders(executor.arg_names, args, kwargs, watch.unnamed())
        recorder.note_unknown(name, unknown)

        def again() -> None:
            with recorder.muted(), _watched(name):
                run(executor, *args, **kwargs)

        replay = again if recorder.blocks.keep else None
        recorder.launch(name, watch.accesses(names), replay, stream=stream)

    with patch.object(GridExecutor, "__call__", launched):
        yield


@contextmanager
def reversed_programs() -> Iterator[None]:
    """Within, the programs of every launch run from the last one to the first."""
    from triton.runtime.interpreter import InterpreterBuilder

    enter = InterpreterBuilder.set_grid_idx

    def entering(builder: Any, *place: int) -> None:
        enter(builder, *(size - 1 - k for k, size in zip(place, builder.grid_dim, strict=True)))

    with patch.object(InterpreterBuilder, "set_grid_idx", entering):
        yield


class _Watch:
    """What the programs of one launch access. Without `addresses` it only looks for waits."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.addresses: Addresses | None = None
        # by block, size of the elements and whether it is a write: which elements
        self._marks: dict[tuple[int, int, bool], Any] = {}
        self._unnamed: defaultdict[bool, list[tuple[int, int]]] = defaultdict(list)
        self._polled: Any = None
        self._reads = 0

    def note(self, kind: AccessKind, pointers: Any, mask: Any, value: Any) -> None:
        live = live_elements(np.asarray(pointers.data, dtype=np.uint64), mask)
        if kind is AccessKind.WRITE:
            self._polled = None
        else:
            self._count(live)
            self._mark(live, element_size(pointers), is_write=False)
        if kind is not AccessKind.READ:
            self._mark(live, element_size(pointers), is_write=True)

    def accesses(self, names: Mapping[int, str]) -> list[Access]:
        found = [
            Access(block, _spans(marks, size), is_write, names.get(block, ""))
            for (block, size, is_write), marks in self._marks.items()
        ]
        # memory of no known tensor: one block for all of it, and addresses in place of offsets
        return found + [
            Access(-1, merged(spans), is_write) for is_write, spans in self._unnamed.items()
        ]

    def unnamed(self) -> list[int]:
        """Where memory of no known tensor was accessed."""
        return [start for spans in self._unnamed.values() for start, _ in merged(spans)]

    def _mark(self, live: Any, size: int, *, is_write: bool) -> None:
        if self.addresses is None:
            return
        for block, part in self.addresses.parts(live, size):
            if block is None:
                self._unnamed[is_write] += [(int(p), int(p) + size) for p in np.unique(part)]
            else:
                self._mark_block(block, part, size, is_write)

    def _mark_block(self, block: Block, pointers: Any, size: int, is_write: bool) -> None:
        key = (block.number, size, is_write)
        if key not in self._marks:
            self._marks[key] = np.zeros(-(-block.size // size), dtype=bool)
        offsets = (pointers - np.uint64(block.start)).view(np.int64)
        # sizes are powers of two, and integer division takes half of the time of a trace
        shift = size.bit_length() - 1
        self._marks[key][offsets >> shift] = True
        if (offsets & (size - 1)).any():
            # elements that lie across two of the marked ones
            self._marks[key][(offsets + size - 1) >> shift] = True

    def _count(self, live: Any) -> None:
        if len(live) > _MOST_POLLED:
            self._polled = None
        elif self._polled is None or not np.array_equal(self._polled, live):
            self._polled, self._reads = live, 0
        else:
            self._reads += 1
            if self._reads > _MOST_READS:
                raise NeverSatisfied(
                    f"kernel {self.kernel} reads the same {_size_text(live)} again and again, and "
                    "no launch before it writes what it waits for"
                )


@contextmanager
def _watched(kernel: str) -> Iterator[_Watch]:
    from triton.runtime.errors import InterpreterError

    watch = _Watch(kernel)
    with hooked(access_hooks(watch.note)):
        try:
            yield watch
        except InterpreterError as error:
            waits = cause_of(error, NeverSatisfied)
            if waits is not None:
                raise waits from None
            raise


def _blocks_by_argument(
    recorder: Recorder, kernel: str, tensors: list[tuple[str, Tensor]]
) -> dict[int, str]:
    """What the kernel calls the blocks of its arguments, and of what stands behind them: they are
    known from here on."""
    named = [(tensor, False, name) for name, tensor in tensors]
    for name, table in tensors:
        for tensor in recorder.tensors_behind(kernel, name, table) or ():
            named.append((tensor, False, f"behind {name}"))
    names: defaultdict[int, list[str]] = defaultdict(list)
    for access in recorder.accesses(named, recorder.current()):
        names[access.block].append(access.name)
    return {block: "/".join(dict.fromkeys(found)) for block, found in names.items()}


def _size_text(live: Any) -> str:
    return "place" if len(live) == 1 else f"{len(live)} places"


def _spans(marks: Any, size: int) -> Spans:
    """Runs of marked elements."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], marks.view(np.int8), [0]))))
    starts, stops = (edges[0::2] * size).tolist(), (edges[1::2] * size).tolist()
    return tuple(zip(starts, stops, strict=True))
