"""A process of a scan: runs the trials of an order under its conditions, through the same runner as
the gate and `loragate replay`.

Invariant: the start of each trial is told before it runs, and its end before the next one begins,
so that the trial that ends the process is known.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any, TypeAlias
from unittest.mock import patch

from loragate.core.deadline import deadline, open_crash_file
from loragate.core.files import lock_of
from loragate.core.machine import detect_machine
from loragate.core.verdict import Failure, Judgement, Verdict
from loragate.execution.device_memory import TorchAllocator, WorkerMemory
from loragate.history.model import Outcome
from loragate.matrix.footprint import footprint_bytes
from loragate.nightly.conditions import Cache, Clock, Conditions, Memory, Schedule
from loragate.nightly.wave import Measure
from loragate.scan.imports import import_subjects
from loragate.scan.messages import Began, Measured, Order, Step, packed
from loragate.scan.paths import TracedPath, forget_results, path_of_engine

_TICK_S = 0.005
# for others of a wave to be as far
_PATIENCE_S = 120.0
_FAST = 1000.0
# the clocks of Python, each in seconds or nanoseconds; those under test run at another speed
_CLOCKS = ("time", "monotonic", "perf_counter")
_now = time.monotonic
# kinds of failure that say that bits changed, and not that they are wrong
_DIFFERENT = (Failure.NONDETERMINISTIC, Failure.SCHEDULE_DEPENDENT)
_Reserve: TypeAlias = Callable[[int], AbstractContextManager[None]]


def prepare_environment(conditions: Conditions, order: Order) -> None:
    """Set what is read when the device is first used."""
    if conditions.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = conditions.gpu
    if conditions.cache is Cache.COLD:
        for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            os.environ[name] = str(order.folder / name.lower())
    if conditions.schedule is Schedule.BLOCKING:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"


def run_order(order: Order) -> None:
    """Run all trials of an order, and tell of each of them in its pipe."""
    prepare_environment(order.conditions, order)
    stacks = open_crash_file(order.stacks)
    with order.answers.open("wb", buffering=0) as answers:
        device = _prepare_device(order)
        order.ready(order.number).touch()
        _wait(lambda: all(order.ready(k).exists() for k in range(order.peers)))
        reserve = _reserve(order)
        for index, step in enumerate(order.steps):
            if order.stop.exists():
                break
            with reserve(footprint_bytes(step.run.case)):
                answers.write(packed(Began(index=index, device=device)))
                if not _tell(answers, order, index, step, stacks):
                    # nothing that this process does from here on would say anything
                    return
        order.through(order.number).touch()
        _keep_company(order, stacks, reserve)


def _prepare_device(order: Order) -> str:
    """Import the subjects and initialise CUDA, which is no part of a trial; the name of the
    device."""
    import torch

    import_subjects({step.run.subject for step in order.steps})
    # the first trial reports what is wrong with it
    with suppress(RuntimeError):
        if order.conditions.gpu:
            torch.empty(1, device="cuda")
        machine = detect_machine()
        return f"{machine.device} {machine.name}"
    return ""


def _reserve(order: Order) -> _Reserve:
    """Takes the bytes of a case and waits for that memory, as workers of the gate do."""
    if order.share is None:
        return lambda size: nullcontext()
    lock = lock_of(Path(order.run, order.conditions.gpu))
    return WorkerMemory(order.share, lock, TorchAllocator()).reserve


def _tell(answers: IO[bytes], order: Order, index: int, step: Step, stacks: IO[bytes]) -> bool:
    """Run a trial and tell of it; False if the device is lost to this process."""
    with deadline(step.run.case.timeout_s, stacks):
        measured = measure(step, order.conditions, index)
        answers.write(packed(measured))
    return measured.failure != Failure.CUDA_STICKY


def _keep_company(order: Order, stacks: IO[bytes], reserve: _Reserve) -> None:
    """Go on as a neighbour of those that are not through; nobody is told of these trials."""
    while True:
        for step in order.steps:
            if all(order.through(k).exists() for k in range(order.peers)):
                return
            with (
                reserve(footprint_bytes(step.run.case)),
                deadline(step.run.case.timeout_s, stacks),
            ):
                measure(step, order.conditions, 0)


def _wait(until: Callable[[], bool]) -> None:
    end = _now() + _PATIENCE_S
    while not until() and _now() < end:
        time.sleep(_TICK_S)


def measure(step: Step, conditions: Conditions, index: int) -> Measured:
    """Run one trial. After `select_interpreter`."""
    import torch

    from loragate.run.trial import open_trial

    begin = _now()
    try:
        trial = open_trial(step.run)
    # planning has opened it on this machine, so the case itself is not to blame
    except Exception as error:
        message = f"it cannot be opened: {type(error).__name__}: {error}"
        return _not_run(index, Outcome.INFRA, Failure.HARNESS.value, message, begin)
    if isinstance(trial, str):
        return _not_run(index, Outcome.UNKNOWN, "", trial, begin)
    if step.traced:
        _forget(trial.capabilities.forgets)
    with _clocks(conditions.clock):
        shown = (_bits if step.measure is Measure.BITS else _judged)(step, trial, conditions)
    if trial.machine.device == "cuda" and shown["failure"] != Failure.CUDA_STICKY:
        # neighbours need the memory that torch keeps
        torch.cuda.empty_cache()
    return Measured(
        index=index,
        duration_s=_now() - begin,
        promised=trial.capabilities.deterministic,
        **shown,
    )


def _forget(forgets: Callable[[], object] | None) -> None:
    """What earlier trials have left in this process would hide source that the step runs."""
    forget_results()
    if forgets is not None:
        forgets()


def _not_run(index: int, outcome: Outcome, failure: str, message: str, begin: float) -> Measured:
    return Measured(
        index=index,
        outcome=outcome,
        failure=failure,
        message=message,
        digests=(),
        duration_s=_now() - begin,
        promised=True,
    )


def _bits(step: Step, trial: Any, conditions: Conditions) -> dict[str, Any]:
    from loragate.run.trial import judge_with
    from loragate.scan.bits import Bits
    from loragate.scan.paths import traced_path

    path = TracedPath()

    @contextmanager
    def tracing() -> Iterator[None]:
        nonlocal path
        with traced_path() as path:
            yield

    bits = Bits(
        tracing=tracing if step.traced else nullcontext,
        filling=_filling(conditions.memory),
        is_delayed=conditions.schedule is Schedule.DELAYED,
    )
    shown = _shown((judge_with(bits, trial),))
    # what shows behind both steps, as a fault that the subject swallows, leaves right bits
    if shown["outcome"] in (Outcome.RIGHT, Outcome.DIFFERENT):
        shown["digests"] = bits.digests
    if step.traced:
        shown |= _where(path, step)
    return shown


def _judged(step: Step, trial: Any, conditions: Conditions) -> dict[str, Any]:
    from loragate.run.trial import run_case

    with _filling(conditions.memory)():
        finished = run_case(step.run, trial, worker="scan", gpu=conditions.gpu)
    shown = _shown(finished.judgements)
    if step.traced:
        path = path_of_engine(trial.subject.engine_target(step.run.case))
        shown |= _where(path, step)
        # whole packages; a revision changes what is in the project
        shown["files"] = tuple(file for file in shown["files"] if not Path(file).is_absolute())
    return shown


def _where(path: TracedPath, step: Step) -> dict[str, Any]:
    return {
        "path": path.name(step.run.case),
        "path_key": path.key(),
        "files": path.relative_files(),
    }


def _shown(judgements: tuple[Judgement, ...]) -> dict[str, Any]:
    """What the judgements say; the first of the worst ones explains it."""
    from loragate.run.trial import verdict_of

    verdict = verdict_of(judgements)
    first = next((j for j in judgements if j.verdict is verdict), None)
    failure = first.failure if first else None
    return {
        "outcome": outcome_of(
            # that another oracle lacked memory makes no result wrong
            verdict,
            [j.failure for j in judgements if j.failure and j.verdict is Verdict.FAIL],
        ),
        "failure": failure.value if failure else "",
        "message": first.message if first and verdict is not Verdict.PASS else "",
        "digests": (),
    }


def outcome_of(verdict: Verdict, failures: list[Failure]) -> Outcome:
    """A failed trial differs if that is all that its oracles say; otherwise it is wrong."""
    if verdict is Verdict.FAIL:
        return Outcome.DIFFERENT if set(failures) <= set(_DIFFERENT) else Outcome.WRONG
    if verdict is Verdict.PASS:
        return Outcome.RIGHT
    return Outcome.INFRA if verdict is Verdict.INFRA else Outcome.UNKNOWN


def _filling(memory: Memory) -> Callable[[], AbstractContextManager[None]]:
    from loragate.inputs.poison import poisoned_allocations, zeroed_allocations

    if memory is Memory.PLAIN:
        return nullcontext
    return poisoned_allocations if memory is Memory.POISON else zeroed_allocations


@contextmanager
def _clocks(clock: Clock) -> Iterator[None]:
    """Within, the clocks of Python run at another speed. Code that has taken a clock out of its
    module before keeps the true one."""
    speed = {Clock.PLAIN: 1.0, Clock.SLOW: 1 / _FAST, Clock.FAST: _FAST}[clock]
    with ExitStack() as stack:
        if clock is not Clock.PLAIN:
            for name in (*_CLOCKS, *(f"{name}_ns" for name in _CLOCKS)):
                true = getattr(time, name)
                stack.enter_context(patch.object(time, name, _at_speed(true, speed)))
        yield


def _at_speed(true: Callable[[], Any], speed: float) -> Callable[[], Any]:
    """A clock that goes on with each reading, as code that divides by a difference may expect."""
    begin = last = true()
    kind = type(begin)

    def read() -> Any:
        nonlocal last
        following = last + 1 if kind is int else math.nextafter(last, math.inf)
        last = max(following, begin + kind((true() - begin) * speed))
        return last

    return read
