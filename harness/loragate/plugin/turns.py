"""Turns of the workers of a session that share a GPU.

A process that loses its device to an illegal access can stop what another process runs at that
moment, for good: three times on an H200 a case waited until its deadline for kernels that spin, of
half a second and of a millisecond, from the moment on at which a case beside it had lost the
device. So a case that is known to lose the device runs while no other case does.

Whoever waits for the device alone keeps nobody waiting, and so comes last: if others waited for it,
all workers would be idle until the longest case that runs at that moment has ended, which on an
H200 was a sixth of their time. The system releases the locks of a process that dies.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class DeviceTurns:
    """Of the processes that give the same path."""

    def __init__(self, path: Path) -> None:
        self._busy = path.with_suffix(".busy")

    @contextmanager
    def shares_device(self) -> Iterator[None]:
        """Within, no other process is about to lose the device. Many may be within, and enter
        while another process waits for `loses_device`."""
        # flock compares with locks that are held, not with those that are waited for
        with _locked(self._busy, fcntl.LOCK_SH):
            yield

    @contextmanager
    def loses_device(self) -> Iterator[None]:
        """Within, no other process uses the device."""
        with _locked(self._busy, fcntl.LOCK_EX):
            yield


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, kind)
        yield
    finally:
        os.close(handle)
