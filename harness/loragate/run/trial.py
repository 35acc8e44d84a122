"""One run of one case: every oracle that the case names makes one judgement.

Invariant: whatever is raised becomes a judgement; only the death of the process can keep one from
being recorded. An error is charged to whoever caused it: what escapes from the subject, and what
the device reports, is a FAIL; an error of the harness is INFRA and says nothing about the subject.
Nothing is judged after an error that the device does not recover from, because
the result would say nothing about the subject.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch

from loragate.core.machine import Machine, check_kernels_can_run, detect_machine
from loragate.core.traces import error_and_place, innermost
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict, worst
from loragate.engine.process import EngineError
from loragate.events.case_end import end_of
from loragate.events.model import CaseFinished
from loragate.execution.interpreter_calls import KernelFault
from loragate.execution.streams.traced import streams_of
from loragate.execution.watched_launches import watched_launches
from loragate.matrix.case import Case
from loragate.matrix.case_run import CaseRun
from loragate.matrix.plan import beyond_machine
from loragate.oracles import ORACLES
from loragate.oracles.oracle import Oracle
from loragate.protocol import (
    BrokenProtocol,
    Capabilities,
    CheckedSubject,
    Trial,
    forget_errors,
    original_of,
    raised_by_subject,
    subject_code,
    unsupported,
    was_dropped,
)
from loragate.run.preflight import check_caches
from loragate.subjects import find_subject, unusable

_FRAMES_SHOWN = 6
# whose frames in this process are the harness's: an engine raises in its own, whose stack is part
# of the message
_SELF_CONTAINED = (BrokenProtocol, EngineError)
# as CUDA libraries, Triton, drivers and the CPU allocator report it, in a plain RuntimeError
_OUT_OF_MEMORY = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
)


def run_case(run: CaseRun, trial: Trial, *, worker: str, gpu: str) -> CaseFinished:
    """Run a case, with everything that a report needs; `worker` and `gpu` say where it ran."""
    started = time.monotonic()
    judgements = run_trial(trial)
    return end_of(
        run,
        verdict_of(judgements),
        worker=worker,
        gpu=gpu,
        duration_s=time.monotonic() - started,
        judgements=judgements,
    )


def open_trial(run: CaseRun) -> Trial | str:
    """The trial on this machine, or the reason why it cannot be run here. Raises what
    `load_subject` and `check_caches` raise."""
    machine = detect_machine()
    subject, have = load_subject(run.subject)
    check_caches(run.subject, machine)
    reason = beyond_machine(run.case, machine) or refusal(run.case, have)
    if reason is not None:
        return reason
    assert not isinstance(have, str)
    return Trial(run.case, subject, have, machine, run.seed)


def refusal(case: Case, have: Capabilities | str) -> str | None:
    """The reason why a subject cannot run a case, given what it can do here."""
    return have if isinstance(have, str) else unsupported(case, have)


@cache
def load_subject(name: str) -> tuple[CheckedSubject, Capabilities | str]:
    """A subject and what it can do here. Raises what `find_subject` raises, also for a subject
    that cannot say what it supports, and CommandError where kernels can run nowhere."""
    check_kernels_can_run()
    subject = CheckedSubject(find_subject(name))
    machine = detect_machine()
    with asking(name, "capabilities(machine)"):
        return subject, subject.capabilities(machine)


@contextmanager
def asking(name: str, call: str) -> Iterator[None]:
    """An error of the subject within is one line about it, in `call`, as `find_subject` says it."""
    try:
        yield
    except BrokenProtocol as error:
        raise unusable(name, str(error)) from error
    except (Exception, SystemExit) as error:
        if not raised_by_subject(error):
            raise
        raise unusable(name, f"{call} raised {error_and_place(error)}") from error


def run_trial(trial: Trial) -> tuple[Judgement, ...]:
    """Judgements in the order of `trial.case.oracles`; ends early if the device is lost."""
    judgements: list[Judgement] = []
    for name in trial.case.oracles:
        judgement = judge_with(ORACLES[name], trial)
        judgements.append(judgement)
        if judgement.failure is Failure.CUDA_STICKY:
            break
    return tuple(judgements)


def verdict_of(judgements: Iterable[Judgement]) -> Verdict:
    """The verdict of the case: oracles that do not apply do not count if others gave a verdict."""
    verdicts = [judgement.verdict for judgement in judgements]
    judged = [verdict for verdict in verdicts if verdict is not Verdict.SKIP]
    return worst(judged or verdicts)


def device_answers(machine: Machine) -> bool:
    """False after an error that poisons the process's CUDA context, such as an illegal access."""
    try:
        probe = torch.ones(2, device=machine.device)
        return float(probe.add_(1).sum().item()) == 4.0
    except RuntimeError as error:
        # a device without free memory still answers
        return _lacks_memory(error)


