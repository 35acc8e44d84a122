"""`python -m loragate.engine.serve TARGET CHANNEL`: the process of an engine.

It reads an order and then calls from a socket, and answers each of them before it reads the next.
It inherits the environment, and with it the choice of Triton's interpreter. It ends when the engine
is closed, and when nobody is left at the other end.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from loragate.engine.order import Answer, Call, EngineOrder


def main(target: str, channel: int) -> None:
    connection = Connection(channel)
    order = connection.recv()
    assert isinstance(order, EngineOrder)
    made: list[Any] = []
    _answer(connection, lambda: made.append(_engine(target, order)))
    method = ""
    while made and method != "close":
        try:
            call = connection.recv()
        except EOFError:
            return
        assert isinstance(call, Call)
        method = call.method
        _answer(connection, _bound(made[0], call))


def _engine(target: str, order: EngineOrder) -> object:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)(order)


def _bound(engine: Any, call: Call) -> Callable[[], object]:
    if call.method == "trace":
        return lambda: _traced(engine, *call.arguments)
    return lambda: getattr(engine, call.method)(*call.arguments)


def _traced(engine: Any, *arguments: object) -> object:
    """As arrays: a tensor would be shared between the processes, and end with this one."""
    trace = getattr(engine, "trace", None)
    found = trace(*arguments) if trace else {}
    return {name: values.double().cpu().numpy() for name, values in found.items()}


def _answer(connection: Connection, call: Callable[[], object]) -> None:
    try:
        answer = Answer(call())
    except Exception as error:
        traceback.print_exc()
        answer = Answer(None, "".join(traceback.format_exception_only(error)).strip())
    # the log is read when the answer has come
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(answer)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
