"""A CUDA graph of torch.compile reads and writes the buffers of a layer where they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._inductor.compile_fx import compile_fx

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.common.quantised import Quantised, quantise_rows  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace  # noqa: E402
from lorakernels.layers.gate_up import GateUp  # noqa: E402
from lorakernels.layers.linear import LoRALinear  # noqa: E402
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch  # noqa: E402
from lorakernels.layers.moe_partition import MoERank  # noqa: E402
from lorakernels.layers.partition import Slice  # noqa: E402
from lorakernels.moe.align.metadata import PairMetadata  # noqa: E402
from lorakernels.runtime import device as runtime  # noqa: E402

K, WIDTH, ROWS = 16, 24, 5


class Linear:
    """A layer and the state of a step. No module: of that, torch takes every tensor as static."""

    def __init__(self) -> None:
        self.linear = LoRALinear(
            torch.zeros(WIDTH, K), slices=(Slice("q", WIDTH),), num_slots=2, rank=4
        )
        self.metadata = BatchMetadata(max_tokens=ROWS, max_slots=2, device="cpu")
        self.metadata.prepare(torch.zeros(ROWS, dtype=torch.int32))
        self.workspace = DenseWorkspace([self.linear.slots], max_tokens=ROWS)

    def run(self, x: Tensor) -> Tensor:
        return self.linear(x, self.metadata, self.workspace)


class Experts:
    """A rank with weights of 8 bits: the layer also has a map of experts and scales."""

    def __init__(self) -> None:
        values = (torch.zeros(2, 2 * WIDTH, K), torch.zeros(2, K, WIDTH))
        weights = [Quantised(v.to(torch.float8_e4m3fn), torch.ones(v.shape[:2])) for v in values]
        self.layer = FusedMoELoRA(
            *weights,
            gate_up=GateUp.HALVES,
            num_slots=2,
            rank=4,
            dtype=torch.float32,
            place=MoERank(ep_size=2),
        )
        self.metadata = BatchMetadata(max_tokens=ROWS, max_slots=2, device="cpu")
        self.metadata.prepare(torch.zeros(ROWS, dtype=torch.int32))
        sizes = {"max_tokens": ROWS, "top_k": 1}
        self.pairs = PairMetadata(**sizes, num_experts=1, max_slots=2, device="cpu", with_base=True)
        self.scratch = MoEScratch([self.layer], **sizes)

    def run(self, x: Tensor) -> Tensor:
        ids = torch.zeros(ROWS, 1, dtype=torch.int32)
        state = (self.metadata, self.pairs, self.scratch)
        return self.layer(x, ids, torch.ones(ROWS, 1), *state, quantised_x=quantise_rows(x))


class Graphs:
    """What torch builds a CUDA graph from: the inputs whose address may change from step to step,
    which are copied before each replay, and those that the graph writes."""

    def __init__(self) -> None:
        self.moving: list[str] = []
        self.written: list[str] = []

    def backend(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        return compile_fx(graph, inputs, inner_compile=self.inner)

    def inner(self, graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        placeholders = graph.graph.find_nodes(op="placeholder")
        static = {placeholders[index] for index in options["static_input_idxs"]}
        copies = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        self.moving = [p.name for p in placeholders if p not in static]
        self.written = [c.args[0].name for c in copies]
        return _boxed(graph)


def _boxed(graph: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    def run(args: list[Any]) -> Any:
        return graph(*args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


# the buffers that a step writes: the workspace, and in a MoE layer act, y and the tables of pairs
@pytest.mark.parametrize(("model", "buffers"), [(Linear, 1), (Experts, 3 + 10)])
def test_only_the_input_of_the_step_may_move(
    model: Callable[[], Linear | Experts], buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # buffers of a CPU are in no CUDA graph, and are not marked
    monkeypatch.setattr(runtime, "_may_be_in_a_graph", lambda buffer: True)
    torch._dynamo.reset()
    graphs, x = Graphs(), torch.zeros(ROWS, K)
    torch.compile(model().run, backend=graphs.backend, fullgraph=True)(x)
    assert len(graphs.written) == buffers
    assert len(graphs.moving) == 1, "of the inputs only x is another tensor in each step"
    assert graphs.moving[0] not in graphs.written


REDUCE_OVERHEAD = """
import torch
from torch._dynamo.utils import counters
from lorakernels.batch.metadata import BatchMetadata
from lorakernels.dense.ops import DenseWorkspace
from lorakernels.dense.weights import LoRAFactors
from lorakernels.layers.linear import LoRALinear
from lorakernels.layers.partition import Slice

torch.manual_seed(0)
weight = torch.randn(256, 128, device="cuda").bfloat16() / 12
linear = LoRALinear(weight, slices=(Slice("q", 256),), num_slots=2, rank=16)
metadata = BatchMetadata(max_tokens=64, max_slots=2, device="cuda")
workspace = DenseWorkspace([linear.slots], max_tokens=64)

def load(scale):
    for slot in range(2):
        a, b = torch.randn(16, 128) / 12, torch.randn(256, 16)
        linear.load_adapter(slot, {"q": LoRAFactors(a, b, scale)})

load(1.0)
compiled = torch.compile(lambda x: linear(x, metadata, workspace), mode="reduce-overhead")
for step in range(6):
    if step == 4:
        load(2.0)
    metadata.prepare((torch.arange(64, dtype=torch.int32) + step) % 3 - 1)
    x = torch.randn(64, 128, device="cuda").bfloat16()
    wanted = linear(x, metadata, workspace)
    found = compiled(x).clone()
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
assert counters["inductor"]["cudagraph_skips"] == 0, counters["inductor"]
assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] > 0, "no graph was recorded"
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_reduce_overhead_records_a_graph_around_a_layer(
    run_compiled: Callable[[str], None],
) -> None:
    run_compiled(REDUCE_OVERHEAD)
