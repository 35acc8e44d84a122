"""Records what a step asks streams to do: ATen operators here, Triton launches by their hooks.

ATen operators are seen below autograd, with the bytes that their schema says they read and write:
all elements of their tensors, also where they use an index. A custom operator that is written in
Python is looked into; any other one is taken by its schema.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loragate.execution.streams.assigned import assigned_number, noticed_numbers
from loragate.execution.streams.captures import Graphs
from loragate.execution.streams.memory import Block, Blocks, spans_of
from loragate.execution.streams.operators import (
    Again,
    backend_of,
    host_waits,
    is_written_in_python,
    used_by,
)
from loragate.execution.streams.stacks import stack_here
from loragate.execution.trace.operations import (
    HOST,
    Access,
    Free,
    Launch,
    Operation,
    Record,
    Sync,
    Trace,
    Wait,
)
from loragate.execution.trace.spans import Spans
from loragate.execution.trace.waits import WAITS_FIRST, Waits


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`current` gives the number of the current stream. With `replays`, memory is kept alive and
    every launch can be done again: `replays[i]` is launch i of the trace.

    It is also the observer of modelled streams.
    """

    def __init__(self, device: str, current: Callable[[], int], *, replays: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks = Blocks(device, keep=replays)
        self.replays: dict[int, Callable[[], object]] = {}
        self.current = current
        # by the names of a kernel and of an argument that holds addresses, and that argument: the
        # tensors behind them, None if that was not declared
        self.tensors_behind: Callable[[str, str, Tensor], Sequence[Tensor] | None] = (
            lambda kernel, argument, table: None
        )
        # by kernel: arguments that hold addresses of memory which is not known
        self.unknown: defaultdict[str, set[str]] = defaultdict(set)
        # called with the number of each operator and each launch, before it is queued
        self.before_call: Callable[[int], None] = lambda number: None
        # launch of the trace -> number of its call
        self.calls: dict[int, int] = {}
        self._calls = 0
        self._operations: list[Operation] = []
        self._kept: defaultdict[int, set[int]] = defaultdict(set)
        self.graphs = Graphs(self)
        self._muted = False
        self._entered: list[ExitStack] = []

    def __enter__(self) -> Self:
        stack = ExitStack()
        # it is entered once more within an operator that is written in Python
        if not self._entered:
            stack.enter_context(noticed_numbers())
        self._entered.append(stack)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._entered.pop().close()

    @property
    def length(self) -> int:
        """How many operations have been recorded."""
        return len(self._operations)

    @property
    def number_of_calls(self) -> int:
        """How many operators and launches were about to be queued."""
        return self._calls

    def trace(self) -> Trace:
        names = {block.number: block.name for block in self.blocks.all.values()}
        streams = [s for s in self._streams() if s != HOST]
        called = {s: f"side stream {k}" if k else "main" for k, s in enumerate(streams)}
        return Trace(tuple(self._operations), names, {**called, **self.graphs.stream_names})

    def name(self, tensors: Mapping[str, Tensor | None], *, on_host: bool = False) -> None:
        """What reports call the memory of these tensors, which belongs to the current stream."""
        for name, tensor in tensors.items():
            if tensor is not None:
                self._block(tensor, self.current(), name=name, on_host=on_host)

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Within, nothing is recorded."""
        before, self._muted = self._muted, True
        try:
            yield
        finally:
            self._muted = before

    @property
    def is_muted(self) -> bool:
        return self._muted

    def on_host(self, tensor: Tensor, *, is_write: bool, name: str = "") -> None:
        """The host itself reads or writes a tensor."""
        self._launch(HOST, "host", self.accesses([(tensor, is_write, name)], HOST))

    def launch(
        self,
        name: str,
        accesses: Iterable[Access],
        replay: Callable[[], object] | None = None,
        *,
        stream: int | None = None,
        waits: Waits = WAITS_FIRST,
    ) -> None:
        """Work that was queued on a stream, the current one if none is given."""
        self.note_freed()
        stream = self.current() if stream is None else stream
        self._launch(stream, name, tuple(accesses), replay, waits)

    def accesses(self, used: Iterable[tuple[Tensor, bool, str]], stream: int) -> tuple[Access, ...]:
        """All elements of tensors that are read, or written, under a name."""
        found = []
        for tensor, is_write, name in used:
            block = self._block(tensor, stream, name=name or _described(tensor))
            if block is not None:
                found.append(Access(block.number, self._spans(tensor), is_write, name))
        return tuple(found)

    def note_unknown(self, kernel: str, arguments: Iterable[str]) -> None:
        """What a kernel accesses through these arguments cannot be judged."""
        for argument in arguments:
            self.unknown[kernel].add(argument)

    def next_call(self) -> None:
        """An operator or a launch is about to be queued."""
        self._calls += 1
        with self.muted():
            self.before_call(self._calls)

    # what streams and events are asked to do

    def record(self, event: int, stream: int) -> None:
        self.note_freed()
        self._operations.append(Record(event, stream))

    def wait(self, event: int, stream: int) -> None:
        self.note_freed()
        self._operations.append(Wait(event, stream, stack_here()))

    def sync(self, *, stream: int | None = None, event: int | None = None) -> None:
        self.note_freed()
        self._operations.append(Sync(stream, event))

    def keep(self, tensor: Tensor, stream: int) -> None:
        block = self._block(tensor, self.current(), name=_described(tensor))
        if block is not None:
            self._kept[block.number].add(stream)

    def note_freed(self) -> None:
        """Memory that nothing holds any more is free from here on."""
        for block in self.blocks.freed():
            # the allocator of pinned memory waits by itself, and a graph keeps what is its own
            if not block.on_host and block.graph in (None, self.blocks.graph):
                used_by = frozenset(self._kept.pop(block.number, ()))
                stack = stack_here()
                free = Free(block.number, block.stream, block.size, used_by, stack)
                self._operations.append(free)

    def repeat(self, operation: Operation, launch: int | None) -> None:
        """An operation of a replay. `launch`: that of the trace which is done again by it."""
        if launch is not None:
            self.calls[self.length] = self.calls[launch]
            again = self.replays.get(launch)
            if again is not None:
                self.replays[self.length] = again
                with self.muted():
                    again()
        self._operations.append(operation)

    def operations(self, numbers: range) -> list[Operation]:
        return self._operations[numbers.start : numbers.stop]

    # what operators do

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._muted:
            return func(*args, **kwargs)
        if func.namespace not in ("aten", "prim", "prims"):
            before = len(self._operations)
            with self:
                result = func.redispatch(backend_of(args, kwargs), *args, **kwargs)
            if len(self._operations) > before or is_written_in_python(func):
                return result
            # nothing of it was seen: its schema says what it does
            return self._operator(func, args, kwargs, lambda: result)
        return self._operator(func, args, kwargs, lambda: func(*args, **kwargs))

    def _operator(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]
    ) -> Any:
        name = str(func.overloadpacket.__name__)
        if name == "lift_fresh" and assigned_number(func, args) is not None:
            return call()
        self.note_freed()
        self.next_call()
        used = list(used_by(func, args, kwargs))
        # memory has to be known before it is written
        accesses = self.accesses(used, self.current())
        result = call()
        known = {tensor.untyped_storage()._cdata for tensor, _, _ in used}
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        on_host = self._is_of_host([*(tensor for tensor, _, _ in used), *outputs], accesses)
        stream = HOST if on_host else self.current()
        fresh = [t for t in outputs if t.untyped_storage()._cdata not in known]
        for tensor in fresh:
            described = f"result of {name}, {_facts(tensor)}"
            self._block(tensor, stream, name=described, is_fresh=True, on_host=on_host)
        is_allocation = name.startswith(("empty", "new_empty"))
        does_something = any(access.is_write for access in accesses) or not outputs or fresh
        if does_something and not is_allocation:
            written = self.accesses([(tensor, True, "") for tensor in fresh], stream)
            replay = Again(func, args, kwargs, outputs, fresh) if self.blocks.keep else None
            self._launch(stream, name, (*accesses, *written), replay)
        if host_waits(func, args, kwargs, [*(t for t, _, _ in used), *fresh]):
            self._operations.append(Sync(stream=stream))
        return result

    def _is_of_host(self, tensors: list[Tensor], accesses: tuple[Access, ...]) -> bool:
        """Whether the host does an operator by itself. A tensor without elements has no block."""
        if tensors and all(t.device.type != self.blocks.device for t in tensors):
            return True
        return bool(accesses) and all(self.blocks.all[a.block].on_host for a in accesses)

    def _launch(
        self,
        stream: int,
        name: str,
        accesses: tuple[Access, ...],
        replay: Callable[[], object] | None = None,
        waits: Waits = WAITS_FIRST,
    ) -> None:
        self.calls[len(self._operations)] = self._calls
        if replay is not None:
            self.replays[len(self._operations)] = replay
        self._operations.append(Launch(stream, name, accesses, stack_here(), waits))

    def _spans(self, tensor: Tensor) -> Spans:
        return spans_of(tensor)

    def _block(self, tensor: Tensor, stream: int, **facts: Any) -> Block | None:
        # keeping the content of a block is no work of the subject
        with self.muted():
            return self.blocks.of(tensor, stream, **facts)

    def _streams(self) -> list[int]:
        found = [op.stream for op in self._operations if isinstance(op, (Launch, Record, Wait))]
        return [stream for stream in dict.fromkeys(found) if stream not in self.graphs.stream_names]


def _described(tensor: Tensor) -> str:
    return f"a tensor, {_facts(tensor)}"


def _facts(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
