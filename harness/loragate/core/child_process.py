"""Child processes: one watched with its log, many ended together, and a module run to its end.

Invariant: nothing that a watched child or one of a `ProcessPool` has started outlives it, nor this
process, even if that is killed by SIGKILL.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import IO, Any

from loragate.core import group_guard
from loragate.core.signals import signals_deferred

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


def signal_name(exit_code: int) -> str:
    """The signal of an exit code below 0; those in real time have numbers only."""
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def python_module(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a module under this interpreter."""
    return (sys.executable, "-m", module, *arguments)


def run_module(
    module: str,
    *arguments: str,
    input: bytes | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    capture: bool = True,
) -> subprocess.CompletedProcess[bytes]:
    """Run a module to its end, in the process group of the caller and so ended with it.

    Raises subprocess.TimeoutExpired; a module that fails shows in `returncode` alone.
    """
    return subprocess.run(
        python_module(module, *arguments),
        input=input,
        env=env,
        timeout=timeout,
        capture_output=capture,
        check=False,
    )


class PoolClosed(Exception):
    """No more processes are started."""


class ProcessPool:
    """Process groups that run now, so that all of them can be ended at once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._closed = False

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start `command` with the options of `subprocess.Popen`. Raises PoolClosed."""
        # under the lock, so that `close` misses none that is being started
        with self._lock, signals_deferred():
            if self._closed:
                raise PoolClosed
            child = _start_group(command, **options)
            self._running.add(child.pid)
            return child

    def end(self, child: subprocess.Popen[bytes]) -> None:
        """Kill what is left of the child's group, whether or not the child itself has ended."""
        with self._lock:
            _signal_group(child.pid, signal.SIGKILL)
            # its number may be another's from here on
            self._running.discard(child.pid)
            _GUARD.discard(child.pid)
        child.wait()

    def close(self) -> None:
        """Kill all groups that run, and start no more."""
        with self._lock:
            self._closed = True
            for pid in self._running:
                _signal_group(pid, signal.SIGKILL)


class _Guard:
    """The process that kills the groups of this one when it is gone. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def add(self, group: int) -> None:
        self._tell(b"+%d\n" % group)

    def discard(self, group: int) -> None:
        self._tell(b"-%d\n" % group)

    def _tell(self, line: bytes) -> None:
        # somebody may have killed the guard, which costs its service and nothing else
        with self._lock, suppress(OSError):
            self._input().write(line)

    def _input(self) -> IO[bytes]:
        # a fork shares the pipe of its parent, but has groups of its own
        if self._process is None or self._owner != os.getpid():
            self._process = subprocess.Popen(
                (sys.executable, "-I", "-S", group_guard.__file__),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )
            self._owner = os.getpid()
        assert self._process.stdin is not None
        return self._process.stdin


_GUARD = _Guard()


def watch(
    command: Sequence[str], *, log: Path, patience_s: float, tick: Callable[[], bool]
) -> Ending:
    """Run `command` with stdout and stderr in `log`, until it ends or stalls for `patience_s`.

    `tick` is called several times a second and returns whether anything moved besides the log.
    Ctrl-C stops the child and is returned as INTERRUPTED instead of being raised; SIGTERM and
    SIGHUP mean the same to every command, see `loragate.core.signals`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    child: subprocess.Popen[bytes] | None = None
    try:
        with log.open("wb") as output, signals_deferred():
            child = _start_group(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        cause = _wait(child, log, patience_s, tick)
    except KeyboardInterrupt:
        if child is None:
            raise
        cause = Cause.INTERRUPTED
    finally:
        if child is not None:
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
    """Interrupt the child, then kill its group after a grace period."""
    if child.poll() is None:
        with suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
            _signal_group(child.pid, signal.SIGINT)
            child.wait(_GRACE_S)
    # also the children of a child that has ended
    _signal_group(child.pid, signal.SIGKILL)
    _GUARD.discard(child.pid)
    child.wait()


def _start_group(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    # a group of its own, so that the child and all that it starts can be stopped together
    child = subprocess.Popen(command, start_new_session=True, **options)
    _GUARD.add(child.pid)
    return child


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
