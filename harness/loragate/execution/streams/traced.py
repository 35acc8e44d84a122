"""Steps of a trial on streams: those of the device, or modelled ones where there is none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from loragate.execution.graph import capture
from loragate.execution.session import Session, base_of, host_tensors
from loragate.execution.streams.model import MODULE, current_number, modelled_streams
from loragate.execution.streams.recorder import Recorder
from loragate.inputs import DataKind, copy_batch, make_batch, make_pool
from loragate.inputs.placement import whole
from loragate.matrix.case import Execution, Streams
from loragate.protocol import Batch, Pool, Trial, apply_step, subject_code

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


def streams_of(trial: Trial, recorder: Recorder | None = None) -> AbstractContextManager[object]:
    """Until it is left, a case of dual streams has streams, also on a machine without a GPU."""
    # a generator would not do: it assigns to what is raised within, and an error may refuse that
    with ExitStack() as stack:
        if trial.machine.device == "cpu" and trial.case.streams is Streams.DUAL:
            stack.enter_context(modelled_streams(recorder))
            if trial.capabilities.streams_from is not None:
                stack.enter_context(trial.capabilities.streams_from(MODULE))
        return stack.pop_all()


def steps_of(trial: Trial) -> list[Batch]:
    """The batches of all steps."""
    return [make_batch(trial.case, trial.seed, s, KIND, trial.machine) for s in range(STEPS)]


def traced_steps(
    trial: Trial,
    *,
    replays: bool = False,
    as_server: bool = False,
    before_call: Callable[[int], None] | None = None,
) -> TracedSteps:
    """Several steps of one fresh instance in the same memory, recorded as a server would queue
    them: the next step may start before the host has seen the result of the one before.
    `before_call` is called with the number of each operator and each launch before it is queued.
    With `as_server` they are followed by what else a server queues without waiting: loads, more
    steps, and on modelled streams steps that replay a graph. There, a case of graphs runs its other
    steps without one: a recorder sees the captures that it makes."""
    if trial.machine.device == "cpu":
        trial = replace(trial, case=replace(trial.case, execution=Execution.EAGER))
    pool = make_pool(trial.case, trial.seed, KIND, trial.machine, trial.capabilities)
    base = base_of(trial, KIND)
    batches = steps_of(trial)
    recorder = _recorder(trial, replays=replays)
    if before_call is not None:
        recorder.before_call = before_call
    with streams_of(trial, recorder):
        session = Session(trial, base, pool)
        recorder.tensors_behind = partial(_declared, trial, session)
        own = copy_batch(batches[0])
        recorder.name(_named(own))
        recorder.name(host_tensors(trial, session.instance), on_host=True)
        with _recorded(trial, recorder):
            results, bounds = [], []
            for batch in batches:
                recorder.name({"token_slots": batch.token_slots}, on_host=True)
                start = recorder.length
                results.append(_step(session, own, batch))
                bounds.append((start, recorder.length))
            if as_server:
                _serve(session, own, batches, pool)
                if trial.machine.device == "cpu":
                    _replay_steps(session, own, batches, recorder, pool)
    return TracedSteps(recorder, batches, results, bounds)


def sequential_results(trial: Trial) -> list[Tensor] | None:
    """The results of the same steps on one stream; None if the subject has no such form."""
    have = trial.capabilities.supports.get("streams", ())
    if Streams.SEQUENTIAL not in have:
        return None
    trial = replace(trial, case=replace(trial.case, streams=Streams.SEQUENTIAL))
    pool = make_pool(trial.case, trial.seed, KIND, trial.machine, trial.capabilities)
    session = Session(trial, base_of(trial, KIND), pool)
    batches = steps_of(trial)
    return [session.step(batch).clone() for batch in batches]


def queued_steps(trial: Trial, before_input: Callable[[], None]) -> list[Tensor]:
    """The results of the same steps on a device, queued without waiting and not recorded.
    `before_input` is called before the input of each step is queued."""
    pool = make_pool(trial.case, trial.seed, KIND, trial.machine, trial.capabilities)
    session = Session(trial, base_of(trial, KIND), pool)
    batches = steps_of(trial)
    own = copy_batch(batches[0])
    torch.cuda.synchronize()
    results = [_step(session, own, batch, before_input) for batch in batches]
    with subject_code():
        torch.cuda.synchronize()
    return results


def _recorder(trial: Trial, *, replays: bool) -> Recorder:
    if trial.machine.device == "cpu":
        return Recorder("cpu", current_number, replays=replays)
    from loragate.execution.streams.device import current_handle

    return Recorder("cuda", current_handle)


@contextmanager
def _recorded(trial: Trial, recorder: Recorder) -> Iterator[None]:
    if trial.machine.device == "cpu":
        with _interpreted(recorder), recorder:
            yield
        return
    from loragate.execution.streams.device import recorded_device

    # what was queued before is of no interest
    torch.cuda.synchronize()
    with recorded_device(recorder), recorder:
        yield
    with subject_code():
        torch.cuda.synchronize()


def _interpreted(recorder: Recorder) -> AbstractContextManager[Any]:
    """Records the launches of Triton, if Triton has been imported at all."""
    if "triton" not in sys.modules:
        return nullcontext()
    from loragate.execution.streams.interpreted import recorded_launches

    return recorded_launches(recorder)


def _declared(
    trial: Trial, session: Session, kernel: str, argument: str, table: Tensor
) -> Sequence[Tensor] | None:
    """The tensors whose addresses an argument holds, if the subject says so."""
    behind = trial.capabilities.pointer_tables.get((kernel, argument))
    if behind is None:
        return None
    with subject_code():
        return behind(session.instance.own, table)


def _serve(session: Session, own: Batch, batches: list[Batch], pool: Pool) -> None:
    """The same steps again, each behind a load into a slot whose adapter the step before has used:
    what takes turns in two buffers comes back to the first one."""
    for slot, batch in enumerate(batches):
        session.instance.load(slot % pool.num_slots, pool)
        _step(session, own, batch)
    session.instance.load(pool.num_slots - 1, pool)


def _replay_steps(
    session: Session, own: Batch, batches: list[Batch], recorder: Recorder, pool: Pool
) -> None:
    """A graph of a step in the memory of `own`, replayed once more than there are batches, each
    time behind a load."""
    captured = capture(partial(apply_step, session.instance, own), warm_ups=0)
    graph: Any = captured.graph
    if recorder.graphs.host_waited(graph.number):
        return
    for slot, batch in enumerate((*batches, batches[0])):
        session.instance.load(slot % pool.num_slots, pool)
        session.instance.prepare(batch.token_slots)
        _fill(own, batch)
        with subject_code():
            captured.graph.replay()
        captured.result.clone()


def _fill(own: Batch, batch: Batch) -> None:
    for name, tensor in _named(own).items():
        values = _named(batch)[name]
        if tensor is not None and values is not None:
            whole(tensor).copy_(whole(values))


def _step(
    session: Session, own: Batch, batch: Batch, before_input: Callable[[], None] = lambda: None
) -> Tensor:
    """One step in the memory of `own`, and a copy of its result."""

    def write_input() -> None:
        before_input()
        # a subject whose preparation waits for the device would have all that is older in order
        _fill(own, batch)

    # the mapping of each step has its own memory: a device tensor must not change under a step
    return session.queue(replace(own, token_slots=batch.token_slots), write_input).clone()


def _named(batch: Batch) -> dict[str, Tensor | None]:
    routes = batch.routes
    return {
        "x": batch.x,
        "out": batch.out,
        "topk_ids": None if routes is None else routes.topk_ids,
        "router weights": None if routes is None else routes.weights,
        "expert_map": None if routes is None else routes.expert_map,
    }
