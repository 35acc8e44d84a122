"""The error that ends a command, with its exit code."""

from __future__ import annotations

from collections.abc import Iterator
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
