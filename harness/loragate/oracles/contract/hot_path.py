"""A step that has been warmed up asks the host for nothing that a server cannot afford.

* It does not wait for the device: `apply` never, `prepare` where the subject promises it. A copy
  from memory of the host that is not pinned is a wait.
* `apply` allocates its result, and no more beside it than the subject says; none of that is kept.
* It uses the same buffers as a step before, whatever the batch is and whichever adapters were
  loaded or evicted: a captured graph has their addresses. The first step may allocate them. A step
  of base rows is compared with another one of base rows, because it may do without the kernels of
  adapters.
* It needs no other kernels than a step with adapters and one of base rows needed.

One step with adapters and one of base rows warm up; one with another mapping, one behind the
eviction and the reload of an adapter, and one of base rows follow in the same memory. Steps run
eagerly, also where a case captures them. Without a GPU the host is all that counts: launches of the
steps that follow are noted and not interpreted, and what a kernel would be compiled for is taken
from its arguments. A GPU shows in addition how often its allocator is asked: where a step changes
its output in place, never.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loragate.core.plural import counted
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.execution.host_work import HostRecorder, HostWork, host_work, is_held
from loragate.execution.session import base_of, host_tensors, open_loaded
from loragate.execution.streams.memory import Block
from loragate.execution.streams.model import current_number
from loragate.execution.streams.traced import streams_of
from loragate.execution.trace.operations import Stack
from loragate.inputs import DataKind, copy_batch, make_batch, make_pool
from loragate.inputs.mapping import BASE_ROW
from loragate.matrix.case import IN_PLACE_SITES, Base, Sharding
from loragate.oracles.evidence import passed
from loragate.protocol import HotPath as Promise
from loragate.protocol import Trial, subject_code

_KIND = DataKind.EXACT


@dataclass(frozen=True, slots=True)
class _Step:
    """`how` says when it is done; `warm_up`: later steps use its buffers and kernels; `kept`: what
    it allocated and is still there after all steps."""

    how: str
    has_adapters: bool
    work: HostWork
    warm_up: bool = False
    kept: tuple[Block, ...] = ()


class HotPath:
    name = OracleName.HOT_PATH

    def applies(self, trial: Trial) -> str | None:
        if not trial.capabilities.hot_path:
            return "the subject promises nothing about what the host does in a step"
        if trial.case.sharding is Sharding.RANK and trial.case.base is Base.CALLABLE:
            return "ranks that are simulated call their base layer again for each exchange"
        return None if trial.case.tokens else "the batch has no rows"

    def judge(self, trial: Trial) -> Judgement:
        recorder = _recorder(trial)
        with streams_of(trial, recorder):
            first, *others = _steps(trial, recorder)
        known = [step for step in (first, *others) if step.warm_up]
        for step in others:
            for failure, message in _wrong(trial, recorder, known, step):
                message = f"{message}, in a step {step.how}"
                return Judgement(self.name, Verdict.FAIL, failure, message)
        if (leak := _leak(others)) is not None:
            return Judgement(self.name, Verdict.FAIL, Failure.ALLOCATION, leak)
        allocated = max(sum(block.size for block in step.work.allocated) for step in others)
        launches = sum(len(variants) for variants in first.work.variants.values())
        return passed(self.name, bytes_allocated=float(allocated), launches=float(launches))


def _recorder(trial: Trial) -> HostRecorder:
    if trial.machine.device == "cpu":
        return HostRecorder("cpu", current_number)
    from loragate.execution.streams.device import current_handle

    return HostRecorder("cuda", current_handle)


def _steps(trial: Trial, recorder: HostRecorder) -> list[_Step]:
    """The steps in their order, with what the host did in each."""
    pool = make_pool(trial.case, trial.seed, _KIND, trial.machine, trial.capabilities)
    instance = open_loaded(trial, trial.case, base=base_of(trial, _KIND), pool=pool)
    first, other = (make_batch(trial.case, trial.seed, s, _KIND, trial.machine) for s in range(2))
    own = copy_batch(first)
    recorder.name(host_tensors(trial, instance), on_host=True)
    base_rows = torch.full_like(own.token_slots, BASE_ROW)

    def step(how: str, mapping: Tensor, *, is_run: bool = False, warm_up: bool = False) -> _Step:
        own.token_slots.copy_(mapping)
        work = host_work(recorder, instance, own, is_run=is_run, warms_up=warm_up)
        return _Step(how, bool((mapping != BASE_ROW).any()), work, warm_up)

    steps = [
        step("that is the first one", first.token_slots, is_run=True, warm_up=True),
        step("of base rows only", base_rows, warm_up=True),
        step("with another mapping", other.token_slots),
    ]
    with recorder:
        instance.unload(0)
        instance.load(0, pool)
    steps.append(step("behind the reload of an adapter", first.token_slots))
    steps.append(step("of base rows only", base_rows))
    if any(is_held(block) for step in steps for block in step.work.allocated):
        gc.collect()
    # while the instance is there
    return [replace(step, kept=tuple(filter(is_held, step.work.allocated))) for step in steps]


def _wrong(
    trial: Trial, recorder: HostRecorder, known: list[_Step], step: _Step
) -> Iterator[tuple[Failure, str]]:
    """What a step does that it should not; `known` are those that warmed up."""
    work = step.work
    promised = trial.capabilities.hot_path
    waits = [("apply", work.waits_in_apply)]
    if Promise.PREPARE_QUEUES in promised:
        waits.append(("prepare", work.waits_in_prepare))
    for where, found in waits:
        if found:
            what, stack = found[0]
            times = counted(len(found), "time", "times")
            yield Failure.HOST_WAIT, f"{where} waits for the device {times}: {what}{_at(stack)}"
    yield from _allocations(trial, work)
    if step.warm_up:
        return
    if Promise.SAME_BUFFERS in promised:
        alike = [before.work for before in known if before.has_adapters is step.has_adapters]
        yield from _moved(recorder, alike[:1], work)
    if Promise.SAME_KERNELS in promised:
        yield from _recompiled([before.work for before in known], work)


def _allocations(trial: Trial, work: HostWork) -> Iterator[tuple[Failure, str]]:
    allowed = _allowed(trial)
    if allowed is None:
        return
    size = sum(block.size for block in work.allocated)
    if size > allowed:
        names = ", ".join(block.name for block in work.allocated[:3])
        yield (
            Failure.ALLOCATION,
            f"apply allocates {size} bytes beside its result, {allowed} are allowed: {names}",
        )
    if work.unseen and trial.case.site in IN_PLACE_SITES:
        times = counted(work.unseen, "time", "times")
        yield Failure.ALLOCATION, f"apply asks the allocator {times} for memory, behind operators"


def _leak(steps: list[_Step]) -> str | None:
    """Memory that each step with adapters gets anew and keeps, whatever it may use meanwhile."""
    kept = [step.kept for step in steps if step.has_adapters and not step.warm_up]
    if not kept or not all(kept):
        return None
    size = sum(block.size for block in kept[-1])
    names = ", ".join(block.name for block in kept[-1][:3])
    return f"apply keeps {size} bytes more after each step: {names}"


def _allowed(trial: Trial) -> int | None:
    """Bytes that `apply` may allocate beside its result; None: not promised."""
    allocates: Callable[..., int | None] | None = trial.capabilities.allocates
    if allocates is None:
        return None
    with subject_code():
        return allocates(trial.case)


def _moved(
    recorder: HostRecorder, before: list[HostWork], work: HostWork
) -> Iterator[tuple[Failure, str]]:
    for known in before:
        for use, blocks in work.used.items():
            # an operation that the step before did not have is no matter of buffers
            fresh = blocks.keys() - known.used.get(use, blocks).keys()
            if fresh:
                (kernel, argument), block = use, min(fresh)
                yield (
                    Failure.MOVED_BUFFER,
                    f"{kernel} gets {argument} in other memory than before "
                    f"({recorder.blocks.all[block].name}), so that a captured graph would use "
                    f"the old one{_at(blocks[block])}",
                )


def _recompiled(before: list[HostWork], work: HostWork) -> Iterator[tuple[Failure, str]]:
    for kernel in work.compiled:
        yield Failure.RECOMPILED, f"kernel {kernel} is compiled"
    for kernel, variants in work.variants.items():
        known = [variant for step in before for variant in step.variants.get(kernel, ())]
        if not known:
            yield Failure.RECOMPILED, f"kernel {kernel} is first needed after the warm-up"
            continue
        for variant in variants:
            if variant not in known:
                names = ", ".join(_differing(known[0], variant))
                yield Failure.RECOMPILED, f"kernel {kernel} is compiled anew for its {names}"


def _differing(one: Mapping[str, Hashable], other: Mapping[str, Hashable]) -> list[str]:
    return [name for name in other if one.get(name) != other[name]]


def _at(stack: Stack) -> str:
    if not stack:
        return ""
    file, line, name = stack[0]
    return f" in {name}, {file}:{line}"
