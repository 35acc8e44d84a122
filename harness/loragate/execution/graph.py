"""Capture of calls into a CUDA graph. No other module of the harness captures."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch.cuda.streams import Stream

from loragate.execution.streams.model import is_modelled

T = TypeVar("T")

_IS_WARMING_UP = ContextVar("loragate_is_warming_up", default=False)


@dataclass(frozen=True, slots=True)
class Captured(Generic[T]):
    """`result` is what the last captured call returned; each replay overwrites its memory."""

    graph: torch.cuda.CUDAGraph
    result: T


def capture(
    call: Callable[[], T],
    *,
    warm_ups: int = 3,
    calls: int = 1,
    pool: Any = None,
    is_kept: bool = False,
) -> Captured[T]:
    """A graph of `calls` calls, captured after `warm_ups` calls that compile what they need.

    With `warm_ups` 0 the caller must have run `call` before. Whatever is still queued on the device
    is finished before the capture begins. Graphs of one `pool`, a handle of torch, share their
    memory, so that the results of one end with the next replay of another; without it every graph
    has its own. With `is_kept` torch keeps its nodes, and instantiates it at its first replay.
    """
    warm_up(call, warm_ups)
    graph = torch.cuda.CUDAGraph(keep_graph=is_kept)
    with _uncollected(), torch.cuda.graph(graph, pool=pool, stream=_stream_of_captures()):
        for _ in range(calls - 1):
            call()
        result = call()
    return Captured(graph, result)


def warm_up(call: Callable[[], object], times: int = 3) -> None:
    """Call it on the stream of the captures, as torch requires it before one."""
    stream, token = _stream_of_captures(), _IS_WARMING_UP.set(True)
    try:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(times):
                call()
        torch.cuda.current_stream().wait_stream(stream)
    finally:
        _IS_WARMING_UP.reset(token)


def is_warming_up() -> bool:
    """Whether what is called now is called before a capture, and no result is kept."""
    return _IS_WARMING_UP.get()


def _stream_of_captures() -> Stream:
    """One for each device. torch hands out 32 streams in turn: were there a new one for the warm-up
    of every capture, a subject would get that of the captures as its side stream before long, and
    its graph would run in sequence."""
    if is_modelled():
        # no two of them are the same
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return _stream_of(torch.cuda.current_device())


@cache
def _stream_of(device: int) -> Stream:
    return Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _uncollected() -> Iterator[None]:
    """The collector may find an earlier graph, and a capture fails where a graph is destroyed."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
