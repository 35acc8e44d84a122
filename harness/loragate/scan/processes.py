"""The processes of a scan from the side of the command: started together, listened to, ended."""

from __future__ import annotations

import json
import os
import pickle
import select
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from loragate.core.child_process import ProcessPool, python_module
from loragate.core.errors import CommandError
from loragate.core.verdict import ExitCode
from loragate.scan.messages import Message, Order, Unpacker

_HARNESS = Path(__file__).resolve().parents[2]
# to import torch and Triton on a busy machine
_START_S = 180.0
_READ = 1 << 16


@dataclass(slots=True)
class Process:
    """A process that runs an order; `status` as of `subprocess` once it has ended."""

    number: int
    order: Order
    pipe: int
    unpacker: Unpacker = field(default_factory=Unpacker)
    status: int | None = None
    # nothing more will be said
    silent: bool = False


class Processes:
    """Starts the processes of a scan through one server. Not for several threads."""

    def __init__(self, subjects: Sequence[str], log: Path) -> None:
        """log: what the processes print; it is appended to."""
        self._subjects, self._log = tuple(subjects), log
        self._pool = ProcessPool()
        self._server: subprocess.Popen[bytes] | None = None
        self._count = 0
        self._heard = b""

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server and all of its processes."""
        self._pool.close()

    def start(self, order: Order) -> Process:
        """Start the process of an order, whose folder exists. Raises CommandError."""
        self._count += 1
        os.mkfifo(order.answers)
        # opened here first: the other side waits for a reader
        pipe = os.open(order.answers, os.O_RDONLY | os.O_NONBLOCK)
        path = order.folder / "order"
        path.write_bytes(pickle.dumps(order))
        self._ask(id=self._count, order=str(path))
        return Process(self._count, order, pipe)

    def end(self, process: Process) -> None:
        """Kill a process that runs. `listen` tells of its end."""
        self._ask(id=process.number, end=True)

    def listen(
        self, running: Sequence[Process], until: float
    ) -> Iterator[tuple[Process, Message | None]]:
        """What processes say, in the order in which it is heard; None when one has ended, after all
        that it said. Ends with the last of them, or at `until` on the monotonic clock.

        Raises CommandError if the server ends.
        """
        alive = {process.number: process for process in running}
        while alive:
            left = until - time.monotonic()
            if left <= 0:
                return
            output = self._output()
            pipes = {p.pipe: p for p in alive.values() if not p.silent}
            readable, _, _ = select.select([output.fileno(), *pipes], [], [], min(left, 1.0))
            for process in (pipes[pipe] for pipe in readable if pipe in pipes):
                yield from ((process, heard) for heard in _read(process))
            for number, status in self._ends(output) if output.fileno() in readable else ():
                if number in alive:
                    ended = alive.pop(number)
                    yield from ((ended, heard) for heard in _read(ended))
                    ended.status = status
                    yield ended, None

    def forget(self, process: Process) -> None:
        """Close what belongs to a process that has ended or is ended."""
        with suppress(OSError):
            os.close(process.pipe)

    def _output(self) -> IO[bytes]:
        assert self._server is not None
        assert self._server.stdout is not None
        return self._server.stdout

    def _ends(self, output: IO[bytes]) -> Iterator[tuple[int, int]]:
        data = os.read(output.fileno(), _READ)
        if not data:
            raise self._died()
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            yield answer["id"], answer["status"]

    def _ask(self, **what: object) -> None:
        server = self._server or self._start()
        assert server.stdin is not None
        try:
            server.stdin.write(json.dumps(what).encode() + b"\n")
        except OSError as error:
            raise self._died() from error

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            self._server = self._pool.start(
                python_module("loragate.scan.server", *self._subjects),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(),
                bufsize=0,
            )
        output = self._output()
        if not select.select([output], [], [], _START_S)[0] or not output.readline():
            raise self._died()
        return self._server

    def _died(self) -> CommandError:
        text = self._log.read_text(encoding="utf-8", errors="replace").strip()[-2000:]
        return CommandError(
            f"the process that starts trials has ended: {text}", ExitCode.INFRASTRUCTURE
        )


def environment() -> Mapping[str, str]:
    """That of all trials: one thread each, because they share the cores."""
    paths = [str(_HARNESS), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        # asking CUDA itself for its devices would spoil it for forks
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


def _read(process: Process) -> Iterator[Message]:
    """What the process has said by now."""
    while True:
        try:
            data = os.read(process.pipe, _READ)
        except BlockingIOError:
            return
        if not data:
            process.silent = True
            return
        yield from process.unpacker.feed(data)
