"""CUDA graphs of one device: warm-up, capture, replay."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from lorakernels.runtime import streams

T = TypeVar("T")


def graph_module(device: torch.device) -> Any | None:
    """The module whose graphs a device has, None for a device without. Beside what
    `stream_module` says, its names `CUDAGraph`, `graph`, `graph_pool_handle` and `synchronize` mean
    what those of torch.cuda do."""
    return streams.stream_module(device)


@dataclass(frozen=True, slots=True)
class Captured(Generic[T]):
    """`result` is what the captured call returned; each replay writes it anew."""

    graph: Any
    result: T

    def replay(self) -> T:
        """Queue the graph on the current stream."""
        self.graph.replay()
        return self.result


class GraphPool:
    """Captures graphs that share one pool of memory, and must therefore never run side by side: the
    temporary results of one lie where those of another do."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device
        self._handle = module.graph_pool_handle()
        self._stream = module.Stream(device=device)

    def capture(self, call: Callable[[], T], *, warm_ups: int) -> Captured[T]:
        """A graph of one call, captured after some calls that compile what they need."""
        current = self._module.current_stream(self._device)
        # as torch requires it, the warm-up runs on the stream of the capture
        self._stream.wait_stream(current)
        try:
            with self._module.stream(self._stream):
                for _ in range(warm_ups):
                    call()
        finally:
            # also where a call raises: what it has queued writes the buffers of the next step
            current.wait_stream(self._stream)
        self._module.synchronize(self._device)
        graph = self._module.CUDAGraph()
        recording = self._module.graph(graph, pool=self._handle, stream=self._stream)
        # torch leaves the stream of a capture the current one where the capture cannot be ended,
        # as after an operation that none can hold
        with _uncollected(), self._module.stream(current), recording:
            result = call()
        return Captured(graph, result)


@contextmanager
def _uncollected() -> Iterator[None]:
    """A capture fails where a graph is destroyed, as the collector might do to an earlier one."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
