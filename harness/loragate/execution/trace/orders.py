"""The orders in which a device may do the launches of a trace. Pure.

Each order is legal: it keeps the order within every stream and all that events and the host impose.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeAlias

from loragate.execution.trace.clocks import Clocks
from loragate.execution.trace.operations import (
    HOST,
    Launch,
    Operation,
    Record,
    Sync,
    Trace,
    Wait,
)

Order: TypeAlias = tuple[int, ...]


class Kind(StrEnum):
    HOST = "host"
    # where all legal orders are meant, that of the host is the first of them
    EVERY = "every"
    # a stream is held back, from a launch on, until nothing else can be done
    CUT = "cut"
    DRAW = "draw"


class How(NamedTuple):
    """How an order was found; `number` is that of the order among all, of the launch from which a
    stream is held back, or of the draw."""

    kind: Kind
    number: int


def legal_orders(trace: Trace, *, limit: int, seed: int) -> dict[Order, How]:
    """Different orders of the launches of a trace: that of the host first; all if they are at most
    `limit`.

    Otherwise that of the host, every cut, and draws up to the limit, each of them from the seed and
    its own number; or some of the cuts, drawn from the seed, where they alone are too many. A cut
    may be wherever the order of streams is decided: at the first launch of a stream behind a
    record, a wait or a launch of another stream.
    """
    graph = _Graph(trace)
    some = list(islice(graph.every(), limit + 1))
    if len(some) <= limit:
        return {order: How(Kind.EVERY, number) for number, order in enumerate(some)}
    orders = {graph.order(lambda ready: ready[0]): How(Kind.HOST, 0)}
    cuts = dict[Order, How]()
    for place in _places(trace):
        cuts.setdefault(graph.order(partial(_held_back, graph, place)), How(Kind.CUT, place))
    new = [order for order in cuts if order not in orders]
    if len(new) >= limit:
        new = random.Random(seed).sample(new, limit - 1)
    orders |= {order: cuts[order] for order in new}
    for number in range(limit - len(orders)):
        drawn = graph.order(random.Random(f"{seed}/{number}").choice)
        orders.setdefault(drawn, How(Kind.DRAW, number))
    return orders


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


def _places(trace: Trace) -> Iterator[int]:
    """The launches at which a cut may be."""
    last: Operation | None = None
    for index, operation in enumerate(trace.operations):
        # behind a sync a run begins anew: what is older can no longer be held back
        if not isinstance(operation, (Launch, Record, Wait, Sync)):
            continue
        follows = isinstance(last, Launch) and last.stream == operation.stream
        if isinstance(operation, Launch) and operation.stream != HOST and not follows:
            yield index
        last = operation


def _held_back(graph: _Graph, place: int, ready: list[int]) -> int:
    """The first launch that is not on the stream of `place`, from there on; if there is none, the
    first one."""
    stream = graph.streams[place]
    return next((i for i in ready if graph.streams[i] != stream or i < place), ready[0])
