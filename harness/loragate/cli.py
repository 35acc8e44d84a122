"""The command `loragate`.

Invariant: parsing imports no torch; each command imports what it needs when it runs. Exit codes
are those of `loragate.core.verdict.ExitCode`; an interrupted command is incomplete.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from loragate.core.arguments import Parser
from loragate.core.errors import CommandError
from loragate.core.signals import ended_by_signals
from loragate.core.verdict import ExitCode
from loragate.matrix.problems import nearest

# modules of loragate.commands
_COMMANDS = (
    *("gate", "plan", "replay", "report", "merge", "scan", "morning", "history"),
    *("faults", "mutants", "bench", "findings", "generate", "checkpoints", "docs"),
)
# former names of options, as older reports print them
_RENAMED = {"--attempt": "--draw"}
# variables that add options and plug-ins to every session of pytest
_OF_PYTEST = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")


def _parsed(arguments: Sequence[str]) -> Sequence[str]:
    """The commands whose options count; some of them take a second to import."""
    first = arguments[0] if arguments else ""
    return [first] if first in _COMMANDS else _COMMANDS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _Parser(prog="loragate", description="Correctness gate for multi-LoRA kernels.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    given = sys.argv[1:] if arguments is None else arguments
    for name in _parsed(given):
        import_module(f"loragate.commands.{name}").add_parser(commands)
    parsed, unknown = parser.parse_known_args(given)
    if unknown:
        # only the parser of the command has the options to suggest
        commands.choices[parsed.command].refuse(unknown, given)
    # a command decides what its processes of pytest run
    for name in _OF_PYTEST:
        os.environ.pop(name, None)
    try:
        with ended_by_signals():
            return int(parsed.run(parsed))
    except CommandError as error:
        return _fail(parsed.command, str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail(parsed.command, "interrupted", ExitCode.INCOMPLETE)
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "")
        # python's own exit code, 1, would mean a wrong result
        code = _fail(
            parsed.command, f"{type(error).__name__}: {first_line}", ExitCode.INFRASTRUCTURE
        )
        traceback.print_exc()
        return code


def _fail(command: str, message: str, code: ExitCode) -> int:
    print(f"loragate {command}: {message}", file=sys.stderr)
    return code.value


class _Parser(Parser):
    """A parser whose errors name the nearest known choice."""

    def refuse(self, arguments: Sequence[str], given: Sequence[str]) -> NoReturn:
        """Exit because of `arguments`, those of all `given` ones that no option takes."""
        names = [word.partition("=")[0] for word in arguments]
        of_action = self._options_of_action(given)
        hints = (self._hint_at(name, of_action) for name in names)
        self.error(f"unknown arguments: {' '.join(arguments)}{next(filter(None, hints), '')}")

    def _options_of_action(self, given: Sequence[str]) -> Iterable[str]:
        """The options of the action that is given, of a command with actions of its own."""
        for actions in self._actions:
            if isinstance(actions, argparse._SubParsersAction):
                chosen = next(word for word in given if word in actions.choices)
                options: Iterable[str] = actions.choices[chosen]._option_string_actions
                return options
        return ()

    def _hint_at(self, name: str, of_action: Iterable[str]) -> str:
        known = self._option_string_actions
        if name in known:
            return f"; {name} must come before the action"
        return _hint(_RENAMED.get(name, name), {*known, *of_action})

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        allowed = [str(choice) for choice in action.choices]
        message = f"there is no {value!r}; known are {', '.join(allowed)}{_hint(value, allowed)}"
        raise argparse.ArgumentError(action, message)


def _hint(given: str, allowed: Iterable[str]) -> str:
    near = nearest(given, allowed)
    return f"; did you mean {near}?" if near else ""
