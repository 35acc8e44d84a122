"""`loragate gate`: every leg in a process of its own, one record, one verdict.

Invariant: what the legs write stays, however a leg or the gate itself ends, and the exit code is
judged from nothing but that record.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from loragate.commands.selection_options import add_selection_options, selection_from
from loragate.core.child_process import Cause, Ending, watch
from loragate.core.gpus import DriverError, list_gpus, visible_gpus
from loragate.core.verdict import ExitCode, Verdict
from loragate.core.versions import new_run_name
from loragate.events.log import EventTail, EventWriter
from loragate.events.model import Event, LegFinished, LegStarted, RunStarted
from loragate.matrix.case import Tier
from loragate.matrix.selection import Selection
from loragate.records.gate_record import add_record_options, check_record, record_gate
from loragate.records.results import ResultsError
from loragate.report.progress import Liveness, Progress
from loragate.report.summary import Summary
from loragate.report.terminal import colour_for, render_summary
from loragate.run.closing import abandon_open_cases, close_run
from loragate.run.folder import EVENTS, LOGS, clear_folder
from loragate.run.legs import Leg, cases_leg_name, make_legs, owed_by_compiling, verdict_of_exit
from loragate.run.opening import RunRequest
from loragate.run.opening_process import PlanningError, opening_events_of_child

# longer than any deadline of a case, so that only a leg that lost its own watchdog gets here
_PATIENCE_S = 900.0


class GateError(Exception):
    """The gate cannot start."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("gate", help="check what this machine can check, and judge")
    add_selection_options(parser)
    parser.add_argument(
        "--report", type=Path, default=Path("report"), metavar="DIR", help="default: report"
    )
    add_record_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    name = new_run_name()
    report: Path = arguments.report.absolute()
    try:
        check_record(arguments)
        has_gpu = _has_gpu()
        selection = selection_from(arguments, has_gpu=has_gpu)
        legs = make_legs(selection, run=name, report=report, has_gpu=has_gpu)
        opening = _plan(selection, name, legs, has_gpu=has_gpu, record=arguments.record)
    except (PlanningError, GateError) as error:
        print(error, file=sys.stderr)
        return error.exit_code.value
    except ResultsError as error:
        print(error, file=sys.stderr)
        return ExitCode.USAGE.value
    clear_folder(report)
    print(_headline(opening))
    gate = _Gate(report, name)
    summary = gate.run(opening, legs)
    if arguments.record and gate.interrupted:
        print(f"interrupted: {arguments.record} stays as it was", file=sys.stderr)
    elif arguments.record and summary.plan is not None:
        try:
            section = record_gate(summary, arguments)
        except (ResultsError, OSError) as error:
            print(error, file=sys.stderr)
            return ExitCode.INFRASTRUCTURE.value
        print(f"recorded as {section} in {arguments.record}")
    return summary.exit_code.value


class _Gate:
    def __init__(self, report: Path, name: str) -> None:
        self._report = report
        self._name = name
        self._colour = colour_for(sys.stdout, os.environ)
        liveness = Liveness.TERMINAL if sys.stdout.isatty() else Liveness.LOG
        self._progress = Progress(self._colour, liveness)
        self._tail = EventTail(report / EVENTS, run=name)
        self.interrupted = False

    def run(self, opening: Iterable[Event], legs: Iterable[Leg]) -> Summary:
        begin = time.monotonic()
        self._write(opening)
        for leg in legs:
            if self._run_leg(leg) is Cause.INTERRUPTED:
                self.interrupted = True
                break
        summary = close_run(self._report, run=self._name, duration_s=time.monotonic() - begin)
        print(f"\n{render_summary(summary, self._colour)}")
        print(f"report: {self._report}")
        return summary

    def _run_leg(self, leg: Leg) -> Cause:
        begin = time.monotonic()
        self._write([LegStarted(name=leg.name)])
        log = self._report / LOGS / f"{leg.name}.log"
        ending = watch(leg.command, log=log, patience_s=_PATIENCE_S, tick=self._show)
        verdict, message = _judge(ending)
        if ending.cause is not Cause.EXITED:
            abandon_open_cases(self._report / EVENTS, run=self._name, why=message)
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
        with EventWriter(self._report / EVENTS, run=self._name) as writer:
            for event in events:
                writer.write(event)
        self._show()

    def _show(self) -> bool:
        events = self._tail.poll()
        for event in events:
            sys.stdout.write(self._progress.feed(event))
        sys.stdout.flush()
        return bool(events)


def _judge(ending: Ending) -> tuple[Verdict, str]:
    if ending.cause is Cause.INTERRUPTED:
        return Verdict.INCONCLUSIVE, "interrupted"
    if ending.cause is Cause.STALLED:
        return Verdict.INFRA, f"stopped after {_PATIENCE_S:g} s without a sign of life"
    if ending.exit_code < 0:
        return Verdict.INFRA, f"killed by {signal.Signals(-ending.exit_code).name}"
    return verdict_of_exit(ending.exit_code), ""


def _plan(
    selection: Selection,
    name: str,
    legs: tuple[Leg, ...],
    *,
    has_gpu: bool,
    record: Path | None,
) -> tuple[Event, ...]:
    if selection.tier is not Tier.SMOKE and not has_gpu:
        raise GateError(
            f"tier {selection.tier} needs a GPU and there is none; allowed here: smoke",
            ExitCode.USAGE,
        )
    opening = opening_events_of_child(
        RunRequest(
            run=name,
            selection=selection,
            leg=cases_leg_name(has_gpu=has_gpu),
            legs=tuple(leg.name for leg in legs),
            expected=owed_by_compiling(selection),
            record=record,
        )
    )
    started = next(event for event in opening if isinstance(event, RunStarted))
    on_gpu = started.machine["device"] == "cuda"
    if on_gpu and not has_gpu:
        raise GateError(
            "torch can use a GPU and there is no nvidia-smi to list it with; mend that, or set "
            "CUDA_VISIBLE_DEVICES= to run without it",
            ExitCode.INFRASTRUCTURE,
        )
    if has_gpu and not on_gpu:
        raise GateError(
            "the driver lists a GPU that torch "
            f"{started.versions.get('torch', '')} cannot use; mend that, or set "
            "CUDA_VISIBLE_DEVICES= to run without it",
            ExitCode.INFRASTRUCTURE,
        )
    return opening


def _headline(opening: Iterable[Event]) -> str:
    started = next(event for event in opening if isinstance(event, RunStarted))
    cases = sum(len(row.run_ids) for row in started.expected)
    where = "on a GPU" if started.machine["device"] == "cuda" else "in the Triton interpreter"
    draws = f", {len(started.draws)} draws each" if len(started.draws) > 1 else ""
    repeats = f", each run {started.repeats} times" if started.repeats > 1 else ""
    subjects = ", ".join(started.subjects)
    return f"tier {started.tier} {where}: {cases} cases of {subjects}{draws}{repeats}"


def _has_gpu() -> bool:
    try:
        listed = list_gpus(os.environ)
    except DriverError as error:
        raise GateError(str(error), ExitCode.INFRASTRUCTURE) from error
    # a name in CUDA_VISIBLE_DEVICES is no GPU yet
    return bool(listed and visible_gpus(os.environ, listed))
