"""Turns of the workers of a session that share a GPU.

A process that loses its device to an illegal access can stop a kernel that another process runs at
that moment, for good: twice on an H200 a case waited for a kernel of half a second until its
deadline, from the moment on at which a case beside it had lost the device. So long kernels and
cases that are known to lose the device keep out of each other's way.

The system releases the locks of a process that dies.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path


class DeviceTurns:
    """Of the processes that give the same path."""

    def __init__(self, path: Path) -> None:
        self._turn, self._busy = path.with_suffix(".turn"), path.with_suffix(".busy")
        self._is_alone = False

    @contextmanager
    def long_kernel(self) -> Iterator[None]:
        """Within, no other process is about to lose the device. Many may be within, and this
        process within `loses_device`."""
        if self._is_alone:
            yield
            return
        with ExitStack() as stack:
            # whoever waits to be alone holds the turn, so that others cannot keep it waiting
            with _locked(self._turn, fcntl.LOCK_EX):
                stack.enter_context(_locked(self._busy, fcntl.LOCK_SH))
            yield

    @contextmanager
    def loses_device(self) -> Iterator[None]:
        """Within, no other process runs a long kernel."""
        with _locked(self._turn, fcntl.LOCK_EX), _locked(self._busy, fcntl.LOCK_EX):
            self._is_alone = True
            try:
                yield
            finally:
                self._is_alone = False


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, kind)
        yield
    finally:
        os.close(handle)


# of this process; None: it shares its GPU with nobody
_turns: DeviceTurns | None = None


def take_turns(turns: DeviceTurns | None) -> None:
    """From now on this process takes turns with others."""
    global _turns
    _turns = turns


def long_kernel() -> AbstractContextManager[None]:
    """See DeviceTurns; nothing where this process takes no turns."""
    return nullcontext() if _turns is None else _turns.long_kernel()


def loses_device() -> AbstractContextManager[None]:
    """See DeviceTurns; nothing where this process takes no turns."""
    return nullcontext() if _turns is None else _turns.loses_device()
