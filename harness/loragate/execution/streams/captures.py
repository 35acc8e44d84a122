"""CUDA graphs in a trace: what their captures hold, and what each of their launches does."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from loragate.execution.trace.operations import HOST, Sync
from loragate.execution.trace.replays import launched

if TYPE_CHECKING:
    from loragate.execution.streams.recorder import Recorder


class Graphs:
    """What is captured counts as if it ran, and finished, within the capture; graphs are numbers.
    `stream_names` are those of streams that launches of graphs have for themselves, and `launches`
    counts these."""

    def __init__(self, recorder: Recorder) -> None:
        self.stream_names: dict[int, str] = {}
        self._recorder = recorder
        # by graph: the operations of its capture
        self._captures: dict[int, range] = {}
        self.launches = 0
        # no stream or event of the subject has such a number
        self._numbers = count(HOST - 1, -1)

    def begin_capture(self, graph: int) -> None:
        self._recorder.sync()
        self._recorder.blocks.graph = graph
        self._captures[graph] = range(self._recorder.length, self._recorder.length)

    def end_capture(self, graph: int) -> None:
        self._recorder.note_freed()
        self._recorder.blocks.graph = None
        self._captures[graph] = range(self._captures[graph].start, self._recorder.length)
        self._recorder.sync()

    def host_waited(self, graph: int) -> bool:
        """Whether the host waited for the device within the capture, which no device allows."""
        captured = self._recorder.operations(self._captures[graph])
        # what the host reads of its own memory waits for nothing
        return any(isinstance(op, Sync) and op.stream != HOST for op in captured)

    def launch(self, graph: int) -> None:
        """A graph that was captured is launched on the current stream."""
        recorder, captured = self._recorder, self._captures[graph]
        recorder.note_freed()
        operations, stream = recorder.operations(captured), recorder.current()
        repeated, streams = launched(operations, stream, self._numbers)
        self.launches += 1
        names = recorder.trace().stream_names
        for own, captured_on in streams.items():
            self.stream_names[own] = f"{names[captured_on]} of replay {self.launches}"
        for operation, index in repeated:
            recorder.repeat(operation, None if index is None else captured[index])
