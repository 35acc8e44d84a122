"""One process of one build, as the process that compares sees it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Protocol

from loragate.bench.speed.orders import (
    Answer,
    Begin,
    Order,
    Problem,
    begin_line,
    order_line,
    read_reply,
)
from loragate.core.child_process import ProcessPool
from loragate.core.errors import CommandError
from loragate.core.verdict import ExitCode


class Lane(Protocol):
    """Rows come in the order in which the lane was asked for them."""

    def calls(self) -> tuple[str, ...]:
        """Wait until the next row can be timed; the names of its calls."""

    def time(self) -> tuple[float, ...]:
        """Microseconds of each call of the row, from one round."""

    def leave(self) -> None:
        """End the row."""


class LaneError(CommandError):
    """A process of a build cannot go on; the message names the build."""


class ProcessLane:
    """A Lane of a process that was started with `command`."""

    def __init__(
        self,
        build: str,
        command: Sequence[str],
        begin: Begin,
        pool: ProcessPool,
        environ: Mapping[str, str],
    ) -> None:
        self._build, self._pool = build, pool
        # stderr is that of the caller
        self._process = pool.start(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(environ)
        )
        self._send(begin_line(begin))

    def calls(self) -> tuple[str, ...]:
        return self._reply().calls

    def time(self) -> tuple[float, ...]:
        self._send(order_line(Order.TIME))
        return self._reply().us

    def leave(self) -> None:
        self._send(order_line(Order.NEXT))

    def end(self) -> None:
        """Kill the process and all that it has started."""
        self._pool.end(self._process)

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            # what it has said before it went is still to be read
            pass

    def _reply(self) -> Answer:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            how = f"its process ended with {self._process.wait()}"
            raise LaneError(f"{self._build}: {how}", ExitCode.INFRASTRUCTURE)
        reply = read_reply(line)
        if isinstance(reply, Problem):
            raise LaneError(f"{self._build}: {reply.message}", reply.exit_code)
        return reply
