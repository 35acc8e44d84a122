"""The processes of a scan from the side of the command: started together, listened to, ended."""

from __future__ import annotations

import json
import os
import pickle
import select
import subprocess
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
        self._is_ready = False
        self._count = 0
        self._heard = b""

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server and all of its processes."""
        self._pool.close()

    def prepare(self) -> None:
        """Begin to start the server, without waiting for it."""
        self._launched()

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
        """Kill a process that runs. `hear` tells of its end."""
        self._ask(id=process.number, end=True)

    def hear(
        self, running: Sequence[Process], seconds: float
    ) -> list[tuple[Process, Message | None]]:
        """What processes say next, in the order in which it is heard; None when one has ended,
        after all that it said. Nothing if all are silent for so long. `running` are all that have
        been started and not ended: of others nothing is kept.

        Raises CommandError if the server ends.
        """
        output = self._output()
        pipes = {process.pipe: process for process in running if not process.silent}
        readable, _, _ = select.select([output.fileno(), *pipes], [], [], seconds)
        speaking = [pipes[pipe] for pipe in readable if pipe in pipes]
        heard: list[tuple[Process, Message | None]] = [
            (process, message) for process in speaking for message in _read(process)
        ]
        ends = dict(self._ends(output)) if output.fileno() in readable else {}
        for process in running:
            if process.number in ends:
                heard += [(process, message) for message in _read(process)]
                process.status = ends[process.number]
                heard.append((process, None))
        return heard

    def forget(self, process: Process) -> None:
        """Close what belongs to a process that has ended or is ended."""
        with suppress(OSError):
            os.close(process.pipe)

    def _output(self) -> IO[bytes]:
        server = self._launched()
        assert server.stdout is not None
        return server.stdout

    def _ends(self, output: IO[bytes]) -> Iterator[tuple[int, int]]:
        data = os.read(output.fileno(), _READ)
        if not data:
            raise self._died()
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            yield answer["id"], answer["status"]

    def _ask(self, **what: object) -> None:
        server = self._launched()
        if not self._is_ready:
            self._wait_until_ready()
        assert server.stdin is not None
        try:
            server.stdin.write(json.dumps(what).encode() + b"\n")
        except OSError as error:
            raise self._died() from error

    def _launched(self) -> subprocess.Popen[bytes]:
        if self._server is None:
            with self._log.open("ab") as log:
                self._server = self._pool.start(
                    python_module("loragate.scan.server", *self._subjects),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment(),
                    bufsize=0,
                )
        return self._server

    def _wait_until_ready(self) -> None:
        output = self._output()
        if not select.select([output], [], [], _START_S)[0] or not output.readline():
            raise self._died()
        self._is_ready = True

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
