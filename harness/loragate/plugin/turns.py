"""Turns of the workers of a session that share a GPU.

A process that loses its device to an illegal access can stop what another process runs at that
moment, for good: three times on an H200 a case waited until its deadline for kernels that spin, of
half a second and of a millisecond, from the moment on at which a case beside it had lost the
device. So a case that is known to lose the device runs while no other case does.

Such cases begin a session, and the others wait for them. Where that is not possible, whoever waits
for the device alone keeps nobody waiting, and so comes last: if others waited for it in the middle
of a session, all workers would be idle until the longest case that runs at that moment has ended,
which on an H200 was a sixth of their time. Last, the worker that replaces a lost one would start
when there is nothing else left to do.

The system releases the locks of a process that dies.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# workers begin within two seconds of each other. One whose first case is another one, because
# options of pytest have left cases out, is not waited for
_LONGEST_WAIT_S = 20.0
_POLL_S = 0.05


class DeviceTurns:
    """Of the processes that give the same paths.

    path: of those that use the same device.
    begun: of all processes of a session. The file has a byte for each case that had a device for
        itself.
    """

    def __init__(self, path: Path, begun: Path) -> None:
        self._busy = path.with_suffix(".busy")
        self._begun = begun
        self._first = 0

    def wait_first_for(self, cases: int) -> None:
        """Before this process first shares a device, that many cases of the session have begun to
        have one for themselves, unless that takes too long."""
        self._first = cases

    @contextmanager
    def shares_device(self) -> Iterator[None]:
        """Within, no other process is about to lose the device. Many may be within, and enter
        while another process waits for `loses_device`."""
        self._wait_for_first()
        # flock compares with locks that are held, not with those that are waited for
        with _locked(self._busy, fcntl.LOCK_SH):
            yield

    @contextmanager
    def loses_device(self) -> Iterator[None]:
        """Within, no other process uses the device."""
        with _locked(self._busy, fcntl.LOCK_EX):
            with self._begun.open("ab") as begun:
                begun.write(b".")
            yield

    def _wait_for_first(self) -> None:
        end = time.monotonic() + _LONGEST_WAIT_S
        while self._num_begun() < self._first and time.monotonic() < end:
            time.sleep(_POLL_S)
        self._first = 0

    def _num_begun(self) -> int:
        return self._begun.stat().st_size if self._begun.exists() else 0


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, kind)
        yield
    finally:
        os.close(handle)
