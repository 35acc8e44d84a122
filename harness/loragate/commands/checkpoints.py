"""`loragate checkpoints`: small models and adapters whose tokens name the adapter, for engines."""

from __future__ import annotations

import argparse

from loragate.core.arguments import path_of
from loragate.core.errors import CommandError, usage_errors
from loragate.core.output import say
from loragate.core.verdict import ExitCode
from loragate.engine.language import KINDS

_ALL = "all"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("checkpoints", help="write small models and adapters")
    parser.add_argument(
        "--folder", type=path_of, required=True, metavar="FOLDER", help="where they are written"
    )
    parser.add_argument(
        "--model", choices=(*KINDS, _ALL), default=_ALL, help="which of them (default: all)"
    )
    parser.add_argument(
        "--adapters", type=int, default=4, metavar="N", help="of each model (default: 4)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitCode:
    from loragate.engine.checkpoints import checkpoint

    for kind in KINDS if arguments.model == _ALL else (arguments.model,):
        try:
            with usage_errors():
                made, is_new = checkpoint(arguments.folder, kind, arguments.adapters)
        except OSError as error:
            raise CommandError(str(error), ExitCode.INFRASTRUCTURE) from error
        say(f"{made.folder}: {'written' if is_new else 'unchanged'}")
    return ExitCode.OK
