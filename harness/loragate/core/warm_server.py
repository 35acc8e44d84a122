"""A server of `core/fork_server.py` from the side of the command: started, given lines, ended and
started again."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from loragate.core.child_process import ProcessPool, python_module, signal_name
from loragate.core.verdict import Failure

_HARNESS = Path(__file__).resolve().parents[2]
# to import torch, Triton and transformers on a busy machine
_START_S = 180.0
_TICK_S = 0.5


class ServerDied(Exception):
    """The server itself ended; the message is the end of its log."""


@dataclass(slots=True, eq=False)
class WarmServer:
    """Runs one line at a time. Not for several threads. `module`: of the server; `log`: what it
    and its forks write."""

    module: str
    processes: ProcessPool
    log: Path
    environment: Mapping[str, str]
    _server: subprocess.Popen[bytes] | None = field(init=False, default=None)

    def run(self, line: bytes, progress: Callable[[], int], patience_s: float) -> Failure | None:
        """How the process of the line failed, or None. It hangs if `progress` says the same for
        `patience_s`. Raises ServerDied."""
        try:
            answer = self._asked(line, progress, patience_s)
        except BaseException:
            # whatever it runs must not outlive the caller's interest, and its answer is nobody's
            self.close()
            raise
        if answer is None:
            # the deadline within the process could not end it
            self.close()
            return Failure.HANG
        return None if answer["status"] == 0 else Failure.CRASH

    def close(self) -> None:
        if self._server is not None:
            self.processes.end(self._server)
            self._server = None

    def _asked(
        self, line: bytes, progress: Callable[[], int], patience_s: float
    ) -> dict[str, int] | None:
        if self._server is not None and self._server.poll() is not None:
            # somebody has killed it between two lines
            self.close()
        server = self._server or self._start()
        assert server.stdin is not None
        try:
            server.stdin.write(line + b"\n")
        except OSError as error:
            raise ServerDied(f"the server takes no line: {error}") from error
        return self._answer(server, progress, patience_s)

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            self._server = self.processes.start(
                python_module(self.module),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self.environment,
                bufsize=0,
            )
        if self._answer(self._server, lambda: 0, _START_S) is None:
            raise ServerDied(f"no server within {_START_S:g} s")
        return self._server

    def _answer(
        self, server: subprocess.Popen[bytes], progress: Callable[[], int], patience_s: float
    ) -> dict[str, int] | None:
        """The next answer; None if nothing happens for `patience_s`."""
        assert server.stdout is not None
        seen, moved = progress(), time.monotonic()
        while True:
            if select.select([server.stdout], [], [], _TICK_S)[0]:
                return self._read(server.stdout)
            if (size := progress()) != seen:
                seen, moved = size, time.monotonic()
            if time.monotonic() - moved > patience_s:
                return None

    def _read(self, output: IO[bytes]) -> dict[str, int]:
        line = output.readline()
        if not line:
            raise ServerDied(self._end())
        answer: dict[str, int] = json.loads(line)
        return answer

    def _end(self) -> str:
        """How the server ended: a process that kills its group kills the server as well."""
        assert self._server is not None
        code = self._server.wait()
        how = signal_name(code) if code < 0 else f"exit code {code}"
        last = self.log.read_text(encoding="utf-8", errors="replace").strip()[-2000:]
        return f"the server ended with {how}" + (f": {last}" if last else "")


def environment_of_forks(*, gpu: bool = False) -> dict[str, str]:
    """Of all processes that run planted code; one thread each, because they share the cores."""
    paths = [str(_HARNESS), os.environ.get("PYTHONPATH", "")]
    found = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    found.pop("TRITON_INTERPRET", None)
    # asking CUDA itself for its devices would spoil it for forks
    found["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if not gpu:
        found["TRITON_INTERPRET"] = "1"
        # a forked process cannot use the CUDA context of its server
        found["CUDA_VISIBLE_DEVICES"] = ""
    return found
