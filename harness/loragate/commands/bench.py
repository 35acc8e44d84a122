"""`loragate bench`: time a table, record it, show or plot a record.

Exit codes: 0 every bar is met, 1 a bar is missed or a subject computes a wrong result,
2 there was no baseline or not every row ran, 3 no GPU or a subject does not run, 4 usage.
With --against: 0 no call became slower, 1 one did, 2 noise may hide a slow-down.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

from loragate.bench.asked import Asked
from loragate.bench.bars import Bar
from loragate.bench.drawing import MissingMatplotlib
from loragate.bench.kinds import KINDS, Figures, Kind
from loragate.bench.plots import plots_of, write_plots
from loragate.bench.select import Row, select_rows
from loragate.bench.speed.builds import check_against
from loragate.bench.speed.figures import SpeedFigures
from loragate.bench.speed.tables import render_terminal as render_comparison
from loragate.bench.speed.tables import summary_lines
from loragate.bench.text import markdown_bars
from loragate.commands.record_options import add_events_options, add_record_options, open_record
from loragate.core.arguments import path_of
from loragate.core.checkout import project_root
from loragate.core.errors import CommandError, usage_errors
from loragate.core.output import say
from loragate.core.verdict import ExitCode, Verdict, worst
from loragate.events.log import EventWriter
from loragate.events.model import Note
from loragate.records.results import require_section, taken_from

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loragate.bench.contender import Contender
    from loragate.core.machine import Machine

_OWN, _VLLM, _NONE = "lorakernels", "vllm", "none"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("bench", help="time subjects side by side on a GPU")
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    for name, kind in KINDS.items():
        _add_kind(kinds.add_parser(name, help=kind.help), kind)
    show = kinds.add_parser("show", help="print a recorded run as Markdown")
    show.add_argument("record", type=path_of, metavar="FILE")
    show.add_argument(
        "kind", nargs="?", choices=list(KINDS), default="dense", help="(default: dense)"
    )
    show.set_defaults(run=run_show_command)
    plot = kinds.add_parser("plot", help="draw the plots of a record as SVG")
    plot.add_argument("record", type=path_of, metavar="FILE")
    plot.add_argument("--out", type=path_of, required=True, metavar="FOLDER")
    plot.set_defaults(run=run_plot_command)


def _add_kind(parser: argparse.ArgumentParser, kind: Kind) -> None:
    if kind.takes_any_subject:
        parser.add_argument(
            "--subject", default=_OWN, help="the implementation to judge (default: lorakernels)"
        )
    if kind.has_baseline:
        parser.add_argument(
            "--baseline",
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
    if kind.asked is not None:
        _add_asked(parser, kind)
    if kind.measure_target is not None:
        parser.add_argument(
            "--against",
            metavar="REV",
            help="compare lorakernels with another build of it: a revision of this checkout, or a "
            "folder that holds one, such as an environment",
        )
        add_events_options(parser)
    if kind.default_seed is not None:
        parser.add_argument(
            "--seed",
            type=int,
            default=kind.default_seed,
            help=f"what some of the rows are drawn from (default: {kind.default_seed})",
        )
    add_record_options(parser, "the figures")
    parser.set_defaults(
        run=partial(run_kind_command, kind), subject=_OWN, baseline=None, against=None
    )


def _add_asked(parser: argparse.ArgumentParser, kind: Kind) -> None:
    """Options for other rows than those of the table."""
    group = parser.add_argument_group("other rows than those of the table")
    group.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="SHAPE",
        help=f"a layer like {kind.shape!r}; may be repeated",
    )
    for option, what in (("--rank", "a rank (default: 16)"), ("--tokens", "a number of rows")):
        group.add_argument(
            option,
            action="append",
            type=int,
            default=[],
            metavar="N",
            help=f"{what} of the layers; may be repeated",
        )
    group.add_argument("--drawn", type=int, metavar="N", help="N points, drawn from a seed")
    group.add_argument("--seed", type=int, metavar="S", help="of the drawn points (default: 0)")


def _asked(kind: Kind, arguments: argparse.Namespace) -> Asked:
    if kind.asked is None:
        return Asked()
    return Asked(
        shapes=tuple(arguments.shape),
        ranks=tuple(arguments.rank),
        tokens=tuple(arguments.tokens),
        drawn=arguments.drawn,
        seed=arguments.seed,
    )


def _rows(kind: Kind, asked: Asked, arguments: argparse.Namespace) -> Sequence[Row]:
    """The rows to measure. Raises ValueError."""
    if asked:
        assert kind.asked is not None
        for option, value in (("--record", arguments.record), ("--against", arguments.against)):
            if value is not None:
                raise ValueError(f"{option} takes rows of the table; leave out the others")
        return select_rows(kind.asked(asked), arguments.rows)
    table = kind.rows() if kind.default_seed is None else kind.rows(arguments.seed)
    if arguments.against is not None:
        table = tuple(filter(kind.compares, table))
    rows = select_rows(table, arguments.rows)
    if arguments.record and rows != tuple(table):
        raise ValueError("--record takes the whole table; leave out --rows")
    return rows


def run(arguments: argparse.Namespace) -> ExitCode:
    """Run the chosen kind."""
    code: ExitCode = arguments.run(arguments)
    return code


def run_show_command(arguments: argparse.Namespace) -> ExitCode:
    kind = KINDS[arguments.kind]
    with usage_errors():
        section = require_section(arguments.record, kind.section)
        with taken_from(f"{arguments.record}: section {kind.section!r}"):
            figures: Figures = kind.read(section)
            # a field of another type shows only here
            lines = [kind.markdown(figures), "", *markdown_bars(figures.bars())]
        say("\n".join(lines))
    return ExitCode.OK


def run_plot_command(arguments: argparse.Namespace) -> ExitCode:
    try:
        with usage_errors():
            with taken_from(str(arguments.record)):
                plots = plots_of(arguments.record)
            for path in write_plots(plots, arguments.out):
                say(str(path))
    except (MissingMatplotlib, OSError) as error:
        raise CommandError(str(error), ExitCode.INFRASTRUCTURE) from error
    return ExitCode.OK


def run_kind_command(kind: Kind, arguments: argparse.Namespace) -> ExitCode:
    with usage_errors():
        asked = _asked(kind, arguments)
        rows = _rows(kind, asked, arguments)
        if arguments.against is not None and (arguments.baseline or arguments.subject != _OWN):
            raise ValueError("--against compares builds of lorakernels; leave out other subjects")
        if arguments.against is not None:
            check_against(arguments.against, project_root())
        section = kind.section if arguments.against is None else f"{kind.section}_against"
        recorder = open_record(arguments, section)
    if arguments.against is None:
        figures = _measure(kind, arguments, rows)
        say(kind.terminal(figures))
        code = judge_asked(cast(Compared, figures)) if asked else judge(figures)
        payload = figures.payload()
    else:
        compared = _compare(kind, arguments, rows)
        code, payload = compared.exit_code, compared.payload()
    if recorder:
        recorder.save(payload | {"verdict": code.name.lower()})
        say(f"recorded in {recorder.path}")
    return code


def _compare(kind: Kind, arguments: argparse.Namespace, rows: Sequence[Row]) -> SpeedFigures:
    machine = _gpu()
    from loragate.bench.speed.comparing import Request, compare_builds

    request = Request(
        kind=kind.name,
        rows=tuple(row.id for row in rows),
        seed=None if kind.default_seed is None else arguments.seed,
        against=arguments.against,
    )
    with usage_errors():
        compared = compare_builds(request, machine, _progress)
    say(render_comparison(compared))
    if arguments.events:
        with EventWriter(arguments.events, run=arguments.run_name) as writer:
            for line in summary_lines(compared):
                writer.write(Note(text=line))
    return compared


def judge(figures: Figures) -> ExitCode:
    """A missed bar is wrong; a bar that was not measured, or a missing row, is incomplete."""
    verdict = worst(bar.verdict for bar in figures.bars())
    if verdict is Verdict.FAIL:
        return ExitCode.WRONG
    complete = verdict is Verdict.PASS and figures.complete
    return ExitCode.OK if complete else ExitCode.INCOMPLETE


class Compared(Protocol):
    """Figures of rows that are each compared with a baseline."""

    def bars(self) -> tuple[Bar, ...]: ...

    def ratios(self) -> tuple[float | None, ...]: ...


def judge_asked(figures: Compared) -> ExitCode:
    """Of other rows than those of the table: no bar may be missed, and each row needs its ratio;
    bars about sizes that nobody asked for are not measured."""
    if Verdict.FAIL in [bar.verdict for bar in figures.bars()]:
        return ExitCode.WRONG
    return ExitCode.INCOMPLETE if None in figures.ratios() else ExitCode.OK


def _measure(kind: Kind, arguments: argparse.Namespace, rows: Sequence[Row]) -> Figures:
    machine = _gpu()
    from loragate.bench.contender import Unavailable, WrongResult, find_contender

    try:
        candidate = find_contender(arguments.subject)
        baseline = _baseline(kind, arguments.baseline or _VLLM)
        return kind.run(candidate, baseline, rows, machine, _progress)
    except Unavailable as error:
        raise CommandError(str(error), error.code) from error
    except WrongResult as error:
        raise CommandError(str(error), ExitCode.WRONG) from error


def _baseline(kind: Kind, name: str) -> Contender | None:
    from loragate.bench.contender import find_contender

    return find_contender(name) if kind.has_baseline and name != _NONE else None


def _gpu() -> Machine:
    """Raises CommandError where there is none."""
    from loragate.core.machine import detect_machine

    machine = detect_machine()
    if machine.device != "cuda":
        message = "bench times compiled kernels and needs a GPU"
        raise CommandError(message, ExitCode.INFRASTRUCTURE)
    return machine


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
