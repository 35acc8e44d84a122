"""What the host does in a step: waits for the device, allocations, and the buffers that it passes.

Only what the host asks for is of interest. In the interpreter a launch is therefore noted and not
done, except in a step that is to leave valid tables behind.
"""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from loragate.execution.kernel_compiles import kernels_compiled
from loragate.execution.specialisations import HostLaunch, noted_launches
from loragate.execution.streams.memory import Block
from loragate.execution.streams.operators import used_by
from loragate.execution.streams.recorder import Recorder
from loragate.execution.streams.stacks import stack_here
from loragate.execution.trace.operations import HOST, Access, Launch, Stack, Sync
from loragate.execution.trace.spans import Spans
from loragate.protocol import Batch, CheckedInstance, apply_step

# an operation, and what it calls one of its tensors
Use: TypeAlias = tuple[str, str]
Variant: TypeAlias = Mapping[str, Hashable]


@dataclass(slots=True)
class HostWork:
    """Of one step. What waited for the device, in `prepare` and in `apply`, with the stack of each.
    `allocated`: blocks that `apply` got and did not return. `used`: what it used of all others, and
    by which line; of a step that warms up, also what it got and keeps.
    `variants`: by kernel, what its launches would be compiled for; `compiled`: kernels that Triton
    did compile. `unseen`: how often `apply` asked the allocator of a GPU for memory that no
    operator had as a result."""

    waits_in_prepare: list[tuple[str, Stack]] = field(default_factory=list)
    waits_in_apply: list[tuple[str, Stack]] = field(default_factory=list)
    allocated: list[Block] = field(default_factory=list)
    used: dict[Use, dict[int, Stack]] = field(default_factory=dict)
    variants: dict[str, list[Variant]] = field(default_factory=dict)
    compiled: list[str] = field(default_factory=list)
    unseen: int = 0


class HostRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Knows a wait of the host by what caused it as well."""

    def __init__(self, device: str, current: Callable[[], int]) -> None:
        super().__init__(device, current)
        self.waits: list[tuple[str, Stack]] = []

    def sync(self, *, stream: int | None = None, event: int | None = None) -> None:
        super().sync(stream=stream, event=event)
        what = "an event" if event is not None else "a stream" if stream is not None else "all work"
        self.waits.append((f"waits for {what}", stack_here()))

    def _operator(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]
    ) -> Any:
        start = self.length
        result = super()._operator(func, args, kwargs, call)
        name = str(func.overloadpacket.__name__)
        synced = (op for op in self.operations(range(start, self.length)) if isinstance(op, Sync))
        if any(op.stream != HOST for op in synced) or self._uploads(func, args, kwargs, result):
            self.waits.append((name, stack_here()))
        return result

    def _uploads(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> bool:
        """Whether an operator copies between the device and memory of the host that is not pinned,
        which waits also where it is asked not to; without a GPU no memory is pinned."""
        if func.overloadpacket.__name__ not in ("copy_", "_to_copy"):
            return False
        used = [tensor for tensor, _, _ in used_by(func, args, kwargs)] + [result]
        # nothing is copied of a tensor without elements
        tensors = [tensor for tensor in used if tensor.numel()]
        sides = {self._is_on_host(tensor): tensor for tensor in tensors}
        if len(sides) < 2:
            return False
        if self.blocks.device == "cpu":
            return not (kwargs.get("non_blocking", False) or args[2:3] == (True,))
        return not sides[True].is_pinned()

    def _is_of_host(self, tensors: list[Tensor], accesses: tuple[Access, ...]) -> bool:
        # what is computed from a tensor without elements is known
        known = not accesses and any(not tensor.numel() for tensor in tensors)
        return known or super()._is_of_host(tensors, accesses)

    def _spans(self, tensor: Tensor) -> Spans:
        # blocks are enough here, and a view of many experts has tens of thousands of spans
        return ()

    def _is_on_host(self, tensor: Tensor) -> bool:
        block = self._block(tensor, self.current(), name="a tensor")
        return block is not None and block.on_host


def host_work(
    recorder: HostRecorder, instance: CheckedInstance, batch: Batch, *, is_run: bool, warms_up: bool
) -> HostWork:
    """One step of an instance. Without `is_run` the interpreter does no launch: whatever they would
    write is then left as it was. A step that warms up may allocate the buffers of later ones."""
    work, variants = HostWork(), defaultdict[str, list[Variant]](list)
    recorder.name({"token_slots": batch.token_slots}, on_host=True)
    recorder.waits.clear()
    with _recorded(recorder, variants, is_run=is_run), _compiles(work.compiled), recorder:
        instance.prepare(batch.token_slots)
        work.waits_in_prepare = list(recorder.waits)
        recorder.waits.clear()
        start, first_block, asked = recorder.length, len(recorder.blocks.all), _asked(batch.x)
        result = apply_step(instance, batch)
        asked = _asked(batch.x) - asked
    work.waits_in_apply = list(recorder.waits)
    fresh = [
        block
        for number, block in recorder.blocks.all.items()
        if number >= first_block and block.is_fresh and not block.on_host
    ]
    work.unseen = max(0, asked - len(fresh))
    returned = recorder.blocks.of(result, recorder.current(), name="result")
    work.allocated = [block for block in fresh if block is not returned]
    # a result that only the caller holds is no buffer
    del result
    if warms_up and any(map(is_held, fresh)):
        # what only a cycle of references holds is no buffer either
        gc.collect()
    left_out = {block.number for block in fresh if not (warms_up and is_held(block))}
    work.used = _used(recorder, start, left_out)
    work.variants = dict(variants)
    return work


@contextmanager
def _compiles(names: list[str]) -> Iterator[None]:
    """Collects what Triton compiles, if it has been imported at all."""
    with ExitStack() as stack:
        if "triton" in sys.modules:
            stack.enter_context(kernels_compiled(names))
        yield


@contextmanager
def _recorded(
    recorder: HostRecorder, variants: defaultdict[str, list[Variant]], *, is_run: bool
) -> Iterator[None]:
    def note(launch: HostLaunch) -> None:
        recorder.note_freed()
        variants[launch.kernel].append(launch.compiled_for)
        used = [(tensor, False, name) for name, tensor in launch.tensors]
        recorder.launch(launch.kernel, recorder.accesses(used, recorder.current()))

    def run(launch: Callable[[], Any]) -> None:
        if is_run:
            with recorder.muted():
                launch()

    with ExitStack() as stack:
        if recorder.blocks.device == "cuda":
            from loragate.execution.streams.device import recorded_device

            stack.enter_context(recorded_device(recorder))
        elif "triton" in sys.modules:
            stack.enter_context(noted_launches(note, run))
        yield


def is_held(block: Block) -> bool:
    return not block.weak.expired()  # type: ignore[no-untyped-call]


def _used(recorder: Recorder, start: int, left_out: set[int]) -> dict[Use, dict[int, Stack]]:
    """What operations from `start` on used, but for some blocks, and who asked for it first."""
    used: defaultdict[Use, dict[int, Stack]] = defaultdict(dict)
    for operation in recorder.operations(range(start, recorder.length)):
        if isinstance(operation, Launch) and operation.stream != HOST:
            for place, access in enumerate(operation.accesses):
                if access.block not in left_out:
                    name = access.name or f"tensor {place}"
                    blocks = used[operation.name, name]
                    blocks.setdefault(access.block, operation.stack)
    return dict(used)


def _asked(like: Tensor) -> int:
    """How often memory was asked for on a GPU."""
    if like.device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(like.device).get("allocation.all.allocated", 0))
