"""Which operations of a trace are ordered: a vector clock for each of them. Pure.

A stream does its operations in order. Nothing that the host issues starts before what the host did
itself until then; the host learns what a stream has done only by waiting for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from loragate.execution.trace.operations import HOST, Free, Launch, Record, Sync, Trace, Wait

Clock = Mapping[int, int]


class Clocks:
    """`ticks[i]` is the number of launch i among those of its stream, and `clocks[i]` how many
    launches of each stream happen before launch or free i, itself included. `idle_waits` are the
    waits for events that nothing had recorded."""

    def __init__(self, trace: Trace) -> None:
        self.ticks: dict[int, int] = {}
        self.clocks: dict[int, Clock] = {}
        self.idle_waits: list[int] = []
        self._operations = trace.operations
        self._now: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._recorded: dict[int, Clock] = {}
        for index in range(len(trace.operations)):
            self._step(index)

    def ordered(self, first: int, second: int) -> bool:
        """Whether launch `first` happens before the launch or free `second`, which is later in
        the trace. Nothing waits for a free."""
        tick = self.ticks.get(first)
        if tick is None:
            return False
        stream = self._operations[first].stream
        assert stream is not None
        return self.clocks[second].get(stream, 0) >= tick

    def _step(self, index: int) -> None:
        operation = self._operations[index]
        if isinstance(operation, Launch):
            now = self._issue(operation.stream)
            now[operation.stream] = now.get(operation.stream, 0) + 1
            self.ticks[index] = now[operation.stream]
            self.clocks[index] = dict(now)
        elif isinstance(operation, Record):
            self._recorded[operation.event] = dict(self._issue(operation.stream))
        elif isinstance(operation, Wait):
            recorded = self._recorded.get(operation.event)
            if recorded is None:
                self.idle_waits.append(index)
            else:
                _join(self._issue(operation.stream), recorded)
        elif isinstance(operation, Sync):
            self._wait_on_host(operation)
        else:
            self.clocks[index] = self._freed(operation)

    def _issue(self, stream: int) -> dict[int, int]:
        now = self._now[stream]
        if stream != HOST:
            _join(now, self._now[HOST])
        return now

    def _wait_on_host(self, sync: Sync) -> None:
        if sync.event is not None:
            awaited = [self._recorded.get(sync.event, {})]
        elif sync.stream is not None:
            awaited = [self._now[sync.stream]]
        else:
            awaited = list(self._now.values())
        for clock in awaited:
            _join(self._now[HOST], clock)

    def _freed(self, free: Free) -> Clock:
        clock = dict(self._issue(free.stream))
        for stream in free.used_by:
            _join(clock, self._now[stream])
        return clock


def _join(clock: dict[int, int], other: Clock) -> None:
    for stream, tick in list(other.items()):
        clock[stream] = max(clock.get(stream, 0), tick)
