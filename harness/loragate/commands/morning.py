"""`loragate morning`: what the scans of a history have found."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path

from loragate.commands.history import add_history_option, open_named
from loragate.core.arguments import path_of
from loragate.core.checkout import project_root
from loragate.core.errors import CommandError, usage_errors
from loragate.core.files import write_atomically
from loragate.core.output import say
from loragate.core.verdict import ExitCode
from loragate.history import History
from loragate.matrix.ids import run_id
from loragate.matrix.load import default_files, load_cases
from loragate.nightly.morning import Morning, morning
from loragate.nightly.pages.html import render_html
from loragate.nightly.pages.summary import render_markdown
from loragate.nightly.pages.terminal import render_terminal
from loragate.nightly.quarantine import Quarantined, check_cases, check_dates, read_quarantine
from loragate.report.colour import colour_for
from loragate.report.write import append_to_step
from loragate.subjects.registry import SUBJECTS

HTML_NAME = "morning.html"
MARKDOWN_NAME = "morning.md"
_QUARANTINE = project_root() / "ci" / "quarantine.yaml"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("morning", help="show what scans have found")
    add_history_option(parser)
    add_page_options(parser)
    parser.set_defaults(run=run)


def add_page_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--report",
        type=path_of,
        default=Path("report"),
        metavar="DIR",
        help=f"folder of {HTML_NAME} and {MARKDOWN_NAME} (default: report)",
    )
    parser.add_argument(
        "--quarantine",
        type=path_of,
        metavar="FILE",
        help="YAML file of cases that are known to be flaky (default: ci/quarantine.yaml)",
    )


def run(arguments: argparse.Namespace) -> ExitCode:
    with open_named(arguments.history, is_made=False) as history:
        return write_morning(arguments, history).exit_code


def check_report(arguments: argparse.Namespace) -> None:
    """Before hours are spent on what could not be shown. Raises CommandError."""
    try:
        arguments.report.mkdir(parents=True, exist_ok=True)
        if not os.access(arguments.report, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _unwritten(arguments.report, error) from error


def _unwritten(report: Path, error: OSError) -> CommandError:
    return CommandError(
        f"report folder {report}: cannot be written: {error.strerror}", ExitCode.INFRASTRUCTURE
    )


def write_morning(
    arguments: argparse.Namespace, history: History, *, cases: Sequence[str] = ()
) -> Morning:
    """Print, write and return the page. cases: those that should have been judged. Raises
    CommandError."""
    page = _page(arguments, history, cases)
    # first: what hours have found is shown although the disk of the report is full
    say(render_terminal(page, colour_for(sys.stdout, os.environ)))
    try:
        write_atomically(arguments.report / HTML_NAME, render_html(page))
        write_atomically(arguments.report / MARKDOWN_NAME, render_markdown(page))
    except OSError as error:
        raise _unwritten(arguments.report, error) from error
    append_to_step(lambda: render_markdown(page), os.environ)
    say(f"page: {arguments.report / HTML_NAME}")
    return page


def _page(arguments: argparse.Namespace, history: History, cases: Sequence[str]) -> Morning:
    trials = list(history.trials())
    entries = quarantined(arguments, [*cases, *{trial.case for trial in trials}])
    today = _today()
    return morning(history.runs(), trials, entries, cases=cases, today=today)


def quarantined(arguments: argparse.Namespace, cases: Sequence[str]) -> tuple[Quarantined, ...]:
    """The entries of the file. Raises CommandError, also for a case that does not exist: it is one
    of `cases`, or of the default ones of a subject that comes with the harness."""
    path, known = arguments.quarantine or _QUARANTINE, set(cases)
    with usage_errors():
        if arguments.quarantine and not path.exists():
            # without it the flakes that it lists would be reported as new ones
            raise ValueError(f"--quarantine {path}: there is no such file")
        entries = read_quarantine(path)
        check_dates(path, entries, _today())
        if any(entry.case not in known for entry in entries):
            shipped = load_cases(default_files(project_root()))
            known |= {run_id(subject, case) for subject in SUBJECTS for case in shipped}
        check_cases(path, entries, known)
    return entries


def _today() -> date:
    return datetime.now(UTC).date()
