"""`loragate docs`: bring the generated parts of README and docs up to date with the records.

Exit codes: 0 everything is up to date, 1 with --check something is stale, 3 matplotlib is missing
or a file cannot be written, 4 a record or a page cannot be used.
"""

from __future__ import annotations

import argparse
import sys

from loragate.bench.drawing import MissingMatplotlib
from loragate.bench.plots import write_plots
from loragate.core.checkout import project_root
from loragate.core.errors import CommandError, usage_errors
from loragate.core.output import say
from loragate.core.verdict import ExitCode
from loragate.docs.pages import PLOTS, stale_parts, stale_plots, write_pages


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "docs", help="write the tables, figures and plots of the docs from ci/results"
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if something is stale"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitCode:
    root = project_root()
    try:
        with usage_errors():
            stale = list(stale_parts(root))
            if arguments.check:
                for part in stale:
                    print(f"loragate docs: stale: {part}", file=sys.stderr)
                return ExitCode.WRONG if stale else ExitCode.OK
            write_pages(root)
            # only these: the bytes of a plot also depend on the version of matplotlib
            write_plots(stale_plots(root), root / PLOTS)
    except (MissingMatplotlib, OSError) as error:
        raise CommandError(str(error), ExitCode.INFRASTRUCTURE) from error
    for part in stale:
        say(f"updated {part}")
    return ExitCode.OK
