"""Steps of a stack of layers that graphs replay, for tests of the graph runner."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.serving.graph_runner import GraphRunner  # noqa: E402
from lorakernels.serving.keys import GraphKey  # noqa: E402

SIZES = (2, 8)


def runner_of(stack: Any, *, sizes: tuple[int, ...] = SIZES) -> GraphRunner:
    return GraphRunner(stack.step, stack.inputs, stack.buffers, sizes=sizes)


def run(runner: GraphRunner, stack: Any, slots: list[int], seed: int = 3) -> Tensor:
    values = stack.values(len(slots), seed)
    return runner.run(torch.tensor(slots, dtype=torch.int32), **values)


def assert_served(runner: GraphRunner, stack: Any, slots: list[int], seed: int = 3) -> None:
    found = run(runner, stack, slots, seed)
    wanted = stack.wanted(slots, stack.values(len(slots), seed))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def replayed(runner: GraphRunner, graphs: Any) -> list[GraphKey]:
    """The keys whose graphs were replayed, as often as they were."""
    return [
        key
        for key, graph in zip(runner.keys, graphs.made, strict=True)
        for _ in range(graph.replays)
    ]


def contents(stack: Any) -> list[Tensor]:
    return [part.clone() for weights in stack.buffers.slot_weights for part in weights.tensors]


def replace_adapters(stack: Any) -> None:
    stack.linear.slots.a = stack.linear.slots.a.clone()
