"""Real streams: what torch reports of events and syncs, and the launches of compiled kernels.

torch reports through callbacks that cannot be taken back: they are registered once, and pass on
what they get to the recorder of the moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.cuda import _gpu_trace

from loragate.execution.streams.arguments import tensors_of
from loragate.execution.streams.recorder import Recorder
from loragate.execution.trace.operations import Access
from loragate.execution.trace.ttir import pointer_use, waits_of


def current_handle() -> int:
    """The current stream, as the callbacks of torch name it."""
    return int(torch.cuda.current_stream().cuda_stream)


@contextmanager
def recorded_device(recorder: Recorder) -> Iterator[None]:
    """Within, streams, events, syncs and compiled kernels are operations of the recorder.

    A capture counts as if the graph ran where it is captured, and as finished at its end; each of
    its launches repeats what was captured.
    """
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    _listen()
    run, keep = JITFunction.run, Tensor.record_stream
    launcher_of = CompiledKernel.__getitem__
    graphs = torch.cuda.CUDAGraph
    begin, end, replay = graphs.capture_begin, graphs.capture_end, graphs.replay

    def launched(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        is_seen = not (warmup or recorder.is_muted)
        if is_seen:
            recorder.next_call()
        compiled = run(kernel, *args, grid=grid, warmup=warmup, **options)
        if is_seen and compiled is not None:
            names = kernel.fn.__name__, kernel.arg_names
            _record_kernel(recorder, names, compiled, args, options)
        return compiled

    def launcher(compiled: Any, grid: Any) -> Callable[..., None]:
        """Of a kernel whose compiled form the caller keeps, which skips JITFunction.run."""
        launch = launcher_of(compiled, grid)

        def launched_compiled(*args: Any, **options: Any) -> None:
            is_seen = not recorder.is_muted
            if is_seen:
                recorder.next_call()
            launch(*args, **options)
            if is_seen:
                names = _names_of(compiled, len(args))
                # unlike a function, it may be given the stream
                _record_kernel(recorder, names, compiled, args, {}, stream=options.get("stream"))

        return launched_compiled

    def began(graph: Any, *args: Any, **options: Any) -> None:
        begin(graph, *args, **options)
        recorder.graphs.begin_capture(id(graph))

    def captured(graph: Any) -> None:
        end(graph)
        recorder.graphs.end_capture(id(graph))

    def replayed(graph: Any) -> None:
        replay(graph)
        recorder.graphs.launch(id(graph))

    def kept(tensor: Tensor, stream: Any) -> None:
        with recorder.muted():
            keep(tensor, stream)
        recorder.keep(tensor, int(stream.cuda_stream))

    with ExitStack() as stack:
        stack.enter_context(patch.object(JITFunction, "run", launched))
        stack.enter_context(patch.object(CompiledKernel, "__getitem__", launcher))
        stack.enter_context(patch.object(graphs, "capture_begin", began))
        stack.enter_context(patch.object(graphs, "capture_end", captured))
        stack.enter_context(patch.object(graphs, "replay", replayed))
        stack.enter_context(patch.object(Tensor, "record_stream", kept))
        stack.enter_context(patch.object(_LISTENER, "recorder", recorder))
        yield


class _Listener:
    """Passes reports on. A handle may belong to one event after another: each has its number."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self._numbers: dict[int, int] = {}
        self._created = 0

    def create(self, event: int, *_: Any) -> None:
        self._created += 1
        self._numbers[event] = self._created

    def record(self, event: int, stream: int, *_: Any) -> None:
        if self.recorder is not None:
            self.recorder.record(self._number(event), stream)

    def wait(self, event: int, stream: int, *_: Any) -> None:
        if self.recorder is not None:
            self.recorder.wait(self._number(event), stream)

    def sync_device(self, *_: Any) -> None:
        if self.recorder is not None:
            self.recorder.sync()

    def sync_stream(self, stream: int, *_: Any) -> None:
        if self.recorder is not None:
            self.recorder.sync(stream=stream)

    def sync_event(self, event: int, *_: Any) -> None:
        if self.recorder is not None:
            self.recorder.sync(event=self._number(event))

    def _number(self, event: int) -> int:
        if event not in self._numbers:
            self.create(event)
        return self._numbers[event]


_LISTENER = _Listener()


@cache
def _listen() -> None:
    torch._C._activate_gpu_trace()
    registered: tuple[tuple[Callable[[Any], None], Callable[..., None]], ...] = (
        (_gpu_trace.register_callback_for_event_creation, _LISTENER.create),
        (_gpu_trace.register_callback_for_event_record, _LISTENER.record),
        (_gpu_trace.register_callback_for_event_wait, _LISTENER.wait),
        (_gpu_trace.register_callback_for_device_synchronization, _LISTENER.sync_device),
        (_gpu_trace.register_callback_for_stream_synchronization, _LISTENER.sync_stream),
        (_gpu_trace.register_callback_for_event_synchronization, _LISTENER.sync_event),
    )
    for register, callback in registered:
        register(callback)


def _names_of(compiled: Any, num_args: int) -> tuple[str, Sequence[str]]:
    """The names of a kernel and of its arguments, which one that was compiled from Triton's IR
    does not have."""
    function = getattr(compiled.src, "fn", None)
    if function is None:
        return compiled.name, [f"argument {number}" for number in range(num_args)]
    return function.fn.__name__, function.arg_names


def _record_kernel(
    recorder: Recorder,
    names: tuple[str, Sequence[str]],
    compiled: Any,
    args: tuple[Any, ...],
    options: dict[str, Any],
    *,
    stream: int | None = None,
) -> None:
    """stream: its handle; None is the current one."""
    called, arg_names = names
    stream = recorder.current() if stream is None else stream
    if "ttir" not in compiled.asm:
        # it was compiled from a later IR
        recorder.note_unknown(called, [name for name, _ in tensors_of(arg_names, args, options)])
        return
    use = pointer_use(compiled.asm["ttir"])
    recorder.note_unknown(called, use.by_value)
    direct = ((False, use.reads), (True, use.writes))
    through = ((False, use.through_reads), (True, use.through_writes))
    early = {False: use.early_reads, True: use.early_writes}
    accesses: list[Access] = []
    for number, (name, tensor) in enumerate(tensors_of(arg_names, args, options)):
        used = [(tensor, is_write, name) for is_write, numbers in direct if number in numbers]
        for is_write, numbers in through:
            if number in numbers:
                behind = recorder.tensors_behind(called, name, tensor)
                used += [(found, is_write, f"behind {name}") for found in behind or ()]
                recorder.note_unknown(called, [name] if behind is None else [])
        accesses += [
            replace(access, is_early=number in early[access.is_write])
            for access in recorder.accesses(used, stream)
        ]
    waits = waits_of(compiled.asm["ttir"])
    recorder.launch(called, accesses, stream=stream, waits=waits)
