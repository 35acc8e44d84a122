"""The order of a warm-up, of a capture, and of what is queued around them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lorakernels.runtime.graphs import GraphPool


class Stream:
    def __init__(self, module: Streams, name: str) -> None:
        self.module, self.name = module, name

    def wait_stream(self, other: Stream) -> None:
        self.module.log.append(f"{self.name} waits for {other.name}")


class Streams:
    """What a pool uses of torch.cuda, noted."""

    CUDAGraph = object

    def __init__(self) -> None:
        self.log: list[str] = []
        self.main, self.own = Stream(self, "main"), Stream(self, "own")
        self.now = self.main

    def Stream(self, device: torch.device) -> Stream:
        return self.own

    def current_stream(self, device: torch.device) -> Stream:
        return self.now

    def graph_pool_handle(self) -> object:
        return object()

    def synchronize(self, device: torch.device) -> None:
        self.log.append("synchronize")

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    @contextmanager
    def graph(self, graph: object, *, pool: object, stream: Stream) -> Iterator[None]:
        self.log.append("begin")
        with self.stream(stream):
            yield
        self.log.append("end")


def test_a_warm_up_waits_for_what_is_queued_and_all_that_follows_waits_for_it() -> None:
    streams = Streams()
    pool = GraphPool(streams, torch.device("cpu"))

    def call() -> int:
        streams.log.append(f"call on {streams.now.name}")
        return len(streams.log)

    captured = pool.capture(call, warm_ups=2)
    assert streams.log == [
        "own waits for main",
        *["call on own"] * 2,
        "main waits for own",
        "synchronize",
        "begin",
        "call on own",
        "end",
    ]
    # of the call that was captured
    assert captured.result == 7
    assert streams.now is streams.main
