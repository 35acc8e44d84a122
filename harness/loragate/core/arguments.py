"""Types of command-line arguments that argparse and pytest share, and the parser of commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from loragate.core.verdict import ExitCode

# what Python turns into a number at once
_MOST_DIGITS = 18


class Parser(argparse.ArgumentParser):
    """Wrong usage exits with 4: that of argparse, 2, would mean that something was not judged."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(ExitCode.USAGE.value, f"{self.prog}: {message}\n")


def path_of(text: str) -> Path:
    """A type for an argument that is a path. An empty one, as of a variable of a shell that is not
    set, would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError(f"must be a path (got {text!r})")
    return Path(text)


def count_from(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    """A type for an argument that is an integer of at least `lowest`, and at most `highest`."""

    def parse(text: str) -> int:
        number = int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else -1
        if number < lowest or (highest is not None and number > highest):
            allowed = f"from {lowest} up" if highest is None else f"from {lowest} to {highest}"
            if highest is None and len(text) > _MOST_DIGITS:
                allowed += f", of at most {_MOST_DIGITS} digits"
            raise argparse.ArgumentTypeError(f"must be a number {allowed} (got {text!r})")
        return number

    return parse
