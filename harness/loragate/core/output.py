"""Standard output that may go away while a command runs: `gate | head`, a closed terminal."""

from __future__ import annotations

import os
import sys


def say(text: str, *, end: str = "\n") -> None:
    """Print `text` at once. From the first error on, as of a reader that has left or a full disk,
    nothing is printed: what a command does and its exit code do not depend on its readers."""
    try:
        print(text, end=end, flush=True)
    except OSError:
        _discard_output()


def _discard_output() -> None:
    # the interpreter flushes once more when it exits, and would report the error again
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, sys.stdout.fileno())
    os.close(sink)
