"""Steps of a trial on streams: those of the device, or modelled ones where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from loragate.execution.session import Session, base_of
from loragate.execution.streams.model import MODULE, current_number, modelled_streams
from loragate.execution.streams.recorder import Recorder
from loragate.inputs import DataKind, copy_batch, make_batch, make_pool
from loragate.inputs.placement import whole
from loragate.matrix.case import Streams
from loragate.protocol import Batch, Trial

# data that need no rounding: equal bits whatever is summed in which order
KIND = DataKind.EXACT
# the second one overwrites the memory of the first
STEPS = 2


@dataclass(frozen=True, slots=True)
class TracedSteps:
    """`results` are copies that the main stream made of the result of each step; `bounds` are the
    first operation of each step and the one behind its last."""

    recorder: Recorder
    batches: list[Batch]
    results: list[Tensor]
    bounds: list[tuple[int, int]]


@contextmanager
def streams_of(trial: Trial, recorder: Recorder | None = None) -> Iterator[None]:
    """Within, a case of dual streams has streams, also on a machine without a GPU."""
    with ExitStack() as stack:
        if trial.machine.device == "cpu" and trial.case.streams is Streams.DUAL:
            stack.enter_context(modelled_streams(recorder))
            if trial.capabilities.streams_from is not None:
                stack.enter_context(trial.capabilities.streams_from(MODULE))
        yield


def traced_steps(trial: Trial, *, replays: bool = False) -> TracedSteps:
    """Several steps of one fresh instance in the same memory, recorded as a server would queue
    them: the next step may start before the host has seen the result of the one before."""
    pool = make_pool(trial.case, trial.seed, KIND, trial.machine, trial.capabilities)
    base = base_of(trial, KIND)
    batches = [make_batch(trial.case, trial.seed, s, KIND, trial.machine) for s in range(STEPS)]
    recorder = Recorder("cpu", current_number, replays=replays)
    with streams_of(trial, recorder):
        session = Session(trial, base, pool)
        own = copy_batch(batches[0])
        recorder.name(_named(own))
        with _recorded(recorder):
            results, bounds = [], []
            for batch in batches:
                recorder.name({"token_slots": batch.token_slots}, on_host=True)
                start = recorder.length
                results.append(_step(session, own, batch))
                bounds.append((start, recorder.length))
    return TracedSteps(recorder, batches, results, bounds)


def sequential_results(trial: Trial) -> list[Tensor] | None:
    """The results of the same steps on one stream; None if the subject has no such form."""
    have = trial.capabilities.supports.get("streams", ())
    if Streams.SEQUENTIAL not in have:
        return None
    trial = replace(trial, case=replace(trial.case, streams=Streams.SEQUENTIAL))
    pool = make_pool(trial.case, trial.seed, KIND, trial.machine, trial.capabilities)
    session = Session(trial, base_of(trial, KIND), pool)
    batches = [make_batch(trial.case, trial.seed, s, KIND, trial.machine) for s in range(STEPS)]
    return [session.step(batch).clone() for batch in batches]


@contextmanager
def _recorded(recorder: Recorder) -> Iterator[None]:
    with _interpreted(recorder), recorder:
        yield


def _interpreted(recorder: Recorder) -> AbstractContextManager[Any]:
    """Records the launches of Triton, if Triton has been imported at all."""
    import sys

    if "triton" not in sys.modules:
        return nullcontext()
    from loragate.execution.streams.interpreted import recorded_launches

    return recorded_launches(recorder)


def _step(session: Session, own: Batch, batch: Batch) -> Tensor:
    """One step in the memory of `own`, and a copy of its result."""
    for name, tensor in _named(own).items():
        values = _named(batch)[name]
        if tensor is not None and values is not None:
            whole(tensor).copy_(whole(values))
    # the mapping of each step has its own memory: a device tensor must not change under a step
    return session.queue(replace(own, token_slots=batch.token_slots)).clone()


def _named(batch: Batch) -> dict[str, Tensor | None]:
    routes = batch.routes
    return {
        "x": batch.x,
        "out": batch.out,
        "topk_ids": None if routes is None else routes.topk_ids,
        "router weights": None if routes is None else routes.weights,
        "expert_map": None if routes is None else routes.expert_map,
    }
