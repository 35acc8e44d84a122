"""Capture of calls into a CUDA graph: the only place of the harness that captures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Captured(Generic[T]):
    """`result` is what the last captured call returned; each replay writes its memory anew."""

    graph: torch.cuda.CUDAGraph
    result: T


def capture(call: Callable[[], T], *, warm_ups: int = 3, calls: int = 1) -> Captured[T]:
    """A graph of `calls` calls, after as many uncaptured ones as compile all that they need.

    Without `warm_ups` the caller has run what is captured before.
    """
    # torch asks for another stream than the default one, on which nothing can be captured
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls - 1):
            call()
        result = call()
    return Captured(graph, result)
