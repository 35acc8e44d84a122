"""The launches of a trace once more, in another order, from the same memory."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from loragate.execution.streams.traced import TracedSteps
from loragate.execution.trace.operations import HOST, Launch, Trace
from loragate.execution.trace.orders import Order
from loragate.protocol import subject_code


def replayed(steps: TracedSteps, order: Order) -> list[Tensor]:
    """The results of all steps. What the trace allocated holds poison before it is written."""
    recorder = steps.recorder
    recorder.blocks.restore()
    with torch.no_grad(), subject_code():
        for index in order:
            again = recorder.replays.get(index)
            if again is not None:
                again()
    return [result.clone() for result in steps.results]


def programs_reversed() -> AbstractContextManager[None]:
    """Within, the programs of every interpreted launch run from the last one to the first."""
    if "triton" not in sys.modules:
        return nullcontext()
    from loragate.execution.streams.interpreted import reversed_programs

    return reversed_programs()


def difference(trace: Trace, order: Order, usual: Order) -> str:
    """Where the work of an order leaves the usual one, in one line."""

    def work(launches: Order) -> list[int]:
        return [i for i in launches if trace.operations[i].stream != HOST]

    for here, there in zip(work(order), work(usual), strict=True):
        if here != there:
            return f"{_launch(trace, here)} before {_launch(trace, there)}"
    return "the same order"


def _launch(trace: Trace, index: int) -> str:
    operation = trace.operations[index]
    assert isinstance(operation, Launch)
    return f"#{index} {operation.name} on {trace.stream_name(operation.stream)}"
