"""How the steps of an instance are run: one class for each execution of the matrix.

A new execution is a class with `run` and an entry in RUNNERS. Where there is no GPU, graphs are
modelled: see streams/modelled_graphs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from loragate.execution.graph import Captured, capture, warm_up
from loragate.inputs import copy_batch
from loragate.inputs.mapping import BASE_ROW
from loragate.inputs.placement import whole
from loragate.matrix.case import Execution
from loragate.protocol import AnyInstance, Batch, apply_step, subject_code

WriteInput: TypeAlias = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Graphs:
    """How a subject is captured. Within `context()` the names of torch.cuda capture and replay.
    `of_base_rows`: whether a capture may also be made while no row has an adapter."""

    context: Callable[[], AbstractContextManager[object]]
    of_base_rows: bool


class Runner(Protocol):
    """Runs the steps of one instance, whose state lives from step to step."""

    def run(self, batch: Batch, write_input: WriteInput | None = None) -> Tensor:
        """Prepare and run one step; the device may still be busy with it. An in-place site
        changes `batch.out` and returns it; nothing else of the batch may change. `write_input`
        queues what the step reads, behind its preparation: there a server has the layers before."""


class EagerRunner:
    def __init__(self, instance: AnyInstance, graphs: Graphs) -> None:
        self._instance = instance

    def run(self, batch: Batch, write_input: WriteInput | None = None) -> Tensor:
        self._instance.prepare(batch.token_slots)
        if write_input is not None:
            write_input()
        return apply_step(self._instance, batch)


class GraphRunner:
    """Captures the operation once for each shape while ANOTHER mapping is prepared (every token the
    first experts, and every row slot 0, or at each second capture no slot where the subject allows
    that), then replays it with that of the step. Whatever the capture freezes - a grid, a host-side
    early exit, an address - is then wrong for the step (sglang #28371, vllm #15090, #43314).
    """

    def __init__(self, instance: AnyInstance, graphs: Graphs) -> None:
        self._instance, self._graphs = instance, graphs
        # the batch whose memory the captured step reads and writes, and the capture
        self._captures: dict[tuple[object, ...], tuple[Batch, Captured[Tensor]]] = {}
        # all graphs share their memory, as those of a server do
        self._pool: Any = None

    def run(self, batch: Batch, write_input: WriteInput | None = None) -> Tensor:
        key = (batch.x.shape, batch.x.stride(), batch.out.stride())
        if key not in self._captures:
            self._captures[key] = self._capture(batch)
        static, captured = self._captures[key]
        in_place = captured.result.data_ptr() == static.out.data_ptr()
        if not in_place:
            # of what the graph does not write nothing may be right by chance
            captured.result.fill_(float("nan"))
        tensors = list(zip(_tensors(static), _tensors(batch), strict=True))
        self._instance.prepare(batch.token_slots)
        if write_input is not None:
            write_input()
        for inside, own in tensors:
            whole(inside).copy_(whole(own))
        with self._graphs.context(), subject_code():
            captured.graph.replay()
        # guard bands and inputs come back too: what the graph did to them must be seen
        for inside, own in tensors:
            whole(own).copy_(whole(inside))
        return batch.out if in_place else captured.result.clone()

    def _capture(self, batch: Batch) -> tuple[Batch, Captured[Tensor]]:
        static = copy_batch(batch)
        self._instance.prepare(torch.zeros_like(batch.token_slots))
        if static.routes is not None:
            ids = static.routes.topk_ids
            ids.copy_(torch.arange(ids.shape[1]).expand_as(ids))
        # an operation that cannot be captured may show only when the capture ends
        step = partial(apply_step, self._instance, static)
        with self._graphs.context(), subject_code():
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            if not (self._graphs.of_base_rows and len(self._captures) % 2):
                return static, capture(step, pool=self._pool)
            # a step of base rows may lack the kernels of adapters, which must be compiled by then
            warm_up(step)
            self._instance.prepare(torch.full_like(batch.token_slots, BASE_ROW))
            return static, capture(step, warm_ups=0, pool=self._pool)


RUNNERS: Mapping[Execution, Callable[[AnyInstance, Graphs], Runner]] = MappingProxyType(
    {Execution.EAGER: EagerRunner, Execution.GRAPH: GraphRunner}
)


def _tensors(batch: Batch) -> list[Tensor]:
    """What a step reads and writes on the device."""
    tensors = [batch.x, batch.out]
    if batch.routes is not None:
        tensors.append(batch.routes.topk_ids)
        optional = (batch.routes.expert_map, batch.routes.weights)
        tensors += [tensor for tensor in optional if tensor is not None]
    return tensors
