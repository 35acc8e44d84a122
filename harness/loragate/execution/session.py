"""One instance of a subject under the execution of its case; every oracle runs steps through it."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor

from loragate.execution.runners import RUNNERS, Graphs, WriteInput
from loragate.execution.streams.model import MODULE, modelled_streams
from loragate.execution.streams.modelled_graphs import ModelledGraphs
from loragate.inputs import DataKind, make_base, make_batch, make_pool
from loragate.inputs.base_experts import make_base_experts
from loragate.matrix.case import LAYER_SITES, Case, Site
from loragate.protocol import (
    BaseLayer,
    Batch,
    CheckedInstance,
    HotPath,
    Pool,
    Trial,
    subject_code,
)


def base_of(trial: Trial, kind: DataKind) -> BaseLayer | None:
    """The base layer where the site has one."""
    if trial.case.site is Site.MOE_LAYER:
        return make_base_experts(trial.case, trial.seed, kind, trial.machine)
    if trial.case.site not in LAYER_SITES:
        return None
    return make_base(trial.case, trial.seed, kind, trial.machine)


def inputs_of(trial: Trial, kind: DataKind) -> tuple[Pool, Batch, BaseLayer | None]:
    """The adapters, the first batch and the base layer of a trial."""
    pool = make_pool(trial.case, trial.seed, kind, trial.machine, trial.capabilities)
    batch = make_batch(trial.case, trial.seed, 0, kind, trial.machine)
    return pool, batch, base_of(trial, kind)


def open_loaded(trial: Trial, case: Case, *, base: BaseLayer | None, pool: Pool) -> CheckedInstance:
    """A fresh instance for `case`, with the adapters of a pool in all slots."""
    instance = trial.subject.open(case, trial.machine, base)
    for slot in range(pool.num_slots):
        instance.load(slot, pool)
    return instance


def host_tensors(trial: Trial, instance: CheckedInstance) -> dict[str, Tensor]:
    """What of an instance lies on the host beside a GPU, by names for a report; without a GPU the
    subject has to say so."""
    of_instance = trial.capabilities.host_tensors
    if of_instance is None or trial.machine.device != "cpu":
        return {}
    with subject_code():
        return {f"host tensor {n}": t for n, t in enumerate(of_instance(instance.own))}


def graphs_of(trial: Trial, instance: CheckedInstance) -> Graphs:
    """The graphs of the device of a trial; modelled ones on a machine without a GPU."""
    of_base_rows = HotPath.CAPTURES_ANY_MAPPING in trial.capabilities.hot_path
    if trial.machine.device != "cpu":
        return Graphs(nullcontext, of_base_rows)
    model = ModelledGraphs(host_tensors(trial, instance).values())
    streams_from = trial.capabilities.streams_from

    def modelled() -> AbstractContextManager[object]:
        with ExitStack() as stack:
            stack.enter_context(modelled_streams(model))
            if streams_from is not None:
                stack.enter_context(streams_from(MODULE))
            return stack.pop_all()

    return Graphs(modelled, of_base_rows)


class Session:
    """State lives from step to step, as in a server."""

    def __init__(self, trial: Trial, base: BaseLayer | None, pool: Pool | None = None) -> None:
        """A fresh instance; with `pool`, its adapters in all slots."""
        if pool is None:
            self.instance = trial.subject.open(trial.case, trial.machine, base)
        else:
            self.instance = open_loaded(trial, trial.case, base=base, pool=pool)
        self._runner = RUNNERS[trial.case.execution](self.instance, graphs_of(trial, self.instance))

    def queue(self, batch: Batch, write_input: WriteInput | None = None) -> Tensor:
        """As `step`, but the device may still be busy with it. `write_input`: as of a Runner."""
        return self._runner.run(batch, write_input)

    def step(self, batch: Batch, write_input: WriteInput | None = None) -> Tensor:
        """Prepare and run one step to its end. An in-place site changes `batch.out` and
        returns it; nothing else of the batch may change. `write_input`: as of a Runner."""
        result = self.queue(batch, write_input)
        if batch.x.device.type == "cuda":
            with subject_code():
                torch.cuda.synchronize()
        return result
