"""A run of the gate: every leg in a process of its own, one record, one verdict. No torch.

Invariant: what the legs write stays, however a leg or the gate itself ends, and the verdict is
judged from nothing but that record.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from loragate.core.child_process import Cause, Ending, signal_name, watch
from loragate.core.errors import CommandError
from loragate.core.gpus import DriverError, list_gpus, visible_gpus
from loragate.core.output import say
from loragate.core.verdict import ExitCode, Verdict
from loragate.events.log import EventTail
from loragate.events.model import Event, LegFinished, LegStarted, RunStarted
from loragate.matrix.case import Tier
from loragate.report.progress import Liveness, Progress
from loragate.report.summary import Summary
from loragate.report.terminal import colour_for, render_summary
from loragate.run.closing import abandoned_cases
from loragate.run.folder import EVENTS, LOGS, clear_folder, hold_folder
from loragate.run.legs import GateSetup, Leg, left_out, other_shards, verdict_of_exit
from loragate.run.opening import RunRequest
from loragate.run.opening_process import opening_events_of_child
from loragate.run.run_record import RunRecord, unwritten

# longer than any deadline of a case, so that only a leg that lost its own watchdog gets here
_PATIENCE_S = 900.0


def gpu_is_visible() -> bool:
    """Whether the driver lists a GPU that CUDA_VISIBLE_DEVICES allows. Raises CommandError."""
    try:
        listed = list_gpus(os.environ)
    except DriverError as error:
        raise CommandError(str(error), ExitCode.INFRASTRUCTURE) from error
    # CUDA_VISIBLE_DEVICES may name a GPU that is not there
    return bool(listed and visible_gpus(os.environ, listed))


def plan_gate(
    setup: GateSetup, legs: Sequence[Leg], *, record: Path | None = None
) -> tuple[Event, ...]:
    """The events that the run begins with. Touches no report. Raises CommandError.

    record: the file that will keep the result, and so makes no working tree dirty.
    """
    tier = setup.selection.tier
    if tier is not Tier.SMOKE and not setup.has_gpu:
        message = f"tier {tier} needs a GPU and there is none; allowed here: smoke"
        raise CommandError(message, ExitCode.USAGE)
    opening = opening_events_of_child(
        RunRequest(
            run=setup.run,
            selection=setup.selection,
            leg=legs[0].name,
            legs=tuple(leg.name for leg in legs),
            expected=tuple(expected for leg in legs for expected in leg.expected),
            record=record,
            other_shards=other_shards(setup),
        )
    )
    _check_gpu(_start_of(opening), has_gpu=setup.has_gpu)
    return (*opening, *left_out(setup))


def headline(opening: Iterable[Event]) -> str:
    """What a planned run is going to check, in one line."""
    start = _start_of(opening)
    cases = sum(len(row.run_ids) for row in start.expected)
    where = "on a GPU" if start.machine["device"] == "cuda" else "in the Triton interpreter"
    draws = f", {len(start.draws)} draws each" if len(start.draws) > 1 else ""
    repeats = f", each run {start.repeats} times" if start.repeats > 1 else ""
    subjects = ", ".join(start.subjects)
    shard = f", shard {start.shard.index}/{start.shard.count}" if start.shard else ""
    return f"tier {start.tier} {where}: {cases} cases of {subjects}{draws}{repeats}{shard}"


class Gate:
    """Runs legs one after the other; `interrupted` once Ctrl-C has ended one of them."""

    def __init__(self, setup: GateSetup) -> None:
        self.interrupted = False
        self._report = setup.report
        self._colour = colour_for(sys.stdout, os.environ)
        liveness = Liveness.TERMINAL if sys.stdout.isatty() else Liveness.LOG
        self._progress = Progress(self._colour, liveness)
        self._tail = EventTail(self._report / EVENTS, run=setup.run)
        self._record = RunRecord(self._report, run=setup.run)

    def run(self, opening: Iterable[Event], legs: Iterable[Leg]) -> Summary:
        """`opening`: the events of `plan_gate`. An earlier report in the folder is moved aside.

        Raises CommandError if another run writes to the folder.
        """
        with hold_folder(self._report):
            clear_folder(self._report)
            summary = self._run_legs(opening, legs)
        say(f"\n{render_summary(summary, self._colour)}")
        say(f"report: {self._report}")
        return summary

    def _run_legs(self, opening: Iterable[Event], legs: Iterable[Leg]) -> Summary:
        begin = time.monotonic()
        self._write(opening)
        for leg in legs:
            if self._run_leg(leg) is Cause.INTERRUPTED:
                self.interrupted = True
                break
        return self._record.close(duration_s=time.monotonic() - begin)

    def _run_leg(self, leg: Leg) -> Cause:
        begin = time.monotonic()
        self._write([LegStarted(name=leg.name)])
        log = self._report / LOGS / f"{leg.name}.log"
        try:
            ending = watch(leg.command, log=log, patience_s=_PATIENCE_S, tick=self._show)
        except OSError as error:
            # a leg that cannot start costs no other leg its result
            self._record.note_problem(unwritten(log, error))
            return Cause.EXITED
        verdict, message = _judge(ending)
        if ending.cause is not Cause.EXITED:
            self._write(tuple(abandoned_cases(self._record.read(), leg=leg.name, why=message)))
        finished = LegFinished(
            name=leg.name,
            verdict=verdict,
            exit_code=ending.exit_code,
            duration_s=time.monotonic() - begin,
            log_path=str(log.relative_to(self._report)),
            message=message,
        )
        self._write([finished])
        return ending.cause

    def _write(self, events: Iterable[Event]) -> None:
        self._record.write(events)
        self._show()

    def _show(self) -> bool:
        """Print the progress; whether there was any."""
        events = self._tail.poll()
        for event in events:
            say(self._progress.feed(event), end="")
        return bool(events)


def _judge(ending: Ending) -> tuple[Verdict, str]:
    if ending.cause is Cause.INTERRUPTED:
        return Verdict.INCONCLUSIVE, "interrupted"
    if ending.cause is Cause.STALLED:
        return Verdict.INFRA, f"stopped after {_PATIENCE_S:g} s without a sign of life"
    if ending.exit_code < 0:
        return Verdict.INFRA, f"killed by {signal_name(ending.exit_code)}"
    return verdict_of_exit(ending.exit_code), ""


def _check_gpu(start: RunStarted, *, has_gpu: bool) -> None:
    """CommandError if the driver and torch disagree, where a run would check less than it could."""
    on_gpu = start.machine["device"] == "cuda"
    if on_gpu == has_gpu:
        return
    if on_gpu:
        problem = "torch can use a GPU and NVML (libnvidia-ml.so.1) is not there to list it"
    else:
        torch = f"torch {start.versions.get('torch', '')}".rstrip()
        problem = f"the driver lists a GPU that {torch} cannot use"
    message = f"{problem}; fix that, or set CUDA_VISIBLE_DEVICES= to run without it"
    raise CommandError(message, ExitCode.INFRASTRUCTURE)


def _start_of(opening: Iterable[Event]) -> RunStarted:
    return next(event for event in opening if isinstance(event, RunStarted))
