"""`loragate plan`: what would run here, and what would not and why, without running it."""

from __future__ import annotations

import argparse

from loragate.commands.selection_options import add_selection_options, selection_from
from loragate.core.errors import usage_errors
from loragate.core.machine import select_interpreter
from loragate.core.output import say
from loragate.core.verdict import ExitCode
from loragate.matrix.show import plan_json, render_plan


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("plan", help="show what would run here, and why not")
    add_selection_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitCode:
    from loragate.core.machine import detect_machine
    from loragate.run.planning import plan_selection

    select_interpreter()
    selection = selection_from(arguments, has_gpu=not detect_machine().interpreted)
    with usage_errors():
        made, _ = plan_selection(selection)
        if selection.shard is not None:
            made = made.of(selection.shard.part(made.run_ids))
    say((plan_json if arguments.json else render_plan)(made), end="")
    return ExitCode.OK
