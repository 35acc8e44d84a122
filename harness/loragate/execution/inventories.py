"""Captures of one step under several mappings, as inventories.

Without a GPU the capture is that of modelled streams. Its launches are noted and not interpreted,
so that a capture costs next to nothing; one more is interpreted, for the bytes that each of its
kernels reads and writes.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from loragate.execution.graph import capture
from loragate.execution.session import base_of, open_loaded
from loragate.execution.specialisations import HostLaunch, noted_launches
from loragate.execution.streams.interpreted import recorded_launches
from loragate.execution.streams.model import current_number
from loragate.execution.streams.recorder import Recorder
from loragate.execution.streams.traced import streams_of
from loragate.execution.trace.captured import inventory_of
from loragate.execution.trace.inventory import Inventory
from loragate.execution.trace.operations import HOST, Launch
from loragate.inputs import DataKind, copy_batch, make_batch, make_pool
from loragate.inputs.mapping import BASE_ROW
from loragate.protocol import Batch, CheckedInstance, Trial, apply_step, subject_code

_KIND = DataKind.EXACT
# what is prepared when a graph is captured
MAPPINGS = ("with adapters", "with base rows only", "with another mapping")


@dataclass(slots=True)
class Captures:
    """`kernels` are those that a step with adapters launches outside of a graph. `graphs` are those
    of one key, each captured with another mapping, by what was prepared; `ordered` is one whose
    accesses are exact. None: the host waited within, which no device captures."""

    kernels: frozenset[str] = frozenset()
    graphs: dict[str, Inventory] | None = field(default_factory=dict)
    ordered: Inventory | None = None


def modelled_captures(trial: Trial) -> Captures:
    """On modelled streams, for a case that has them."""
    pool = make_pool(trial.case, trial.seed, _KIND, trial.machine, trial.capabilities)
    first, other = (make_batch(trial.case, trial.seed, s, _KIND, trial.machine) for s in range(2))
    recorder = Recorder("cpu", current_number)
    own, found = copy_batch(first), Captures()
    with streams_of(trial, recorder):
        instance = open_loaded(trial, trial.case, base=base_of(trial, _KIND), pool=pool)
        with _interpreted(recorder), recorder:
            _prepare(recorder, instance, own, first.token_slots)
            # whatever is made on first use is not to be captured
            apply_step(instance, own)
            ordered = _Capture(recorder, instance, own)
        if ordered.waited:
            return replace(found, graphs=None)
        captures, grids = dict[str, _Capture](), dict[int, tuple[int, ...]]()
        base_rows = torch.full_like(own.token_slots, BASE_ROW)
        mappings = (first.token_slots, base_rows, other.token_slots)
        with _noted(recorder, grids), recorder:
            _prepare(recorder, instance, own, first.token_slots)
            start = recorder.length
            apply_step(instance, own)
            found.kernels = _kernels(recorder, [index for index in grids if index >= start])
            for how, mapping in zip(MAPPINGS, mappings, strict=True):
                _prepare(recorder, instance, own, mapping)
                captures[how] = _Capture(recorder, instance, own)
            instance.unload(0)
            instance.load(0, pool)
            _prepare(recorder, instance, own, first.token_slots)
        gc.collect()
        found.graphs = {how: each.inventory(grids) for how, each in captures.items()}
        found.ordered = ordered.inventory({})
    return found


class _Capture:
    """One capture on modelled streams, which holds its result as a server does."""

    def __init__(self, recorder: Recorder, instance: CheckedInstance, own: Batch) -> None:
        self._recorder = recorder
        self._stream, self._start, self._stop = HOST, 0, 0

        def call() -> Tensor:
            self._stream = current_number()
            self._start = recorder.length
            result = apply_step(instance, own)
            self._stop = recorder.length
            return result

        with subject_code():
            self._captured = capture(call, warm_ups=0)
        graph: Any = self._captured.graph
        self._graph = int(graph.number)
        self.waited = recorder.graphs.host_waited(self._graph)

    def inventory(self, grids: dict[int, tuple[int, ...]]) -> Inventory:
        """As far as memory is held by somebody now."""
        recorder, blocks = self._recorder, self._recorder.blocks.all
        captured = recorder.operations(range(self._start, self._stop))
        return inventory_of(
            captured,
            self._stream,
            grids={index - self._start: grid for index, grid in grids.items()},
            own=(b.number for b in blocks.values() if b.graph == self._graph),
            alive=(b.number for b in blocks.values() if not b.weak.expired()),  # type: ignore[no-untyped-call]
            block_names={number: block.name for number, block in blocks.items()},
        )


def _prepare(recorder: Recorder, instance: CheckedInstance, own: Batch, mapping: Tensor) -> None:
    with recorder.muted():
        own.token_slots.copy_(mapping)
    recorder.name({"token_slots": own.token_slots}, on_host=True)
    instance.prepare(own.token_slots)


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
