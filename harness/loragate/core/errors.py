"""The errors that end a command or a module, with its exit code."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from loragate.core.verdict import ExitCode


class CommandError(Exception):
    """A command cannot go on. `loragate.cli` prints the message and exits with `exit_code`."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextmanager
def usage_errors() -> Iterator[None]:
    """A ValueError within is about what the user gave, and ends the command as wrong usage."""
    try:
        yield
    except ValueError as error:
        raise CommandError(str(error), ExitCode.USAGE) from error


def exit_code_of(main: Callable[[], int]) -> int:
    """What `main` returns; any exception is the infrastructure's failure, with its stack on stderr.

    Python's own exit code for it, 1, would mean a wrong result.
    """
    try:
        return main()
    except Exception:
        traceback.print_exc()
        return ExitCode.INFRASTRUCTURE.value
