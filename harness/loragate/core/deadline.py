"""A deadline that holds for any code, and the stacks that a crash or a hang leaves.

The stacks are dumped by a thread of the interpreter that does not need the GIL, so that a kernel
launch or a C extension that never returns is caught too.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def deadline(seconds: float, stacks: IO[bytes]) -> Iterator[None]:
    """Within, the process is ended after `seconds`, with the stack of every thread in `stacks`."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=stacks)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def open_crash_file(path: Path) -> IO[bytes]:
    """A file that a crash in native code leaves its stack in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stacks = path.open("wb", buffering=0)
    faulthandler.enable(file=stacks)
    return stacks
