"""One instance of a subject under the execution of its case; every oracle runs steps through it.

GRAPH: the operation is captured once for each shape while ANOTHER mapping is prepared (every
row uses slot 0, every token the first experts), then replayed with that of the step. Whatever a
capture freezes - a grid, a host-side early exit, an address - is then wrong for the step
(sglang #28371, vllm #15090).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loragate.inputs import copy_batch, make_base
from loragate.inputs.base_experts import make_base_experts
from loragate.inputs.draw import DataKind
from loragate.inputs.placement import whole
from loragate.matrix.case import Execution, Site
from loragate.protocol import BaseLayer, Batch, Pool, Trial, apply_step

_WARM_UPS = 3


@dataclass(frozen=True, slots=True)
class _Capture:
    graph: torch.cuda.CUDAGraph
    # the captured step reads and writes this memory
    batch: Batch
    result: Tensor


def base_of(trial: Trial, kind: DataKind) -> BaseLayer | None:
    """The base layer where the site has one."""
    if trial.case.site is Site.MOE_LAYER:
        return make_base_experts(trial.case, trial.seed, kind, trial.machine)
    if trial.case.site is not Site.LORA_LINEAR:
        return None
    return make_base(trial.case, trial.seed, kind, trial.machine)


class Session:
    """State lives from step to step, as in a server."""

    def __init__(self, trial: Trial, base: BaseLayer | None, pool: Pool | None = None) -> None:
        """A fresh instance; with `pool`, its adapters in all slots."""
        self.trial = trial
        self.instance = trial.subject.open(trial.case, trial.machine, base)
        self._captures: dict[tuple[object, ...], _Capture] = {}
        if pool is not None:
            for slot in range(pool.num_slots):
                self.instance.load(slot, pool)

    def step(self, batch: Batch) -> Tensor:
        """Prepare and run one step to its end. An in-place site changes `batch.out` and
        returns it; nothing else of the batch may change."""
        if self.trial.case.execution is Execution.GRAPH:
            result = self._replay(batch)
        else:
            self.instance.prepare(batch.token_slots)
            result = apply_step(self.instance, batch)
        if batch.x.device.type == "cuda":
            torch.cuda.synchronize()
        return result

    def _replay(self, batch: Batch) -> Tensor:
        key = (batch.x.shape, batch.x.stride(), batch.out.stride())
        if key not in self._captures:
            self._captures[key] = self._capture(batch)
        captured = self._captures[key]
        pairs = list(zip(_tensors(captured.batch), _tensors(batch), strict=True))
        for static, own in pairs:
            whole(static).copy_(whole(own))
        self.instance.prepare(batch.token_slots)
        captured.graph.replay()
        # guard bands and inputs come back too: what the graph did to them must be seen
        for static, own in pairs:
            whole(own).copy_(whole(static))
        in_place = captured.result.data_ptr() == captured.batch.out.data_ptr()
        return batch.out if in_place else captured.result.clone()

    def _capture(self, batch: Batch) -> _Capture:
        static = copy_batch(batch)
        self.instance.prepare(torch.zeros_like(batch.token_slots))
        if static.routes is not None:
            ids = static.routes.topk_ids
            ids.copy_(torch.arange(ids.shape[1]).expand_as(ids))
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                apply_step(self.instance, static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = apply_step(self.instance, static)
        return _Capture(graph, static, result)


def _tensors(batch: Batch) -> list[Tensor]:
    """What a step reads and writes on the device."""
    tensors = [batch.x, batch.out]
    if batch.routes is not None:
        tensors.append(batch.routes.topk_ids)
        optional = (batch.routes.expert_map, batch.routes.weights)
        tensors += [tensor for tensor in optional if tensor is not None]
    return tensors
