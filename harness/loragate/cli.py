"""`loragate gate|plan|replay|faults|bench|findings|docs`.

Invariant: parsing imports no torch; each command imports what it needs when it runs. Every
command exits as `loragate.core.verdict.ExitCode` says; one that is interrupted is incomplete.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from loragate.commands import bench as bench
from loragate.commands import faults as faults
from loragate.commands import findings as findings
from loragate.commands import docs, gate, replay
from loragate.commands import plan as show_plan
from loragate.core.signals import ended_by_signals
from loragate.core.verdict import ExitCode
from loragate.matrix.problems import nearest

_COMMANDS = (gate, show_plan, replay, faults, bench, findings, docs)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _Parser(prog="loragate", description="Correctness gate for multi-LoRA kernels.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        # told by the command, which knows what it takes
        commands.choices[parsed.command].refuse(unknown)
    try:
        with ended_by_signals():
            return int(parsed.run(parsed))
    except KeyboardInterrupt:
        print(f"loragate {parsed.command}: interrupted", file=sys.stderr)
        return ExitCode.INCOMPLETE.value
    except Exception as error:
        # python's own 1 would say that a result is wrong
        what = next(iter(str(error).splitlines()), "")
        print(f"loragate {parsed.command}: {type(error).__name__}: {what}", file=sys.stderr)
        traceback.print_exc()
        return ExitCode.INFRASTRUCTURE.value


class _Parser(argparse.ArgumentParser):
    """Answers an unknown word with the nearest known one."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(ExitCode.USAGE.value, f"{self.prog}: {message}\n")

    def refuse(self, arguments: Sequence[str]) -> NoReturn:
        """Exit because of arguments that no option takes."""
        hints = (_hint(word.partition("=")[0], self._option_string_actions) for word in arguments)
        self.error(f"unknown arguments: {' '.join(arguments)}{next(filter(None, hints), '')}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        allowed = [str(choice) for choice in action.choices]
        message = f"there is no {value!r}; known are {', '.join(allowed)}{_hint(value, allowed)}"
        raise argparse.ArgumentError(action, message)


def _hint(given: str, allowed: Iterable[str]) -> str:
    near = nearest(given, allowed)
    return f"; did you mean {near}?" if near else ""
