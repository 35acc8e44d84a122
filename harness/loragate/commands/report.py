"""`loragate report DIR`: write the pages of a run again, from its events alone.

For a run that was killed before it could write them, or for pages of a newer version of loragate.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from loragate.core.arguments import path_of
from loragate.core.errors import CommandError, usage_errors
from loragate.core.output import say
from loragate.core.verdict import ExitCode
from loragate.report.terminal import colour_for, render_summary
from loragate.report.write import write_report
from loragate.run.folder import EVENTS
from loragate.run.run_record import unwritten


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("report", help="write the pages of a run again from its events")
    parser.add_argument(
        "folder", type=path_of, metavar="DIR", help=f"the folder of a report, which holds {EVENTS}"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitCode:
    folder: Path = arguments.folder
    try:
        with usage_errors():
            summary = write_report(folder / EVENTS, folder)
    except OSError as error:
        raise CommandError(unwritten(folder, error), ExitCode.INFRASTRUCTURE) from error
    say(render_summary(summary, colour_for(sys.stdout, os.environ)))
    say(f"report: {folder}")
    return summary.exit_code