def judge_with(oracle: Oracle, trial: Trial) -> Judgement:
    """One judgement, whatever is raised meanwhile; the error is charged to whoever caused it."""
    judgement, may_lack_memory = _judge_once(oracle, trial)
    if not may_lack_memory:
        return judgement
    # layers that refer to themselves, as those of vLLM do, keep the memory of earlier oracles and
    # cases until they are collected. What is missing behind that is missing
    _release_memory(trial.machine)
    judgement, may_lack_memory = _judge_once(oracle, trial)
    if may_lack_memory:
        _release_memory(trial.machine)
    return judgement


def _release_memory(machine: Machine) -> None:
    gc.collect()
    if machine.device == "cuda":
        torch.cuda.empty_cache()


def _judge_once(oracle: Oracle, trial: Trial) -> tuple[Judgement, bool]:
    """The judgement, and whether there may be one of another kind with more memory."""
    name = oracle.name
    try:
        # a subject that draws random numbers must draw the same ones in a replay
        torch.manual_seed(trial.seed)
        reason = oracle.applies(trial)
        if reason is not None:
            return Judgement(name, Verdict.SKIP, message=reason), False
        with streams_of(trial), _watched(trial):
            judgement = oracle.judge(trial)
        if trial.machine.device == "cuda":
            # an error in a kernel shows late; it belongs to the oracle that launched the kernel
            with subject_code():
                torch.cuda.synchronize()
        return judgement, False
    except (Exception, SystemExit) as error:
        original = original_of(error)
        if not isinstance(original, (Exception, SystemExit)):
            # the run is to end, whatever became of that on its way
            raise original from None
        # an allocation that fails frees the operands of its expression, which may drop its error
        may_lack_memory = _lacks_memory(original) or was_dropped(original)
        return _judge_error(name, trial.machine, original), may_lack_memory
    finally:
        # an error holds the memory of its frames
        forget_errors()


def _watched(trial: Trial) -> AbstractContextManager[None]:
    # a GPU finds what lies outside of all allocations, and nothing there finds the rest
    if not trial.machine.interpreted:
        return nullcontext()
    return watched_launches(trial.capabilities.pointer_tables)


def _judge_error(name: OracleName, machine: Machine, error: BaseException) -> Judgement:
    if isinstance(error, KernelFault):
        return Judgement(name, Verdict.FAIL, error.failure, str(error))
    message = str(error) if isinstance(error, _SELF_CONTAINED) else _describe(error)
    if _lacks_memory(error):
        return Judgement(name, Verdict.INFRA, Failure.OUT_OF_MEMORY, message)
    if not device_answers(machine):
        message = f"the device no longer answers after {message}"
        return Judgement(name, Verdict.FAIL, Failure.CUDA_STICKY, message)
    if isinstance(error, BrokenProtocol):
        return Judgement(name, Verdict.FAIL, Failure.BROKEN_PROTOCOL, message)
    if raised_by_subject(error) or _reported_by_device(error):
        return Judgement(name, Verdict.FAIL, Failure.EXCEPTION, message)
    message = f"error of the harness in {innermost(error.__traceback__, 'loragate')}: {message}"
    return Judgement(name, Verdict.INFRA, Failure.HARNESS, message)


def _lacks_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OUT_OF_MEMORY)


def _reported_by_device(error: BaseException) -> bool:
    """A kernel's error may show wherever the device is asked next, also in an oracle."""
    if isinstance(error, torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)


def _describe(error: BaseException) -> str:
    trace = traceback.TracebackException.from_exception(error)
    frames = "".join(traceback.format_list(trace.stack[-_FRAMES_SHOWN:]))
    headline = "".join(trace.format_exception_only()).strip()
    return f"{headline}\n{frames}".strip()
