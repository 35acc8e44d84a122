"""An engine in a process of its own: it may hang, crash or take its device with it.

Invariant: no process of an engine outlives `close`, the deadline or this process. What the engine
wrote is kept, and its last lines are part of each error.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic  # scans run the clocks of the module `time` at another speed
from types import TracebackType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from loragate.engine.order import Answer, Call, EngineOrder, Start
from loragate.engine.requests import Completion, EngineCounts, Request
from loragate.engine.server_process import keep, server_of

# how often a process that does not answer is asked whether it has ended
_TICK_S = 0.2
# for a process that has closed its channel, and ends unless something keeps it
_TO_END_S = 20.0
_LOG_LINES = 30
# of bytes of the log that are read
_LOG_BYTES = 1 << 16


class EngineError(Exception):
    """The engine failed in a call. The message ends with the last lines of its log."""


class EngineNotStarted(EngineError):
    """There is no engine: it says nothing about what it would have served."""


class EngineBreach(EngineError):
    """The engine did not keep the protocol. The message is one line, without its log."""


class EngineProcess:
    """Starts `target`, "module:function", in a process, calls it with `order` there, and is the
    engine that it returned. The start and all calls together must take no longer than `deadline_s`;
    what the caller does in between is its own time.

    log: the file that the engine's output is written to.
    Raises EngineNotStarted, or EngineBreach for what is no engine; a call raises EngineError. One
    that has no answer ends the engine: an answer that comes late would be that of the next call.
    """

    # what whoever is started must have
    methods: ClassVar[tuple[str, ...]] = ("load", "unload", "generate", "counts", "close")

    def __init__(self, target: str, order: EngineOrder, *, deadline_s: float, log: Path) -> None:
        self._left_s, self._log, self._is_over = deadline_s, log, False
        ours, theirs = socket.socketpair()
        with theirs, log.open("wb") as output:
            self._server = server_of(target.partition(":")[0], output.fileno())
            self._server.fork(target, theirs.fileno(), output.fileno())
        self._connection = Connection(ours.detach())
        try:
            self._exchange(Start(order, self.methods))
        except BaseException as error:
            self._stop()
            if isinstance(error, EngineError) and not isinstance(error, EngineBreach):
                raise EngineNotStarted(f"the engine did not start: {error}") from error
            raise

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            # it may not answer any more
            self._stop()
        else:
            self.close()

    def load(self, name: str, folder: Path) -> None:
        self._call("load", name, folder)

    def unload(self, name: str) -> None:
        self._call("unload", name)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return cast(list[Completion], self._call("generate", list(requests)))

    def counts(self) -> EngineCounts:
        return cast(EngineCounts, self._call("counts"))

    def trace(self, tokens: Sequence[int], adapter: str | None) -> dict[str, Tensor]:
        """Empty where the engine shows nothing."""
        found = cast(dict[str, Any], self._call("trace", tuple(tokens), adapter))
        return {name: torch.from_numpy(values) for name, values in found.items()}

    def close(self) -> None:
        """End the engine, with all processes that it has started. Nothing is asked of one that has
        ended: what a caller took no notice of is no failure of this call."""
        if self._is_over:
            return
        try:
            self._call("close")
            self._leave()
        finally:
            self._stop()

    def log_tail(self) -> str:
        """The last lines that the engine wrote."""
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - _LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])

    def _call(self, method: str, *arguments: object) -> object:
        return self._exchange(Call(method, arguments))

    def _exchange(self, message: Start | Call) -> object:
        what = message.method if isinstance(message, Call) else "the start"
        try:
            answer = self._answer_to(message, what)
        except EngineError:
            self._stop()
            raise
        if answer.breach is not None:
            raise EngineBreach(answer.breach)
        if answer.error is not None:
            raise EngineError(self._told(f"{what} raised {answer.error}"))
        return answer.value

    def _answer_to(self, message: Start | Call, what: str) -> Answer:
        if self._is_over:
            raise EngineError(self._told(f"the engine was ended before {what}"))
        try:
            begin = monotonic()
            self._connection.send(message)
            if not self._is_answered():
                raise EngineError(self._told(f"{what} did not end before the deadline"))
            self._left_s -= monotonic() - begin
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise EngineError(self._told(f"{self._end_of_child()} in {what}")) from error
        assert isinstance(answer, Answer)
        return answer

    def _is_answered(self) -> bool:
        """Whether an answer came before the deadline. EOFError if none can come: what the process
        has forked keeps the channel open when it has ended."""
        left_s = max(0.0, self._left_s)
        while not self._connection.poll(min(_TICK_S, left_s)):
            # its last words may have come meanwhile
            if self._server.status(0.0) is not None and not self._connection.poll():
                raise EOFError
            left_s -= _TICK_S
            if left_s <= 0:
                return False
        return True

    def _end_of_child(self) -> str:
        code = self._server.status(_TO_END_S)
        if code is None:
            return "its process closed its channel and did not end"
        return f"its process ended with {code}"

    def _told(self, what: str) -> str:
        tail = self.log_tail()
        return f"{what}\nits log ends with:\n{tail}" if tail else what

    def _leave(self) -> None:
        """Keep the server of an engine that has ended by itself."""
        if self._server.status(_TO_END_S) is not None:
            self._is_over = True
            self._connection.close()
            keep(self._server)

    def _stop(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._server.end()
        self._connection.close()
