"""`loragate gate`: check what this machine can check, and judge it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from loragate.bench.speed.builds import check_against
from loragate.commands.record_options import add_record_options, open_record
from loragate.commands.selection_options import add_selection_options, selection_from
from loragate.core.arguments import path_of
from loragate.core.checkout import project_root
from loragate.core.errors import CommandError, usage_errors
from loragate.core.output import say
from loragate.core.verdict import ExitCode
from loragate.core.versions import new_run_name
from loragate.matrix.selection import Selection
from loragate.records.recorder import Recorder
from loragate.report.record import outcome, section_of
from loragate.run.folder import check_durations
from loragate.run.gate import Gate, gpu_is_visible, headline, plan_gate
from loragate.run.legs import GateSetup, legs_of
from loragate.run.schedule import spare_cores


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("gate", help="check what this machine can check, and judge")
    add_selection_options(parser)
    parser.add_argument(
        "--report", type=path_of, default=Path("report"), metavar="DIR", help="default: report"
    )
    parser.add_argument(
        "--speed",
        metavar="REV",
        help="also time lorakernels against another build, as `bench KIND --against REV` does",
    )
    add_record_options(parser, "counts, verdict and times")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitCode:
    has_gpu = gpu_is_visible()
    selection = selection_from(arguments, has_gpu=has_gpu)
    with usage_errors():
        recorder = _open_record(arguments, selection)
        if arguments.speed is not None:
            check_against(arguments.speed, project_root(), option="--speed")
    if arguments.speed is not None and not has_gpu:
        raise CommandError("--speed times compiled kernels and needs a GPU", ExitCode.USAGE)
    setup = GateSetup(
        run=new_run_name(),
        report=arguments.report.absolute(),
        selection=selection,
        has_gpu=has_gpu,
        speed_against=arguments.speed,
        durations=arguments.durations and arguments.durations.absolute(),
    )
    with usage_errors():
        check_durations(setup.durations, setup.report)
    legs = legs_of(setup)
    gate = Gate(setup, spare=spare_cores())
    opening = plan_gate(setup, legs, record=arguments.record)
    say(headline(opening))
    summary = gate.run(opening, legs)
    if recorder and gate.interrupted:
        print(f"interrupted: {recorder.path} stays as it was", file=sys.stderr)
    elif recorder and summary.plan is not None:
        recorder.save(outcome(summary))
        say(f"recorded as {recorder.section} in {recorder.path}")
    return summary.exit_code


def _open_record(arguments: argparse.Namespace, selection: Selection) -> Recorder | None:
    """ValueError for a part of a run, which is no record of all of it."""
    if arguments.record and arguments.cases:
        raise ValueError("--record takes every case; leave out --cases")
    if arguments.record and arguments.shard:
        raise ValueError("--record takes every case; leave out --shard")
    if arguments.record and arguments.draw is not None:
        raise ValueError("--record takes draws from 0 on; leave out --draw")
    section = section_of(selection.subjects, draws=len(selection.draws), repeats=selection.repeats)
    return open_record(arguments, section)
