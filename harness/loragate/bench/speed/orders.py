"""What the process that compares builds and its workers say to each other, one line of JSON each.

    Begin ->                        once
    <- Answer(calls), for each row  ready to be timed
    TIME -> <- Answer(us)           as often as wanted
    NEXT ->                         on to the next row

A worker that only compiles answers once, when it is done. A Problem takes the place of any answer
and is the last one. Pure; imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TextIO

from pydantic import TypeAdapter

from loragate.core.verdict import ExitCode


class Order(StrEnum):
    # time one round
    TIME = "time"
    # leave this row and prepare the next one
    NEXT = "next"


@dataclass(frozen=True, slots=True)
class Begin:
    """The ids of the rows, and the seed of their table if it has one. A worker that `compiles` does
    so for all rows in parallel, and times none."""

    rows: tuple[str, ...]
    seed: int | None
    compiles: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The names of the calls of a row, or microseconds of each of them."""

    calls: tuple[str, ...] = ()
    us: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """Why the worker cannot go on."""

    message: str
    exit_code: ExitCode


_BEGIN = TypeAdapter(Begin)
_REPLY: TypeAdapter[Answer | Problem] = TypeAdapter(Answer | Problem)


class Channel:
    """The worker's side."""

    def __init__(self, orders: TextIO, answers: TextIO) -> None:
        self._orders, self._answers = orders, answers

    def begin(self) -> Begin:
        return _BEGIN.validate_json(self._orders.readline())

    def order(self) -> Order:
        """NEXT if the parent has gone."""
        line = self._orders.readline().strip()
        return Order(line) if line else Order.NEXT

    def answer(self, what: Answer | Problem) -> None:
        print(_REPLY.dump_json(what).decode(), file=self._answers, flush=True)


def begin_line(begin: Begin) -> bytes:
    return _BEGIN.dump_json(begin) + b"\n"


def order_line(order: Order) -> bytes:
    return order.value.encode() + b"\n"


def read_reply(line: bytes) -> Answer | Problem:
    """Raises ValueError for what is no reply."""
    return _REPLY.validate_json(line)
