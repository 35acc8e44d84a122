"""What the launch of a CUDA graph adds to a trace. Pure.

The launch of a graph is one operation of its stream: behind all that was queued there before, and
ahead of all that is queued afterwards. Within, the nodes keep the order that streams and events had
while they were captured, but belong to no stream: every launch gets streams and events of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from loragate.execution.trace.operations import HOST, Free, Launch, Operation, Record, Wait

# an operation, and the number of the captured launch that it repeats, if it is one
Repeated: TypeAlias = tuple[Operation, int | None]


def launched(
    captured: Sequence[Operation], stream: int, numbers: Iterator[int]
) -> tuple[list[Repeated], dict[int, int]]:
    """The operations of a launch on `stream`, and the captured stream that each of its own streams
    stands for. `numbers` are not in use for streams and events.

    What the host did during the capture is not repeated, and memory that was freed within is left
    out: it belongs to the graph alone, so that only the capture itself can show a wrong use of it.
    A wait for an event that was not recorded within is no part of a graph.
    """
    nodes = [(op, i) for i, op in enumerate(captured) if isinstance(op, (Launch, Record, Wait))]
    used = [op.stream for op, _ in nodes if op.stream != HOST]
    streams = {own: next(numbers) for own in dict.fromkeys(used)}
    freed = frozenset(op.block for op in captured if isinstance(op, Free))
    start, events = next(numbers), dict[int, int]()
    repeated: list[Repeated] = [(Record(start, stream), None)]
    repeated += [(Wait(start, own), None) for own in streams.values()]
    for op, index in nodes:
        if op.stream == HOST:
            continue
        if isinstance(op, Launch):
            kept = tuple(access for access in op.accesses if access.block not in freed)
            repeated.append((replace(op, stream=streams[op.stream], accesses=kept), index))
        elif isinstance(op, Record):
            events[op.event] = next(numbers)
            repeated.append((Record(events[op.event], streams[op.stream]), None))
        elif op.event in events:
            wait = replace(op, event=events[op.event], stream=streams[op.stream])
            repeated.append((wait, None))
    for own in streams.values():
        end = next(numbers)
        repeated += [(Record(end, own), None), (Wait(end, stream), None)]
    return repeated, {own: stream for stream, own in streams.items()}
