"""A child process with its own log, watched until it ends, stalls or is to be stopped.

Invariant: nothing that the child has started outlives the call.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

_TICK_S = 0.2
# the record is complete at any time, and a cancelled CI job has only a few seconds
_GRACE_S = 2.0


class Cause(Enum):
    EXITED = auto()
    # neither its log nor anything else moved for too long
    STALLED = auto()
    INTERRUPTED = auto()


@dataclass(frozen=True, slots=True)
class Ending:
    """`exit_code` is negative for a signal, as in `subprocess`."""

    cause: Cause
    exit_code: int


def watch(
    command: Sequence[str], *, log: Path, patience_s: float, tick: Callable[[], bool]
) -> Ending:
    """Run `command` with stdout and stderr in `log`.

    `tick` is called several times a second and tells whether anything moved besides the log.
    Ctrl-C stops the child and is told as INTERRUPTED instead of being raised; SIGTERM and SIGHUP
    are the same to every command, see interruption.py.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # a group of its own, so that all of it can be stopped together
            start_new_session=True,
        )
    try:
        cause = _wait(child, log, patience_s, tick)
    except KeyboardInterrupt:
        cause = Cause.INTERRUPTED
    finally:
        _stop(child)
    tick()
    return Ending(cause, child.returncode)


def _wait(
    child: subprocess.Popen[bytes], log: Path, patience_s: float, tick: Callable[[], bool]
) -> Cause:
    size, moved = 0, time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            child.wait(_TICK_S)
            return Cause.EXITED
        new_size = log.stat().st_size
        if tick() or new_size != size:
            size, moved = new_size, time.monotonic()
        if time.monotonic() - moved > patience_s:
            return Cause.STALLED


def _stop(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        with suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
            _signal(child, signal.SIGINT)
            child.wait(_GRACE_S)
    # also the children of a child that has ended
    _signal(child, signal.SIGKILL)
    child.wait()


def _signal(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)
