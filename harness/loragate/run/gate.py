"""A run of the gate: every leg in a process of its own, one record, one verdict. No torch.

Invariant: what the legs write stays, however a leg or the gate itself ends, and the verdict is
judged from nothing but that record.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from loragate.core.child_process import Cause, Ending, Watch, Watched, signal_name
from loragate.core.errors import CommandError
from loragate.core.gpus import visible_gpus
from loragate.core.output import say
from loragate.core.plural import counted
from loragate.core.signals import signals_deferred
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
from loragate.run.schedule import Stage, describe, listed_gpus, stages

# longer than any deadline of a case, so that only a leg that lost its own watchdog gets here
_PATIENCE_S = 900.0


def gpu_is_visible() -> bool:
    """Whether the driver lists a GPU that CUDA_VISIBLE_DEVICES allows. Raises CommandError."""
    listed = listed_gpus()
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
    return (
        f"tier {start.tier} {where}: {counted(cases, 'case')} of {subjects}{draws}{repeats}{shard}"
    )


@dataclass(frozen=True, slots=True)
class _Running:
    """A leg that runs, the cores that its lane is kept to, and the legs that follow in the lane."""

    leg: Leg
    begin: float
    cores: frozenset[int]
    rest: Iterator[Leg]


class Gate:
    """Runs legs as `schedule.py` arranges them; `interrupted` once Ctrl-C has ended those that ran.

    spare: cores for legs that run beside those of the GPU; without any, legs run one after the
    other. The time of the run is that since the gate was made: planning counts, which takes half a
    minute where nothing has been imported before.
    """

    def __init__(self, setup: GateSetup, *, spare: frozenset[int] = frozenset()) -> None:
        self.interrupted = False
        self._begin = time.monotonic()
        self._spare = spare
        self._running: dict[Watched, _Running] = {}
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
        self._write(opening)
        for stage in stages(tuple(legs), self._spare):
            if not self.interrupted:
                self._run_stage(stage)
        return self._record.close(duration_s=time.monotonic() - self._begin)

    def _run_stage(self, stage: Stage) -> None:
        """Run the lanes side by side, until all legs have ended or an interruption ends those that
        run."""
        if said := describe(stage):
            say(said)
        with Watch(patience_s=_PATIENCE_S, tick=self._show) as watch:
            try:
                for lane in stage:
                    self._start_next(watch, lane.cores, iter(lane.legs))
                while self._running:
                    watched, ending = watch.wait()
                    # a signal in between would lose the result of the leg
                    with signals_deferred():
                        ended = self._running.pop(watched)
                        self._finish(ended, ending)
                    self._start_next(watch, ended.cores, ended.rest)
            except KeyboardInterrupt:
                self.interrupted = True
                watch.stop()
                for watched, ended in self._running.items():
                    # one may have been over just before
                    cause = watched.cause or Cause.INTERRUPTED
                    self._finish(ended, Ending(cause, watched.process.returncode))

    def _start_next(self, watch: Watch, cores: frozenset[int], rest: Iterator[Leg]) -> None:
        """Start the next leg of a lane that can be started, if there is one."""
        for leg in rest:
            begin, log = time.monotonic(), self._report / LOGS / f"{leg.name}.log"
            self._write([LegStarted(name=leg.name)])
            try:
                with signals_deferred():
                    watched = watch.start(leg.command, log=log, cores=cores)
                    self._running[watched] = _Running(leg, begin, cores, rest)
                return
            except OSError as error:
                # a leg that cannot start costs no other leg its result
                self._record.note_problem(unwritten(log, error))

    def _finish(self, ended: _Running, ending: Ending) -> None:
        """Record the end of a leg."""
        name = ended.leg.name
        verdict, message = _judge(ending)
        if ending.cause is not Cause.EXITED:
            self._write(tuple(abandoned_cases(self._record.read(), leg=name, why=message)))
        finished = LegFinished(
            name=name,
            verdict=verdict,
            exit_code=ending.exit_code,
            duration_s=time.monotonic() - ended.begin,
            log_path=f"{LOGS}/{name}.log",
            message=message,
        )
        self._write([finished])

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
