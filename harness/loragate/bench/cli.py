"""`loragate bench`: time the dense table, record it, show a record.

Exit codes: 0 every bar is met, 1 a bar is missed or a subject computes something else,
2 there was no baseline or not every row ran, 3 no GPU or a subject does not run, 4 usage.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from loragate.bench.figures import DenseFigures
from loragate.bench.rows import dense_rows, select_rows
from loragate.bench.tables import render_markdown, render_terminal
from loragate.results import ResultsError, provenance, read_section, update_section
from loragate.verdict import ExitCode, Verdict, worst

if TYPE_CHECKING:
    from loragate.bench.dense import Contender

SECTION = "bench_dense"
_NOBODY = "none"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("bench", help="time subjects side by side on a GPU")
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    dense = kinds.add_parser("dense", help="what LoRA adds to the base GEMM of dense layers")
    dense.add_argument("--subject", default="lorakernels", help="the implementation to judge")
    dense.add_argument(
        "--baseline", default="vllm", help="the one it has to beat, or 'none' (default: vllm)"
    )
    dense.add_argument(
        "--rows",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only rows like 'qkv.m*.r16'; may be repeated",
    )
    dense.add_argument("--record", type=Path, metavar="FILE", help="write the figures to FILE")
    dense.add_argument(
        "--commit", help="what to record as the commit where the tree has no history"
    )
    dense.set_defaults(run=run_dense_command)
    show = kinds.add_parser("show", help="print a recorded run as Markdown")
    show.add_argument("record", type=Path, metavar="FILE")
    show.set_defaults(run=run_show_command)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Run whichever kind was chosen."""
    code: ExitCode = arguments.run(arguments)
    return code


def run_show_command(arguments: argparse.Namespace) -> ExitCode:
    try:
        section = read_section(arguments.record, SECTION)
        if section is None:
            return _complain(f"{arguments.record}: no section {SECTION!r}", ExitCode.USAGE)
        print(render_markdown(DenseFigures.from_payload(section)))
    except ValueError as error:
        return _complain(str(error), ExitCode.USAGE)
    return ExitCode.OK


def run_dense_command(arguments: argparse.Namespace) -> ExitCode:
    try:
        rows = select_rows(arguments.rows)
        if arguments.record and rows != dense_rows():
            raise ValueError("--record takes the whole table; leave out --rows")
        if arguments.record:
            # an unreadable file must not cost a finished run
            read_section(arguments.record, SECTION)
    except ValueError as error:
        return _complain(str(error), ExitCode.USAGE)

    from loragate.machine import detect_machine

    machine = detect_machine()
    if machine.device != "cuda":
        return _complain("bench times compiled kernels and needs a GPU", ExitCode.INFRASTRUCTURE)
    from loragate.bench.dense import WrongResult, run_dense

    try:
        candidate = _contender(arguments.subject)
        baseline = None if arguments.baseline == _NOBODY else _contender(arguments.baseline)
        figures = run_dense(candidate, baseline, rows, machine, _progress)
    except _Unavailable as error:
        return _complain(str(error), error.code)
    except WrongResult as error:
        return _complain(str(error), ExitCode.WRONG)
    print(render_terminal(figures))
    code = judge(figures)
    if arguments.record:
        origin = provenance(machine, commit=arguments.commit)
        payload = origin | figures.payload() | {"verdict": code.name.lower()}
        try:
            update_section(arguments.record, SECTION, payload)
        except (ResultsError, OSError) as error:
            return _complain(str(error), ExitCode.INFRASTRUCTURE)
        print(f"recorded in {arguments.record}")
    return code


def judge(figures: DenseFigures) -> ExitCode:
    """A missed bar is wrong; a bar that was not measured, or a missing row, is incomplete."""
    verdict = worst(bar.verdict for bar in figures.bars())
    if verdict is Verdict.FAIL:
        return ExitCode.WRONG
    complete = verdict is Verdict.PASS and figures.complete
    return ExitCode.OK if complete else ExitCode.INCOMPLETE


class _Unavailable(Exception):
    def __init__(self, message: str, code: ExitCode) -> None:
        super().__init__(message)
        self.code = code


def _contender(name: str) -> Contender:
    from loragate.bench.dense import Contender
    from loragate.machine import detect_machine
    from loragate.subjects import find_subject

    try:
        subject = find_subject(name)
    except (ValueError, ImportError) as error:
        raise _Unavailable(str(error), ExitCode.USAGE) from error
    have = subject.capabilities(detect_machine())
    if isinstance(have, str):
        raise _Unavailable(f"{name}: {have}", ExitCode.INFRASTRUCTURE)
    return Contender(subject, have)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _complain(message: str, code: ExitCode) -> ExitCode:
    print(f"loragate bench: {message}", file=sys.stderr)
    return code
