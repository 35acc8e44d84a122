"""Pairs of operations that touch the same bytes, one of them writing, without an order. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

from loragate.execution.trace.clocks import Clocks
from loragate.execution.trace.operations import HOST, Access, Free, Launch, Stack, Trace
from loragate.execution.trace.spans import first_common

_FRAMES_SHOWN = 6
_BY_HARNESS = "    by the harness, between two steps"


class Hazard(StrEnum):
    """What the second operation of a pair, in the order of the host, does to the first one."""

    READ_AFTER_WRITE = "read after write"
    WRITE_AFTER_READ = "write after read"
    WRITE_AFTER_WRITE = "write after write"
    # memory returns to its stream while another stream may still use it
    USE_AFTER_FREE = "use after free"
    # the host changes or reads memory that a queued operation uses
    HOST_ACCESS = "access by the host"


@dataclass(frozen=True, slots=True)
class Conflict:
    """Operations number `first` and `second` of a trace; `span` are the first bytes in common."""

    hazard: Hazard
    first: int
    second: int
    block: int
    span: tuple[int, int]
    names: tuple[str, str]


def conflicts(trace: Trace) -> list[Conflict]:
    """Every unordered conflicting pair, once for each block, in the order of the trace."""
    clocks = Clocks(trace)
    found: dict[tuple[int, int, int], Conflict] = {}
    for block, accesses in _by_block(trace).items():
        for (i, one), (j, other) in combinations(accesses, 2):
            if not (one.is_write or other.is_write) or (i, j, block) in found:
                continue
            if _stream(trace, i) == _stream(trace, j) or clocks.ordered(i, j):
                continue
            span = first_common(one.spans, other.spans)
            if span is not None:
                hazard = _hazard(trace, (i, one), (j, other))
                names = (one.name, other.name)
                found[i, j, block] = Conflict(hazard, i, j, block, span, names)
    return [found[key] for key in sorted(found)]


def explained(trace: Trace, conflict: Conflict) -> str:
    """Several lines: tensor, bytes, streams, and the stacks of both operations."""
    start, stop = conflict.span
    names = " / ".join(dict.fromkeys(name for name in conflict.names if name))
    called = f" ({names})" if names else ""
    lines = [
        f"{conflict.hazard}: bytes {start} to {stop} of {trace.block_name(conflict.block)}{called}"
    ]
    for index in (conflict.first, conflict.second):
        lines.append(f"  {_described(trace, index)}")
        stack = _stack(trace, index)
        lines += [f"    {file}:{line} in {name}" for file, line, name in stack] or [_BY_HARNESS]
    return "\n".join(lines)


def _by_block(trace: Trace) -> dict[int, list[tuple[int, Access]]]:
    accesses: defaultdict[int, list[tuple[int, Access]]] = defaultdict(list)
    for index, operation in enumerate(trace.operations):
        if isinstance(operation, Launch):
            for access in operation.accesses:
                accesses[access.block].append((index, access))
        elif isinstance(operation, Free):
            whole = Access(operation.block, ((0, operation.size),), is_write=True)
            accesses[operation.block].append((index, whole))
    return accesses


def _stream(trace: Trace, index: int) -> object:
    """Of a launch; a free is on no stream, because its memory is reused from there on."""
    operation = trace.operations[index]
    return operation.stream if isinstance(operation, Launch) else ("free", index)


def _hazard(trace: Trace, first: tuple[int, Access], second: tuple[int, Access]) -> Hazard:
    operations = [trace.operations[index] for index, _ in (first, second)]
    if any(isinstance(operation, Free) for operation in operations):
        return Hazard.USE_AFTER_FREE
    if any(operation.stream == HOST for operation in operations):
        return Hazard.HOST_ACCESS
    if not first[1].is_write:
        return Hazard.WRITE_AFTER_READ
    return Hazard.WRITE_AFTER_WRITE if second[1].is_write else Hazard.READ_AFTER_WRITE


def _described(trace: Trace, index: int) -> str:
    operation = trace.operations[index]
    if isinstance(operation, Free):
        stream = trace.stream_name(operation.stream)
        return f"#{index} freed here, from then on memory of {stream}"
    assert isinstance(operation, Launch)
    return f"#{index} {operation.name} on {trace.stream_name(operation.stream)}"


def _stack(trace: Trace, index: int) -> Stack:
    operation = trace.operations[index]
    stack: Stack = operation.stack if isinstance(operation, (Launch, Free)) else ()
    return stack[:_FRAMES_SHOWN]
