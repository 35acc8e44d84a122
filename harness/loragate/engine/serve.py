"""The process of an engine, which is forked from `engine/server.py`.

It reads an order and then calls from a socket, and answers each of them before it reads the next.
It inherits the environment, and with it the choice of Triton's interpreter. It ends when the engine
is closed, and when nobody is left at the other end.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from loragate.engine import answers
from loragate.engine.answers import Breach, called, check_methods, checked, maker_of
from loragate.engine.order import Answer, Call, Start
from loragate.matrix.case import Case


def main(target: str, channel: int) -> None:
    connection = Connection(channel)
    start = connection.recv()
    assert isinstance(start, Start)
    made: list[Any] = []
    _answer(connection, lambda: made.append(_engine(target, start)))
    method = ""
    while made and method != "close":
        try:
            call = connection.recv()
        except EOFError:
            return
        assert isinstance(call, Call)
        method = call.method
        _answer(connection, partial(_answered, made[0], call, start.order.case))


def _engine(target: str, start: Start) -> object:
    engine = called(target, maker_of(target), start.order)
    check_methods(target, engine, start.methods)
    return engine


def _answered(engine: Any, call: Call, case: Case) -> object:
    method: Any = getattr(engine, call.method, None)
    if method is None and call.method == "trace":
        # optional
        return {}
    return checked(call, called(call.method, method, *call.arguments), case)


def _answer(connection: Connection, call: Callable[[], object]) -> None:
    try:
        answer = Answer(call())
    except Breach as error:
        answer = Answer(None, breach=str(error))
    except Exception as error:
        traceback.print_exception(error.with_traceback(_of_engine(error.__traceback__)))
        answer = Answer(None, "".join(traceback.format_exception_only(error)).strip())
    # the log is read when the answer has come
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(answer)


def _of_engine(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames that lead to those of the engine, if it has any."""
    own = trace
    while own is not None and own.tb_frame.f_code.co_filename in (__file__, answers.__file__):
        own = own.tb_next
    return own or trace
