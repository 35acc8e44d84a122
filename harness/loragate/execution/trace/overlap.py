"""Work of a trace that may run at the same time. Pure."""

from __future__ import annotations

from itertools import combinations

from loragate.execution.trace.clocks import Clocks
from loragate.execution.trace.operations import HOST, Launch, Trace


def overlapping(trace: Trace, start: int, stop: int) -> list[tuple[int, int]]:
    """Pairs of launches among operations `start` to `stop` that nothing orders, each on another
    stream. Only launches that read something count as work."""
    clocks = Clocks(trace)
    work = [
        (index, operation.stream)
        for index, operation in enumerate(trace.operations[start:stop], start)
        if isinstance(operation, Launch)
        and operation.stream != HOST
        and not all(access.is_write for access in operation.accesses)
    ]
    return [
        (i, j)
        for (i, one), (j, other) in combinations(work, 2)
        if one != other and not clocks.ordered(i, j)
    ]
