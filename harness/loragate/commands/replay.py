"""`loragate replay`: one case again, in this process, with the evidence of every oracle.

No worker, no watchdog: a debugger or a sanitizer can be put around it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from difflib import get_close_matches

from loragate.commands.selection_options import add_matrix_option, matrix_files
from loragate.core.machine import select_interpreter
from loragate.core.verdict import EXIT_CODES, ExitCode
from loragate.matrix.case import Case
from loragate.matrix.ids import case_id
from loragate.matrix.load import load_cases
from loragate.matrix.selection import CaseRun, split_id
from loragate.report.evidence import render_evidence


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("replay", help="run one case again and print its evidence")
    parser.add_argument("run_id", metavar="ID", help="as the report or `loragate plan` prints it")
    parser.add_argument("--attempt", type=int, metavar="N", help="draw the data of attempt N")
    add_matrix_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        cases = load_cases(matrix_files(arguments))
        wanted = _find(arguments.run_id, arguments.attempt, cases)
        return _replay(wanted).value
    except ValueError as error:
        print(error, file=sys.stderr)
        return ExitCode.USAGE.value


def _replay(wanted: CaseRun) -> ExitCode:
    select_interpreter()
    # kernels may only be imported once the interpreter is selected
    from loragate.run.trial import open_trial, run_case

    trial = open_trial(wanted)
    if isinstance(trial, str):
        print(f"{wanted.run_id} cannot run here: {trial}", file=sys.stderr)
        return ExitCode.INCOMPLETE
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    finished = run_case(wanted, trial, worker="replay", gpu=gpu)
    print(f"seed {wanted.seed} on {trial.machine.device} ({trial.machine.name})")
    print(render_evidence(finished))
    return EXIT_CODES[finished.verdict]


def _find(text: str, attempt: int | None, cases: Iterable[Case]) -> CaseRun:
    cases = tuple(cases)
    found = split_id(text, cases)
    if found is None:
        names = [case_id(case) for case in cases]
        near = get_close_matches(text.partition(".")[2], names, n=3, cutoff=0.5)
        hint = "".join(f"\n  nearest: SUBJECT.{name}" for name in near)
        raise ValueError(f"no case has the id {text!r}, of {len(names)} cases{hint}")
    return found if attempt is None else CaseRun(found.subject, found.case, attempt)
