"""A worker whose calls take as long as the build of lorakernels that it imports says in `US`."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import lorakernels
from loragate.bench.speed.orders import Answer, Channel, Order, Problem
from loragate.core.verdict import ExitCode


def main(folder: str) -> None:
    channel = Channel(sys.stdin, sys.stdout)
    begin = channel.begin()
    us = getattr(lorakernels, "US", None)
    if us is None:
        channel.answer(Problem("has no US", ExitCode.INFRASTRUCTURE))
        return
    if us == 0.0:
        sys.exit(7)
    assert Path(lorakernels.__file__).parents[1] == Path(folder)
    if begin.compiles:
        channel.answer(Answer())
        return
    noise = random.Random(us)
    for row in begin.rows:
        channel.answer(Answer(calls=(f"call of {row}",)))
        while channel.order() is Order.TIME:
            channel.answer(Answer(us=(us * noise.gauss(1, 0.001),)))


if __name__ == "__main__":
    main(sys.argv[2])
