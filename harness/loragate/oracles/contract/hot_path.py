"""A step that has been warmed up asks the host for nothing that a server cannot afford.

* It does not wait for the device: `apply` never, `prepare` where the subject promises it. A copy
  from memory of the host that is not pinned is a wait.
* `apply` allocates its result, and no more beside it than the subject says.
* It uses the buffers of the step before, whatever the batch is and whichever adapters were loaded
  or evicted: a captured graph has their addresses.
* It needs no other kernels than a step with adapters and one of base rows needed.

One step with adapters warms up; one of base rows, one with another mapping, and one behind the
eviction and the reload of an adapter follow in the same memory. Steps run eagerly, also where a
case captures them. Without a GPU the host is all that counts: launches of the steps that follow are
noted and not interpreted, and what a kernel would be compiled for is taken from its arguments. A
GPU shows in addition how often its allocator is asked: where a step changes its output in place,
never.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping

from loragate.core.plural import counted
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.execution.host_work import HostRecorder, HostWork, host_work
from loragate.execution.session import base_of, open_loaded
from loragate.execution.streams.model import current_number
from loragate.execution.streams.traced import streams_of
from loragate.execution.trace.operations import Stack
from loragate.inputs import DataKind, copy_batch, make_batch, make_pool
from loragate.inputs.mapping import BASE_ROW
from loragate.matrix.case import IN_PLACE_SITES
from loragate.oracles.evidence import passed
from loragate.protocol import HotPath as Promise
from loragate.protocol import Trial, subject_code

_KIND = DataKind.EXACT
_STEPS = ("of base rows only", "with another mapping", "behind the reload of an adapter")


class HotPath:
    name = OracleName.HOT_PATH

    def applies(self, trial: Trial) -> str | None:
        if not trial.capabilities.hot_path:
            return "the subject promises nothing about what the host does in a step"
        return None if trial.case.tokens else "the batch has no rows"

    def judge(self, trial: Trial) -> Judgement:
        recorder = _recorder(trial)
        with streams_of(trial, recorder):
            first, *others = _steps(trial, recorder)
        for how, work in zip(_STEPS, others, strict=True):
            for wrong in _wrong(trial, recorder, first, others[0], work):
                failure, message = wrong
                return Judgement(self.name, Verdict.FAIL, failure, f"{message}, in a step {how}")
        allocated = max(sum(block.size for block in work.allocated) for work in others)
        launches = sum(len(variants) for variants in first.variants.values())
        return passed(self.name, bytes_allocated=float(allocated), launches=float(launches))


def _recorder(trial: Trial) -> HostRecorder:
    if trial.machine.device == "cpu":
        return HostRecorder("cpu", current_number)
    from loragate.execution.streams.device import current_handle

    return HostRecorder("cuda", current_handle)


def _steps(trial: Trial, recorder: HostRecorder) -> list[HostWork]:
    """The step that warms up, and those of `_STEPS`."""
    pool = make_pool(trial.case, trial.seed, _KIND, trial.machine, trial.capabilities)
    instance = open_loaded(trial, trial.case, base=base_of(trial, _KIND), pool=pool)
    first, other = (make_batch(trial.case, trial.seed, s, _KIND, trial.machine) for s in range(2))
    own, mapping = copy_batch(first), first.token_slots
    work = [host_work(recorder, instance, own, is_run=True)]
    own.token_slots.fill_(BASE_ROW)
    work.append(host_work(recorder, instance, own, is_run=False))
    own.token_slots.copy_(other.token_slots)
    work.append(host_work(recorder, instance, own, is_run=False))
    with recorder:
        instance.unload(0)
        instance.load(0, pool)
    own.token_slots.copy_(mapping)
    work.append(host_work(recorder, instance, own, is_run=False))
    return work


def _wrong(
    trial: Trial, recorder: HostRecorder, first: HostWork, base_rows: HostWork, work: HostWork
) -> Iterator[tuple[Failure, str]]:
    """What a step does that it should not."""
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
    if Promise.SAME_BUFFERS in promised:
        yield from _moved(recorder, first, base_rows, work)
    if Promise.SAME_KERNELS in promised and work is not base_rows:
        yield from _recompiled(first, base_rows, work)


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


def _allowed(trial: Trial) -> int | None:
    """Bytes that `apply` may allocate beside its result; None: not promised."""
    allocates: Callable[..., int | None] | None = trial.capabilities.allocates
    if allocates is None:
        return None
    with subject_code():
        return allocates(trial.case)


def _moved(
    recorder: HostRecorder, first: HostWork, base_rows: HostWork, work: HostWork
) -> Iterator[tuple[Failure, str]]:
    for use, blocks in work.used.items():
        known = first.used.get(use) or base_rows.used.get(use)
        # an operation that no step before had is no matter of buffers
        if known is None or blocks <= known:
            continue
        kernel, argument = use
        name = recorder.blocks.all[min(blocks - known)].name
        yield (
            Failure.MOVED_BUFFER,
            f"{kernel} gets {argument} in other memory than before ({name}), so that a captured "
            "graph would read or write the old one",
        )


def _recompiled(
    first: HostWork, base_rows: HostWork, work: HostWork
) -> Iterator[tuple[Failure, str]]:
    for kernel in work.compiled:
        yield Failure.RECOMPILED, f"kernel {kernel} is compiled"
    for kernel, variants in work.variants.items():
        known = [*first.variants.get(kernel, ()), *base_rows.variants.get(kernel, ())]
        for variant in variants:
            if known and variant not in known:
                names = ", ".join(_differing(known[0], variant))
                yield Failure.RECOMPILED, f"kernel {kernel} is compiled anew for its {names}"


def _differing(one: Mapping[str, Hashable], other: Mapping[str, Hashable]) -> list[str]:
    return [name for name in other if one.get(name) != other[name]]


def _at(stack: Stack) -> str:
    if not stack:
        return ""
    file, line, name = stack[0]
    return f" in {name}, {file}:{line}"
