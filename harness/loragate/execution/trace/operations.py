"""The operations of a trace, in the order in which the host issued them. Pure.

Streams, events and blocks of memory are numbers. The host is a stream of its own: what it reads or
writes itself is a Launch on HOST.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from loragate.execution.trace.spans import Spans
from loragate.execution.trace.waits import WAITS_FIRST, Waits

HOST = -1

# (file, line, function), innermost first
Stack: TypeAlias = tuple[tuple[str, int, str], ...]


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes of a block that an operation reads or writes; `name` says what it calls them.
    `is_early`: before it waits for the kernels ahead of it."""

    block: int
    spans: Spans
    is_write: bool
    name: str = ""
    is_early: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """Work that a stream does: a kernel, an ATen operator, a copy."""

    stream: int
    name: str
    accesses: tuple[Access, ...] = ()
    stack: Stack = ()
    waits: Waits = WAITS_FIRST


@dataclass(frozen=True, slots=True)
class Record:
    event: int
    stream: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The stream waits for the most recent record of the event; without one it does not wait."""

    event: int
    stream: int
    stack: Stack = ()


@dataclass(frozen=True, slots=True)
class Sync:
    """The host waits for a stream, for the most recent record of an event, or for everything."""

    stream: int | None = None
    event: int | None = None


@dataclass(frozen=True, slots=True)
class Free:
    """A block returns to the allocator, which hands it out to `stream` again: at once, or after
    the work that is now queued on the streams of `used_by` (record_stream)."""

    block: int
    stream: int
    size: int
    used_by: frozenset[int] = frozenset()
    stack: Stack = ()


Operation: TypeAlias = Launch | Record | Wait | Sync | Free


@dataclass(frozen=True, slots=True)
class Trace:
    operations: tuple[Operation, ...]
    # what reports call a block or a stream
    block_names: Mapping[int, str] = field(default_factory=dict)
    stream_names: Mapping[int, str] = field(default_factory=dict)

    def block_name(self, block: int) -> str:
        return self.block_names.get(block, f"block {block}")

    def stream_name(self, stream: int) -> str:
        if stream == HOST:
            return "host"
        return self.stream_names.get(stream, f"stream {stream}")
