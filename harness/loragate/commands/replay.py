"""`loragate replay`: run one case again, in this process, with the evidence of every oracle.

There is no worker and no watchdog, so a debugger or a sanitizer can be put around it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches

from loragate.commands.selection_options import add_matrix_option, matrix_files
from loragate.core.arguments import count_from
from loragate.core.errors import CommandError, usage_errors
from loragate.core.machine import select_interpreter
from loragate.core.verdict import EXIT_CODES, ExitCode, Verdict
from loragate.matrix.case import Case
from loragate.matrix.case_run import CaseRun, find_run
from loragate.matrix.ids import case_id
from loragate.matrix.load import load_cases
from loragate.report.evidence import render_evidence


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("replay", help="run one case again and print its evidence")
    parser.add_argument("run_id", metavar="ID", help="as the report or `loragate plan` prints it")
    parser.add_argument(
        "--draw", type=count_from(0), metavar="N", help="use the random data of draw N"
    )
    parser.add_argument(
        "--repeats",
        type=count_from(1),
        metavar="N",
        help="run the same data N times, until a run does not pass",
    )
    add_matrix_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitCode:
    with usage_errors():
        found = _find(arguments.run_id, load_cases(matrix_files(arguments)))
    first = replace(found, draw=_given(arguments.draw, found.draw), repeat=0)
    return _replay(first, repeats=_given(arguments.repeats, found.repeat + 1))


def _replay(first: CaseRun, *, repeats: int) -> ExitCode:
    """Run the data of `first` up to `repeats` times in a row, as the repeats of a gate do."""
    select_interpreter()
    # kernels may only be imported once the interpreter is selected
    from loragate.run.trial import open_trial, run_case

    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    for repeat in range(repeats):
        wanted = replace(first, repeat=repeat)
        # the subject may be unknown
        with usage_errors():
            trial = open_trial(wanted)
        if isinstance(trial, str):
            raise CommandError(f"{wanted.run_id} cannot run here: {trial}", ExitCode.INCOMPLETE)
        if repeat == 0:
            print(f"seed {wanted.seed} on {trial.machine.device} ({trial.machine.name})")
        finished = run_case(wanted, trial, worker="replay", gpu=gpu)
        if finished.verdict is not Verdict.PASS or repeat + 1 == repeats:
            break
        print(f"repeat {repeat}: {finished.verdict.upper()}", flush=True)
    print(render_evidence(finished))
    return EXIT_CODES[finished.verdict]


def _find(text: str, cases: Iterable[Case]) -> CaseRun:
    cases = tuple(cases)
    found = find_run(text, cases)
    if found is None:
        names = [case_id(case) for case in cases]
        near = get_close_matches(text.partition(".")[2], names, n=3, cutoff=0.5)
        hint = "".join(f"\n  nearest: SUBJECT.{name}" for name in near)
        raise ValueError(f"no case has the id {text!r}, of {len(names)} cases{hint}")
    return found


def _given(value: int | None, default: int) -> int:
    return default if value is None else value
