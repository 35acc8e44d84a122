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
from loragate.core.checkout import commit_and_tree, project_root
from loragate.core.verdict import ExitCode, Verdict, worst
from loragate.records.results import ResultsError, provenance, read_section, update_section

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from loragate.core.machine import Machine

_OWN, _VLLM, _NOBODY = "lorakernels", "vllm", "none"


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
        parser.add_argument("--subject", default=_OWN, help="the implementation to judge")
    parser.add_argument(
        "--baseline",
        default=_VLLM,
        choices=None if kind.takes_any_subject else (_VLLM, _NOBODY),
        help="the one it has to beat, or 'none' (default: vllm)",
    )
    parser.add_argument(
        "--rows",
        action="append",
        default=[],
        metavar="PATTERN",
        help=f"only rows like {kind.pattern!r}; may be repeated",
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument(
        "--commit", help="what to record as the commit where the tree has no history"
    )
    parser.set_defaults(run=partial(run_kind_command, kind), subject=_OWN)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Run whichever kind was chosen."""
    code: ExitCode = arguments.run(arguments)
    return code


def run_show_command(arguments: argparse.Namespace) -> ExitCode:
    kind = KINDS[arguments.kind]
    try:
        section = read_section(arguments.record, kind.section)
        if section is None:
            return _complain(f"{arguments.record}: no section {kind.section!r}", ExitCode.USAGE)
        figures = _figures(arguments.record, kind, section)
        print(kind.markdown(figures), "", *markdown_bars(figures.bars()), sep="\n")
    except ValueError as error:
        return _complain(str(error), ExitCode.USAGE)
    return ExitCode.OK


def run_plot_command(arguments: argparse.Namespace) -> ExitCode:
    try:
        for path in write_plots(plots_of(arguments.record), arguments.out):
            print(path)
    except ValueError as error:
        return _complain(str(error), ExitCode.USAGE)
    except (MissingMatplotlib, OSError) as error:
        return _complain(str(error), ExitCode.INFRASTRUCTURE)
    return ExitCode.OK


def _figures(record: Path, kind: Kind, section: Mapping[str, Any]) -> Figures:
    """What a section holds. Raises ResultsError that names the file and the field."""
    where = f"{record}: section {kind.section!r}"
    try:
        figures: Figures = kind.read(section)
    except KeyError as error:
        raise ResultsError(f"{where}: no field {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ResultsError(f"{where}: {error}") from error
    return figures


def run_kind_command(kind: Kind, arguments: argparse.Namespace) -> ExitCode:
    try:
        rows = select_rows(kind.rows(), arguments.rows)
        if arguments.record and rows != tuple(kind.rows()):
            raise ValueError("--record takes the whole table; leave out --rows")
        if arguments.record:
            # an unreadable file must not cost a finished run
            read_section(arguments.record, kind.section)
    except ValueError as error:
        return _complain(str(error), ExitCode.USAGE)

    from loragate.core.machine import detect_machine

    machine = detect_machine()
    checkout = commit_and_tree(project_root(), ignoring=arguments.record)
    if machine.device != "cuda":
        return _complain("bench times compiled kernels and needs a GPU", ExitCode.INFRASTRUCTURE)
    from loragate.bench.contender import Unavailable, WrongResult

    try:
        figures = _measure(kind, arguments, rows, machine)
    except Unavailable as error:
        return _complain(str(error), error.code)
    except WrongResult as error:
        return _complain(str(error), ExitCode.WRONG)
    print(kind.terminal(figures))
    code = judge(figures)
    if arguments.record:
        origin = provenance(machine, commit=arguments.commit, checkout=checkout)
        payload = origin | figures.payload() | {"verdict": code.name.lower()}
        try:
            update_section(arguments.record, kind.section, payload)
        except (ResultsError, OSError) as error:
            return _complain(str(error), ExitCode.INFRASTRUCTURE)
        print(f"recorded in {arguments.record}")
    return code


def judge(figures: Figures) -> ExitCode:
    """A missed bar is wrong; a bar that was not measured, or a missing row, is incomplete."""
    verdict = worst(bar.verdict for bar in figures.bars())
    if verdict is Verdict.FAIL:
        return ExitCode.WRONG
    complete = verdict is Verdict.PASS and figures.complete
    return ExitCode.OK if complete else ExitCode.INCOMPLETE


def _measure(
    kind: Kind, arguments: argparse.Namespace, rows: Sequence[Row], machine: Machine
) -> Figures:
    from loragate.bench.contender import find_contender

    candidate = find_contender(arguments.subject)
    baseline = None if arguments.baseline == _NOBODY else find_contender(arguments.baseline)
    return kind.run(candidate, baseline, rows, machine, _progress)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _complain(message: str, code: ExitCode) -> ExitCode:
    print(f"loragate bench: {message}", file=sys.stderr)
    return code
