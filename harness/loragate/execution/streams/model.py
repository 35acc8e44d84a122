"""Streams and events for a machine without a GPU: the public names of torch.cuda, with no device.

Work runs at once, in the order of the host; whoever observes learns what a device would have to
order. There is one model in a process, as there is one device: streams outlive what is run on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import count
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor

MAIN = 0

_numbers = count(1)


class Observer(Protocol):
    """Learns, in the order of the host, what streams and events are asked to do."""

    def record(self, event: int, stream: int) -> None: ...

    def wait(self, event: int, stream: int) -> None: ...

    def sync(self, *, stream: int | None = None, event: int | None = None) -> None:
        """The host waits for a stream, an event, or for everything."""

    def keep(self, tensor: Tensor, stream: int) -> None:
        """Tensor.record_stream."""

    @property
    def graphs(self) -> GraphObserver: ...


class GraphObserver(Protocol):
    """Learns, in the order of the host, what graphs are asked to do."""

    def begin_capture(self, graph: int) -> None: ...

    def end_capture(self, graph: int) -> None: ...

    def launch(self, graph: int) -> None:
        """On the current stream."""


class ModelEvent:
    """A torch.cuda.Event. Work is done when it is queued, so that it has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = next(_numbers)

    def record(self, stream: ModelStream | None = None) -> None:
        if _model.observer is not None:
            _model.observer.record(self.number, (stream or _model.current).number)

    def wait(self, stream: ModelStream | None = None) -> None:
        if _model.observer is not None:
            _model.observer.wait(self.number, (stream or _model.current).number)

    def synchronize(self) -> None:
        if _model.observer is not None:
            _model.observer.sync(event=self.number)

    def query(self) -> bool:
        # whoever is told that it has happened may rely on it
        self.synchronize()
        return True


class ModelStream:
    """A torch.cuda.Stream."""

    def __init__(
        self, device: object = None, priority: int = 0, *, number: int | None = None
    ) -> None:
        self.device = torch.device("cpu")
        self.priority = priority
        self.number = next(_numbers) if number is None else number
        self.stream_id = self.cuda_stream = self.number
        self._before: list[ModelStream] = []

    def record_event(self, event: ModelEvent | None = None) -> ModelEvent:
        event = event or ModelEvent()
        event.record(self)
        return event

    def wait_event(self, event: ModelEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: ModelStream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        if _model.observer is not None:
            _model.observer.sync(stream=self.number)

    def query(self) -> bool:
        self.synchronize()
        return True

    def __enter__(self) -> ModelStream:
        self._before.append(_model.current)
        _model.current = self
        return self

    def __exit__(self, *_: object) -> None:
        _model.current = self._before.pop()


class ModelGraph:
    """A torch.cuda.CUDAGraph. What is captured also runs, as a warm-up does; what a replay does is
    up to the observer."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.number = next(_numbers)

    def capture_begin(self, *_: Any, **__: Any) -> None:
        _model.is_capturing = True
        if _model.observer is not None:
            _model.observer.graphs.begin_capture(self.number)

    def capture_end(self) -> None:
        _model.is_capturing = False
        if _model.observer is not None:
            _model.observer.graphs.end_capture(self.number)

    def replay(self) -> None:
        if _model.observer is not None:
            _model.observer.graphs.launch(self.number)


class _Model:
    """The state of the model, and its functions by the names of torch.cuda."""

    Stream, Event, CUDAGraph = ModelStream, ModelEvent, ModelGraph

    def __init__(self) -> None:
        self.main = ModelStream(number=MAIN)
        self.current = self.main
        self.observer: Observer | None = None
        self.is_capturing = False

    def current_stream(self, device: object = None) -> ModelStream:
        return self.current

    def default_stream(self, device: object = None) -> ModelStream:
        return self.main

    def set_stream(self, stream: ModelStream) -> None:
        self.current = stream

    def device(self, device: object) -> AbstractContextManager[None]:
        return nullcontext()

    def current_device(self) -> int:
        return 0

    @contextmanager
    def stream(self, stream: ModelStream | None) -> Iterator[None]:
        with stream or self.current:
            yield

    def synchronize(self, device: object = None) -> None:
        if self.observer is not None:
            self.observer.sync()

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, next(_numbers))

    @contextmanager
    def graph(
        self, cuda_graph: ModelGraph, pool: object = None, stream: ModelStream | None = None
    ) -> Iterator[None]:
        self.synchronize()
        with stream or ModelStream():
            cuda_graph.capture_begin()
            try:
                yield
            finally:
                cuda_graph.capture_end()


_model = _Model()
# in place of a module such as torch.cuda
MODULE: Any = _model
_PATCHED = (
    "Stream",
    "Event",
    "device",
    "current_device",
    "stream",
    "current_stream",
    "default_stream",
    "set_stream",
    "synchronize",
    "is_current_stream_capturing",
    "CUDAGraph",
    "graph",
    "graph_pool_handle",
)


def modelled_streams(observer: Observer | None = None) -> AbstractContextManager[object]:
    """Until it is left, the names of torch.cuda mean the model, and the observer learns of its
    streams."""
    with ExitStack() as stack:
        for name in _PATCHED:
            stack.enter_context(patch.object(torch.cuda, name, getattr(_model, name)))
        stack.enter_context(patch.object(Tensor, "record_stream", _record_stream))
        stack.enter_context(patch.object(_model, "observer", observer or _model.observer))
        stack.enter_context(patch.object(_model, "current", _model.main))
        return stack.pop_all()


def is_modelled() -> bool:
    """Whether streams are modelled now, which may be so beside a GPU as well."""
    kind: object = torch.cuda.Stream
    return kind is ModelStream


def current_number() -> int:
    """The number of the model's current stream."""
    return _model.current.number


def _record_stream(tensor: Tensor, stream: ModelStream) -> None:
    if _model.observer is not None:
        _model.observer.keep(tensor, stream.number)
