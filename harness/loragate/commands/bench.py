"""`loragate bench`: time a table, record it, show or plot a record.

Exit codes: 0 every bar is met, 1 a bar is missed or a subject computes a wrong result,
2 there was no baseline or not every row ran, 3 no GPU or a subject does not run, 4 usage.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from loragate.bench.drawing import MissingMatplotlib
from loragate.bench.kinds import KINDS, Figures, Kind
from loragate.bench.plots import plots_of, write_plots
from loragate.bench.select import Row, select_rows
from loragate.bench.text import markdown_bars
from loragate.commands.record_options import add_record_options, open_record
from loragate.core.errors import CommandError, usage_errors
from loragate.core.verdict import ExitCode, Verdict, worst
from loragate.records.results import ResultsError, require_section

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

_OWN, _VLLM, _NONE = "lorakernels", "vllm", "none"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("bench", help="time subjects side by side on a GPU")
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    for name, kind in KINDS.items():
        _add_kind(kinds.add_parser(name, help=kind.help), kind)
    show = kinds.add_parser("show", help="print a recorded run as Markdown")
    show.add_argument("record", type=Path, metavar="FILE")
    show.add_argument(
        "kind", nargs="?", choices=list(KINDS), default="dense", help="(default: dense)"
    )
    show.set_defaults(run=run_show_command)
    plot = kinds.add_parser("plot", help="draw the plots of a record as SVG")
    plot.add_argument("record", type=Path, metavar="FILE")
    plot.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    plot.set_defaults(run=run_plot_command)


def _add_kind(parser: argparse.ArgumentParser, kind: Kind) -> None:
    if kind.takes_any_subject:
        parser.add_argument(
            "--subject", default=_OWN, help="the implementation to judge (default: lorakernels)"
        )
    parser.add_argument(
        "--baseline",
        default=_VLLM,
        choices=None if kind.takes_any_subject else (_VLLM, _NONE),
        help="the implementation to beat, or 'none' (default: vllm)",
    )
    parser.add_argument(
        "--rows",
        action="append",
        default=[],
        metavar="PATTERN",
        help=f"only rows like {kind.pattern!r}; may be repeated",
    )
    if kind.default_seed is not None:
        parser.add_argument(
            "--seed",
            type=int,
            default=kind.default_seed,
            help=f"what some of the rows are drawn from (default: {kind.default_seed})",
        )
    add_record_options(parser, "the figures")
    parser.set_defaults(run=partial(run_kind_command, kind), subject=_OWN)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Run the chosen kind."""
    code: ExitCode = arguments.run(arguments)
    return code


def run_show_command(arguments: argparse.Namespace) -> ExitCode:
    kind = KINDS[arguments.kind]
    with usage_errors():
        section = require_section(arguments.record, kind.section)
        figures = _figures(arguments.record, kind, section)
        print(kind.markdown(figures), "", *markdown_bars(figures.bars()), sep="\n")
    return ExitCode.OK


def run_plot_command(arguments: argparse.Namespace) -> ExitCode:
    try:
        with usage_errors():
            for path in write_plots(plots_of(arguments.record), arguments.out):
                print(path)
    except (MissingMatplotlib, OSError) as error:
        raise CommandError(str(error), ExitCode.INFRASTRUCTURE) from error
    return ExitCode.OK


def _figures(record: Path, kind: Kind, section: Mapping[str, Any]) -> Figures:
    """The figures of a section. Raises ResultsError that names the file and the field."""
    where = f"{record}: section {kind.section!r}"
    try:
        figures: Figures = kind.read(section)
    except KeyError as error:
        raise ResultsError(f"{where}: no field {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ResultsError(f"{where}: {error}") from error
    return figures


def run_kind_command(kind: Kind, arguments: argparse.Namespace) -> ExitCode:
    with usage_errors():
        table = kind.rows() if kind.default_seed is None else kind.rows(arguments.seed)
        rows = select_rows(table, arguments.rows)
        if arguments.record and rows != tuple(table):
            raise ValueError("--record takes the whole table; leave out --rows")
        recorder = open_record(arguments, kind.section)
    figures = _measure(kind, arguments, rows)
    print(kind.terminal(figures))
    code = judge(figures)
    if recorder:
        recorder.save(figures.payload() | {"verdict": code.name.lower()})
        print(f"recorded in {recorder.path}")
    return code


def judge(figures: Figures) -> ExitCode:
    """A missed bar is wrong; a bar that was not measured, or a missing row, is incomplete."""
    verdict = worst(bar.verdict for bar in figures.bars())
    if verdict is Verdict.FAIL:
        return ExitCode.WRONG
    complete = verdict is Verdict.PASS and figures.complete
    return ExitCode.OK if complete else ExitCode.INCOMPLETE


def _measure(kind: Kind, arguments: argparse.Namespace, rows: Sequence[Row]) -> Figures:
    from loragate.core.machine import detect_machine

    machine = detect_machine()
    if machine.device != "cuda":
        message = "bench times compiled kernels and needs a GPU"
        raise CommandError(message, ExitCode.INFRASTRUCTURE)
    from loragate.bench.contender import Unavailable, WrongResult, find_contender

    try:
        candidate = find_contender(arguments.subject)
        baseline = None if arguments.baseline == _NONE else find_contender(arguments.baseline)
        return kind.run(candidate, baseline, rows, machine, _progress)
    except Unavailable as error:
        raise CommandError(str(error), error.code) from error
    except WrongResult as error:
        raise CommandError(str(error), ExitCode.WRONG) from error


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
