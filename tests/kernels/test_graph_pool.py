"""The order of a warm-up, of a capture, and of what is queued around them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
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
    # what an operation does to a capture that cannot hold it
    is_spoilt = False

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
        try:
            yield
        finally:
            self.now = before

    @contextmanager
    def graph(self, graph: object, *, pool: object, stream: Stream) -> Iterator[None]:
        self.log.append("begin")
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.log.append("end")
            if self.is_spoilt:
                # as in torch, before the stream is put back
                raise RuntimeError("capture was invalidated")
            self.now = before


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


def test_what_follows_a_warm_up_that_raises_waits_for_what_it_has_queued() -> None:
    streams = Streams()
    pool = GraphPool(streams, torch.device("cpu"))

    def call() -> None:
        streams.log.append(f"call on {streams.now.name}")
        if streams.log.count("call on own") == 2:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        pool.capture(call, warm_ups=2)
    assert streams.log == ["own waits for main", *["call on own"] * 2, "main waits for own"]
    assert streams.now is streams.main


@pytest.mark.parametrize("is_spoilt", [False, True])
def test_a_capture_that_fails_leaves_the_current_stream_as_it_was(is_spoilt: bool) -> None:
    streams = Streams()
    pool = GraphPool(streams, torch.device("cpu"))

    def call() -> None:
        if "begin" in streams.log:
            streams.is_spoilt = is_spoilt
            raise RuntimeError("not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="invalidated" if is_spoilt else "not permitted"):
        pool.capture(call, warm_ups=1)
    assert streams.log[-2:] == ["begin", "end"]
    assert streams.now is streams.main
