"""The orders in which a device may do the launches of a trace. Pure.

Each order is legal: it keeps the order within every stream and all that events and the host impose.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice, product
from typing import TypeAlias

from loragate.execution.trace.clocks import Clocks
from loragate.execution.trace.operations import HOST, Launch, Trace

Order: TypeAlias = tuple[int, ...]


def legal_orders(trace: Trace, *, limit: int, seed: int) -> list[Order]:
    """Orders of the launches of a trace: that of the host first; all if they are at most `limit`.

    Otherwise those in which one stream is as early or as late as it may be, for every stream, and
    orders drawn from `seed`, together `limit` or twice the number of streams plus one.
    """
    graph = _Graph(trace)
    some = list(islice(graph.every(), limit + 1))
    if len(some) <= limit:
        return some
    streams = sorted(set(graph.streams.values()) - {HOST})
    orders = [graph.order(lambda ready: ready[0])]
    for stream, wanted in product(streams, (True, False)):
        orders.append(graph.order(partial(_first, graph, stream, wanted)))
    generator = random.Random(seed)
    orders += [graph.order(generator.choice) for _ in range(limit - len(orders))]
    return list(dict.fromkeys(orders))


class _Graph:
    def __init__(self, trace: Trace) -> None:
        self._clocks = Clocks(trace)
        self.streams = {
            index: operation.stream
            for index, operation in enumerate(trace.operations)
            if isinstance(operation, Launch)
        }
        self._queues: dict[int, list[int]] = {}
        for index, stream in self.streams.items():
            self._queues.setdefault(stream, []).append(index)

    def order(self, choose: Callable[[list[int]], int]) -> Order:
        """One order, by a choice among the launches that may be next, in the host's order."""
        done: list[int] = []
        counts = dict.fromkeys(self._queues, 0)
        while len(done) < len(self.streams):
            done.append(choose(self._ready(counts)))
            counts[self.streams[done[-1]]] += 1
        return tuple(done)

    def every(self) -> Iterator[Order]:
        started: list[Order] = [()]
        while started:
            done = started.pop()
            if len(done) == len(self.streams):
                yield done
                continue
            counts = Counter(self.streams[index] for index in done)
            ready = self._ready({stream: counts[stream] for stream in self._queues})
            started += [(*done, index) for index in reversed(ready)]

    def _ready(self, counts: Mapping[int, int]) -> list[int]:
        """The launches that may be next, given how many every stream has done."""
        heads = [queue[counts[s]] for s, queue in self._queues.items() if counts[s] < len(queue)]
        return sorted(index for index in heads if self._may_start(index, counts))

    def _may_start(self, index: int, counts: Mapping[int, int]) -> bool:
        own = self.streams[index]
        clock = self._clocks.clocks[index]
        return all(counts[s] >= tick for s, tick in clock.items() if s != own)


def _first(graph: _Graph, stream: int, wanted: bool, ready: list[int]) -> int:
    """The first launch that is on the stream, or that is not; if there is none, the first one."""
    return next((i for i in ready if (graph.streams[i] == stream) == wanted), ready[0])
