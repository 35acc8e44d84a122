"""`loragate replay`: run one case again, with the evidence of every oracle.

The case runs in a process of its own and under its own deadline, as in the gate; with --in-process
it runs in this one and without a deadline, for a debugger or a sanitizer. With the conditions of a
scan it runs in the processes of a scan.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from loragate.commands.condition_options import (
    add_condition_options,
    conditions_from,
    given_conditions,
    measure_from,
    runs_before,
    times_from,
)
from loragate.commands.selection_options import add_matrix_option, matrix_files
from loragate.core.arguments import count_from
from loragate.core.child_process import ProcessPool, python_module, signal_name
from loragate.core.early_exit import early_exit_is
from loragate.core.errors import CommandError, usage_errors
from loragate.core.output import say
from loragate.core.verdict import EXIT_CODES, ExitCode, Verdict
from loragate.events.model import CaseFinished
from loragate.matrix.case_run import CaseRun, split_draw
from loragate.matrix.footprint import footprint_bytes
from loragate.matrix.load import load_cases
from loragate.matrix.selection import select_one
from loragate.nightly.wave import Measure, Wanted
from loragate.plugin.crash_report import crash_report
from loragate.report.evidence import render_evidence
from loragate.run.gate import gpu_is_visible
from loragate.run.replay_process import (
    MODULE,
    WORKER,
    Refusal,
    ReplayFolder,
    ReplayRequest,
    replays,
)
from loragate.scan.again import Asked, run_again
from loragate.scan.devices import Devices, devices_of
from loragate.subjects.registry import SUBJECTS

# the runs of a replay are a list
_MOST_REPEATS = 1_000_000


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("replay", help="run one case again and print its evidence")
    parser.add_argument(
        "pattern",
        metavar="PATTERN",
        help="an id as the report or `loragate plan` prints it, or a pattern that selects one",
    )
    parser.add_argument(
        "--draw", type=count_from(0), metavar="N", help="use the random data of draw N"
    )
    parser.add_argument(
        "--repeats",
        type=count_from(1, _MOST_REPEATS),
        metavar="N",
        help="run the same data N times, until a run does not pass",
    )
    parser.add_argument(
        "--in-process",
        action="store_true",
        help="run in this process and without a deadline, for a debugger or a sanitizer",
    )
    add_matrix_option(parser)
    add_condition_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitCode:
    if given := given_conditions(arguments):
        return _replay_as_scan(arguments, given[0])
    request = _request(arguments)
    if arguments.in_process:
        with early_exit_is(ExitCode.WRONG):
            *_, finished = replays(request, lambda run: nullcontext())
    else:
        finished = _replay_in_child(request)
    say(render_evidence(finished))
    return EXIT_CODES[finished.verdict]


def _request(arguments: argparse.Namespace) -> ReplayRequest:
    matrix = matrix_files(arguments)
    with usage_errors():
        found = select_one(arguments.pattern, load_cases(matrix), subjects=SUBJECTS, matrix=matrix)
        _check_named(arguments)
    draw = found.draw if arguments.draw is None else arguments.draw
    return ReplayRequest(
        first=replace(found, draw=draw, repeat=0),
        repeats=arguments.repeats or found.repeat + 1,
    )


def _check_named(arguments: argparse.Namespace) -> None:
    """Raises ValueError for an option that contradicts the id of a draw."""
    _, draw, repeat = split_draw(arguments.pattern)
    given, repeats = arguments.draw, arguments.repeats
    what = f"{arguments.pattern!r} names"
    if draw is not None and given not in (None, draw):
        raise ValueError(f"--draw {given}: {what} draw {draw}; leave out one of the two")
    if repeat and repeats and repeats <= repeat:
        raise ValueError(f"--repeats {repeats}: {what} repeat {repeat}, which takes {repeat + 1}")


def _replay_as_scan(arguments: argparse.Namespace, given: str) -> ExitCode:
    """given: the option that asks for it. Raises CommandError."""
    request = _request(arguments)
    first = request.first
    with usage_errors():
        if arguments.in_process or request.repeats > 1:
            what = "--in-process" if arguments.in_process else "repeats"
            raise ValueError(f"--{given} takes fresh processes (--times N of them), and no {what}")
        before = runs_before(arguments, load_cases(first.matrix), first.matrix)
        runs = [first, *before]
        devices = _devices(runs)
        conditions = conditions_from(arguments, devices.gpus)
        measure = measure_from(arguments, runs)
    asked = Asked(
        wanted=_wanted(first, measure),
        conditions=conditions,
        times=times_from(arguments),
        before=tuple(_wanted(run, measure) for run in before),
        # a GPU that is named may be the only one that is right, or wrong
        others=tuple(gpu for gpu in devices.gpus if arguments.gpu and gpu != conditions.gpu),
    )
    return run_again(asked, runs, devices)


def _wanted(run: CaseRun, measure: Measure) -> Wanted:
    return Wanted(case=run.run_id, draw=run.draw, measure=measure)


def _devices(runs: Sequence[CaseRun]) -> Devices:
    largest = max(footprint_bytes(run.case) for run in runs)
    return devices_of(os.environ, largest) if gpu_is_visible() else Devices()


def _replay_in_child(request: ReplayRequest) -> CaseFinished:
    """The end of the last run; a process that died is its end too. Raises CommandError."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as path:
        folder = ReplayFolder(Path(path))
        folder.ask(request)
        exit_code = _run_child(folder)
        ended = []
        for answer in folder.answers():
            if isinstance(answer, Refusal):
                raise CommandError(answer.message, answer.exit_code)
            ended.append(answer)
        if ended and (ended[-1].verdict is not Verdict.PASS or len(ended) == request.repeats):
            return ended[-1]
        return crash_report(
            request.runs[len(ended)],
            worker=WORKER,
            gpu=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            duration_s=time.monotonic() - begin,
            stacks=folder.stacks,
            ran_before=[run.id for run in request.runs[: len(ended)]],
            died=_death(exit_code),
        )


def _run_child(folder: ReplayFolder) -> int:
    """The exit code, negative for a signal. Nothing that the child starts outlives this call."""
    processes = ProcessPool()
    # stdin, stdout and stderr are those of the caller
    child = processes.start(python_module(MODULE, str(folder.path)))
    try:
        return child.wait()
    finally:
        processes.end(child)


def _death(exit_code: int) -> str:
    if exit_code >= 0:
        return f"the process of the case exited with {exit_code}"
    return f"the process of the case died of {signal_name(exit_code)}"
