"""Types of command-line arguments that argparse and pytest share."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def count_from(lowest: int) -> Callable[[str], int]:
    """A type for an argument that is an integer of at least `lowest`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"must be a number from {lowest} up (got {text!r})")
        return int(text)

    return parse
