"""Device time of calls, from CUDA graphs, and host time, from the wall clock.

Invariant: what is compared runs in turns, so that a drifting GPU clock affects all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from statistics import median
from typing import Protocol, TypeVar

import torch

from loragate.execution.graph import capture

CALLS_PER_GRAPH = 20
REPLAYS = 7
_WARM_UP = 3
_HOST_REPEATS = 50
_COPY_BYTES = 1 << 31
_EVICTED_WIDTH = 1 << 14

_Key = TypeVar("_Key", bound=Hashable)


class Clock(Protocol):
    def __call__(self, calls: Mapping[_Key, Callable[[], object]]) -> dict[_Key, float]:
        """Microseconds of each call; the calls take turns."""


def in_turns(calls: Mapping[_Key, Callable[[], object]]) -> dict[_Key, float]:
    """The Clock of a benchmark: the time of the calls on the device."""
    return replay_in_turns({name: graph_of(call) for name, call in calls.items()})


def in_turns_cold(calls: Mapping[_Key, Callable[[], object]]) -> dict[_Key, float]:
    """As in_turns, with an L2 cache that holds none of the operands: before each call a tensor of
    twice its size is read, and the time of that alone is taken off."""
    evict = _eviction()
    # by a name that no call has
    graphs = {(name,): graph_of(_behind(evict, call)) for name, call in calls.items()}
    times = replay_in_turns({**graphs, (): graph_of(evict)})
    return {name: times[name,] - times[()] for name in calls}


def _eviction() -> Callable[[], object]:
    cache_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    # read, not written: what is written is still to be brought to memory while the call runs
    data = torch.zeros(2 * cache_bytes // 4 // _EVICTED_WIDTH, _EVICTED_WIDTH, device="cuda")
    found = torch.empty(_EVICTED_WIDTH, device="cuda")
    return lambda: torch.amax(data, dim=0, out=found)


def _behind(evict: Callable[[], object], call: Callable[[], object]) -> Callable[[], None]:
    def both() -> None:
        evict()
        call()

    return both


def graph_of(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of CALLS_PER_GRAPH calls, after a warm-up that compiles whatever they need."""
    return capture(call, warm_ups=_WARM_UP, calls=CALLS_PER_GRAPH).graph


def replay_in_turns(
    graphs: Mapping[_Key, torch.cuda.CUDAGraph],
    *,
    replays: int | None = None,
    warm_ups: int = _WARM_UP,
) -> dict[_Key, float]:
    """Microseconds a call: for each graph the median of `replays` replays, by default REPLAYS or as
    many more as let each graph come behind each other one equally often."""
    if replays is None:
        whole = len(_balanced_orders(len(graphs)))
        replays = whole * -(-REPLAYS // whole)
    for _ in range(warm_ups):
        for graph in graphs.values():
            graph.replay()
    torch.cuda.synchronize()
    timings: dict[_Key, list[_Span]] = {name: [] for name in graphs}
    # no wait between replays: the device never idles, and each launch overlaps with the
    # previous replay
    for name in _turns(list(graphs), replays):
        timings[name].append(_Span(graphs[name].replay))
    torch.cuda.synchronize()
    return {
        name: median(span.microseconds for span in spans) / CALLS_PER_GRAPH
        for name, spans in timings.items()
    }


def _turns(names: Sequence[_Key], rounds: int) -> Iterator[_Key]:
    """Each name once a round. The graph before leaves behind a clock at the GPU's power limit: over
    the rounds, each name comes behind each other one equally often."""
    for order in islice(cycle(_balanced_orders(len(names))), rounds):
        yield from (names[place] for place in order)


def _balanced_orders(count: int) -> list[list[int]]:
    """A Williams design: orders of `count` places in which each place is behind each other one
    equally often, which takes as many orders, or twice as many where `count` is odd."""
    # 0, then the last, then 1, then the last but one, ..
    first = [place // 2 if place % 2 == 0 else count - 1 - place // 2 for place in range(count)]
    orders = [[(place + start) % count for place in first] for start in range(count)]
    return orders if count % 2 == 0 else [*orders, *(order[::-1] for order in orders)]


class _Span:
    def __init__(self, launch: Callable[[], object]) -> None:
        self._start, self._end = _event(), _event()
        self._start.record()
        launch()
        self._end.record()

    @property
    def microseconds(self) -> float:
        milliseconds: float = self._start.elapsed_time(self._end)
        return milliseconds * 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def wall(call: Callable[[], object]) -> tuple[float, float]:
    """Microseconds until the call returns, and until the device is done. Medians."""
    for _ in range(_WARM_UP):
        call()
    returned, done = [], []
    for _ in range(_HOST_REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        returned.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        done.append(time.perf_counter() - start)
    return median(returned) * 1e6, median(done) * 1e6


def copy_bytes_per_s() -> float:
    """Bytes read + written a second by a large copy on the device."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    for _ in range(_WARM_UP):
        target.copy_(source)
    spans = [_Span(lambda: target.copy_(source)) for _ in range(REPLAYS)]
    torch.cuda.synchronize()
    return 2 * _COPY_BYTES / (median(span.microseconds for span in spans) * 1e-6)
