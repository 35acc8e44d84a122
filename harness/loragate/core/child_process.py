"""Child processes: watched with their logs, ended together, and a module run to its end.

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
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import IO, Any

from loragate.core import group_guard
from loragate.core.host import on_cores
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


@dataclass(slots=True, eq=False)
class Watched:
    """A command that a `Watch` has started, when it last showed a sign of life, and why it is over,
    once it is."""

    process: subprocess.Popen[bytes]
    log: Path
    moved: float
    size: int = 0
    cause: Cause | None = None


class Watch:
    """Commands that run side by side, each with stdout and stderr in a log of its own, until each
    has ended or has been silent for `patience_s`. Leaving the context stops what still runs.

    `tick` is called several times a second and returns whether anything moved besides the logs,
    which is a sign of life of all commands: whose it is cannot be told.
    SIGTERM and SIGHUP mean the same to every command as Ctrl-C, see `loragate.core.signals`.
    """

    def __init__(self, *, patience_s: float, tick: Callable[[], bool]) -> None:
        self._patience_s = patience_s
        self._tick = tick
        self._running: list[Watched] = []

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self, command: Sequence[str], *, log: Path, cores: Collection[int] = ()) -> Watched:
        """Start `command`, on `cores` alone if there are any. Raises OSError."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output, signals_deferred(), on_cores(cores):
            process = _start_group(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            watched = Watched(process, log, time.monotonic())
            self._running.append(watched)
        return watched

    def wait(self) -> tuple[Watched, Ending]:
        """One that has ended or stalled, as soon as there is one; at least one must run.

        KeyboardInterrupt leaves all of them running, for `stop`.
        """
        while True:
            with suppress(subprocess.TimeoutExpired):
                self._running[0].process.wait(_TICK_S)
            ticked = self._tick()
            causes = [(watched, self._cause(watched, ticked)) for watched in self._running]
            for watched, cause in causes:
                if cause is not None:
                    watched.cause = cause
                    if self._end([watched]):
                        raise KeyboardInterrupt
                    return watched, Ending(cause, watched.process.returncode)

    def stop(self) -> None:
        """Interrupt all that run, then kill their groups after one grace period."""
        self._end(self._running)

    def _cause(self, watched: Watched, ticked: bool) -> Cause | None:
        if watched.process.poll() is not None:
            return Cause.EXITED
        # a log that is gone grows no more
        size = watched.log.stat().st_size if watched.log.exists() else watched.size
        if ticked or size != watched.size:
            watched.size, watched.moved = size, time.monotonic()
        silent_s = time.monotonic() - watched.moved
        return Cause.STALLED if silent_s > self._patience_s else None

    def _end(self, ended: Sequence[Watched]) -> bool:
        """Whether an interruption came meanwhile."""
        is_interrupted = _stop([watched.process for watched in ended])
        self._running = [watched for watched in self._running if watched not in ended]
        self._tick()
        return is_interrupted


def _stop(children: Sequence[subprocess.Popen[bytes]]) -> bool:
    """Interrupt the children, then kill their groups after a grace period. Whether Ctrl-C has cut
    that short."""
    running = [child for child in children if child.poll() is None]
    is_interrupted = False
    try:
        for child in running:
            _signal_group(child.pid, signal.SIGINT)
        deadline = time.monotonic() + _GRACE_S
        for child in running:
            child.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    except KeyboardInterrupt:
        is_interrupted = True
    for child in children:
        # also the children of a child that has ended
        _signal_group(child.pid, signal.SIGKILL)
        _GUARD.discard(child.pid)
        child.wait()
    return is_interrupted


def _start_group(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    # a group of its own, so that the child and all that it starts can be stopped together
    child = subprocess.Popen(command, start_new_session=True, **options)
    _GUARD.add(child.pid)
    return child


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
