"""Kills process groups whose owner died without ending them: nothing else survives SIGKILL.

The owner starts this module as a script in a process of its own, and writes to its standard input
`+PGID` for a group that it has started and `-PGID` for one that has ended. When the input ends, the
owner is gone. Run by path and without site-packages, so it starts in a few milliseconds and imports
nothing of the project.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress


def groups_left(lines: Iterable[bytes]) -> set[int]:
    """The groups that were started and not ended when the lines end; a torn line does not count."""
    groups: set[int] = set()
    for line in lines:
        sign, number = line[:1], line[1:].strip()
        if line.endswith(b"\n") and number.isdigit():
            (groups.add if sign == b"+" else groups.discard)(int(number))
    return groups


def main() -> None:
    for group in groups_left(sys.stdin.buffer):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    # a terminal's Ctrl-C is for the owner, which ends its groups itself
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    main()
