"""A server of `engine/server.py` from the side of those who want engines. It is kept for the next
engine of the same module as long as each engine ends by itself.

Invariant: no process of an engine outlives its server, nor a server this process.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from loragate.core.child_process import ProcessPool, python_module

_MODULE = "loragate.engine.server"
_STATUS_BYTES = 16
# another one for each test
_NOT_READ = "PYTEST_CURRENT_TEST"

_POOL = ProcessPool()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What decides which modules a process finds, and what they are when they are imported."""

    process: int
    folder: Path
    environment: Mapping[str, str]

    @classmethod
    def of_this_process(cls) -> Surroundings:
        environment = {name: value for name, value in os.environ.items() if name != _NOT_READ}
        # whatever this process imports the engine finds, too: a planted copy of a package as well
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        # asking CUDA itself for its devices would spoil it for forks
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        return cls(os.getpid(), Path.cwd(), environment)


class EngineServer:
    """Forks one engine at a time. output: the file that it writes to until it forks."""

    def __init__(self, module: str, surroundings: Surroundings, output: int) -> None:
        self.module, self.surroundings = module, surroundings
        self._status: int | None = None
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = _POOL.start(
                python_module(_MODULE, module, str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                env=dict(surroundings.environment),
            )

    def fork(self, target: str, channel: int, log: int) -> None:
        """Ask for an engine that reads calls from the socket `channel` and writes to `log`."""
        self._status = None
        # of a server that has ended `status` tells
        with suppress(OSError):
            socket.send_fds(self._control, [target.encode()], [channel, log])

    def status(self, within_s: float) -> int | None:
        """How the engine, or the server with it, has ended: negative for a signal. None if it has
        not within this time."""
        if self._status is None:
            if select.select([self._control], [], [], within_s)[0]:
                said = self._said()
                self._status = int(said) if said else self._process.wait()
            else:
                self._status = self._process.poll()
        return self._status

    def _said(self) -> bytes:
        """Nothing where the server has ended."""
        with suppress(OSError):
            return self._control.recv(_STATUS_BYTES)
        return b""

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """Kill it, with all that it has forked."""
        _POOL.end(self._process)
        self._control.close()


_idle: dict[tuple[int, str], EngineServer] = {}


def server_of(module: str, output: int) -> EngineServer:
    """The one that is kept, or another. Nobody else gets it until it is kept again."""
    surroundings = Surroundings.of_this_process()
    kept = _idle.pop((surroundings.process, module), None)
    if kept is not None and kept.is_alive() and kept.surroundings == surroundings:
        return kept
    if kept is not None:
        kept.end()
    return EngineServer(module, surroundings, output)


def keep(server: EngineServer) -> None:
    """For the next engine of its module. Its last one has ended."""
    key = server.surroundings.process, server.module
    if not server.is_alive() or key in _idle:
        server.end()
    else:
        _idle[key] = server
