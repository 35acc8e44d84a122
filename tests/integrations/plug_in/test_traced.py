"""vLLM traces its linear layers: one graph serves every number of rows and every mapping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()


@pytest.mark.parametrize("widths", [(20, 12), (20,)])
def test_one_graph_serves_every_step(
    make_server: Callable[..., Any], make_linear: Any, widths: tuple[int, ...]
) -> None:
    server = make_server(rows=200)
    linear = make_linear(server, widths)
    linear.load(0, seed=1)
    linear.load(2, seed=2)
    graphs: list[Any] = []
    # of the tests before
    torch._dynamo.reset()

    def counting(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(module, inputs)

    @torch.compile(fullgraph=True, backend=counting)
    def forward(x: Tensor) -> Tensor:
        out: Tensor = linear.layer(x)
        return out

    # heights 16 and 32, padded rows, fewer rows than are mapped, base rows, adapters that were
    # loaded behind the trace
    steps = (([0, -1, 2], 7), ([2] * 5, 8), ([0, 2] * 4, 5), ([-1] * 4, 4), ([2, 0] * 70, 145))
    for slots, rows in steps:
        server.step(slots)
        x = torch.randn(rows, 24)
        # as vLLM marks what it traces
        torch._dynamo.mark_dynamic(x, 0)
        wanted = linear.wanted(x, slots[:rows])
        torch.testing.assert_close(forward(x), wanted, rtol=1e-4, atol=1e-4)
        linear.load(0, seed=rows)
    assert len(graphs) == 1
