"""Captures of one step under several mappings, as inventories.

Without a GPU the capture is that of modelled streams. Its launches are noted and not interpreted,
so that a capture costs next to nothing; one more is interpreted, for the bytes that each of its
kernels reads and writes.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from loragate.execution.graph import capture
from loragate.execution.session import base_of, host_tensors, open_loaded
from loragate.execution.specialisations import HostLaunch, noted_launches
from loragate.execution.streams.interpreted import recorded_launches
from loragate.execution.streams.model import current_number
from loragate.execution.streams.recorder import Recorder
from loragate.execution.streams.traced import streams_of
from loragate.execution.trace.captured import inventory_of
from loragate.execution.trace.inventory import Inventory
from loragate.execution.trace.operations import HOST, Launch, Operation
from loragate.inputs import DataKind, copy_batch, make_batch, make_pool
from loragate.inputs.mapping import BASE_ROW
from loragate.protocol import HotPath, Trial, apply_step, subject_code

_KIND = DataKind.EXACT
# what is prepared when a graph is captured
MAPPINGS = ("with adapters", "with base rows only", "with another mapping")


@dataclass(slots=True)
class Captures:
    """`kernels` are those that a step with adapters launches outside of a graph. `graphs` are those
    of one key, each captured with another mapping, by what was prepared; None: the host waited
    within, which no device captures. `ordered` is one whose accesses are exact. `recorded` are the
    same captures as operations, where `graphs` are real ones."""

    kernels: frozenset[str] = frozenset()
    graphs: dict[str, Inventory] | None = field(default_factory=dict)
    ordered: Inventory | None = None
    recorded: dict[str, Inventory] = field(default_factory=dict)


class Step:
    """One fresh instance and the memory of one step. `mappings`: those of `MAPPINGS` to prepare for
    a capture; one without adapters only where the subject promises that it does not matter."""

    def __init__(self, trial: Trial) -> None:
        batches = [make_batch(trial.case, trial.seed, s, _KIND, trial.machine) for s in range(2)]
        self._pool = make_pool(trial.case, trial.seed, _KIND, trial.machine, trial.capabilities)
        base = base_of(trial, _KIND)
        self.instance = open_loaded(trial, trial.case, base=base, pool=self._pool)
        self.own = copy_batch(batches[0])
        self._on_host = host_tensors(trial, self.instance)
        slots = [batch.token_slots for batch in batches]
        mappings = (slots[0], torch.full_like(slots[0], BASE_ROW), slots[1])
        self._mappings = dict(zip(MAPPINGS, mappings, strict=True))
        any_mapping = HotPath.CAPTURES_ANY_MAPPING in trial.capabilities.hot_path
        self.mappings = [
            how
            for how, mapping in self._mappings.items()
            if any_mapping or how == MAPPINGS[0] or bool((mapping != BASE_ROW).any())
        ]

    def prepare(self, recorder: Recorder, how: str = MAPPINGS[0]) -> None:
        with recorder.muted():
            self.own.token_slots.copy_(self._mappings[how])
        recorder.name({"token_slots": self.own.token_slots, **self._on_host}, on_host=True)
        self.instance.prepare(self.own.token_slots)

    def apply(self) -> Tensor:
        return apply_step(self.instance, self.own)

    def change(self, recorder: Recorder) -> None:
        """Evict an adapter, load it again, and prepare another step."""
        self.instance.unload(0)
        self.instance.load(0, self._pool)
        self.prepare(recorder)


def modelled_captures(trial: Trial) -> Captures:
    """On modelled streams, for a case that has them."""
    recorder, found = Recorder("cpu", current_number), Captures()
    with streams_of(trial, recorder):
        step = Step(trial)
        with _interpreted(recorder), recorder:
            step.prepare(recorder)
            # whatever is made on first use is not to be captured
            step.apply()
            ordered = _modelled(recorder, step)
        if recorder.graphs.host_waited(ordered.number):
            return replace(found, graphs=None)
        captures, grids = dict[str, RecordedCapture](), dict[int, tuple[int, ...]]()
        with _noted(recorder, grids), recorder:
            step.prepare(recorder)
            start = recorder.length
            step.apply()
            found.kernels = _kernels(recorder, [index for index in grids if index >= start])
            for how in step.mappings:
                step.prepare(recorder, how)
                captures[how] = _modelled(recorder, step)
            step.change(recorder)
        gc.collect()
        found.graphs = {how: _inventory(each, grids) for how, each in captures.items()}
        found.ordered = _inventory(ordered, {})
    return found


class RecordedCapture:
    """One capture of a step, whose result is held as a server holds it. `current` gives the current
    stream, and `number` what the recorder calls a graph."""

    def __init__(
        self,
        recorder: Recorder,
        step: Step,
        current: Callable[[], int],
        number: Callable[[Any], int],
        *,
        is_kept: bool = False,
    ) -> None:
        self._recorder = recorder
        self._stream, self.start, self._stop = HOST, 0, 0

        def call() -> Tensor:
            self._stream = current()
            self.start = recorder.length
            result = step.apply()
            self._stop = recorder.length
            return result

        with subject_code():
            self._captured = capture(call, warm_ups=0, is_kept=is_kept)
        self.graph: Any = self._captured.graph
        self.number = number(self.graph)

    def operations(self) -> list[Operation]:
        return self._recorder.operations(range(self.start, self._stop))

    def inventory(
        self, operations: Sequence[Operation], grids: Mapping[int, tuple[int, ...]], own: list[int]
    ) -> Inventory:
        """As far as memory is held by somebody now. `operations` are those of the capture, `grids`
        those of launches by their place among them; `own`: more blocks that are the graph's."""
        blocks = self._recorder.blocks.all
        return inventory_of(
            operations,
            self._stream,
            grids=grids,
            own=[*own, *(b.number for b in blocks.values() if b.graph == self.number)],
            alive=(b.number for b in blocks.values() if not b.weak.expired()),  # type: ignore[no-untyped-call]
            block_names={number: block.name for number, block in blocks.items()},
        )


def _modelled(recorder: Recorder, step: Step) -> RecordedCapture:
    return RecordedCapture(recorder, step, current_number, lambda graph: int(graph.number))


def _inventory(captured: RecordedCapture, grids: Mapping[int, tuple[int, ...]]) -> Inventory:
    """`grids` are those of launches by their number in the trace."""
    shifted = {index - captured.start: grid for index, grid in grids.items()}
    return captured.inventory(captured.operations(), shifted, [])


def _kernels(recorder: Recorder, launches: Iterable[int]) -> frozenset[str]:
    found = (recorder.operations(range(index, index + 1))[0] for index in launches)
    return frozenset(op.name for op in found if isinstance(op, Launch))


@contextmanager
def _interpreted(recorder: Recorder) -> Iterator[None]:
    with ExitStack() as stack:
        if "triton" in sys.modules:
            stack.enter_context(recorded_launches(recorder))
        yield


@contextmanager
def _noted(recorder: Recorder, grids: dict[int, tuple[int, ...]]) -> Iterator[None]:
    """Launches are operations that use all of their tensors, and are not done."""

    def note(launch: HostLaunch) -> None:
        recorder.note_freed()
        used = [(tensor, False, name) for name, tensor in launch.tensors]
        recorder.launch(launch.kernel, recorder.accesses(used, recorder.current()))
        # memory that was freed has become an operation of its own
        grids[recorder.length - 1] = launch.grid

    with ExitStack() as stack:
        if "triton" in sys.modules:
            stack.enter_context(noted_launches(note, lambda launch: None))
        yield
