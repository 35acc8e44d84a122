"""MoE layers in two parts of a fork."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.layers.gate_up import GateUp  # noqa: E402
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch  # noqa: E402
from lorakernels.moe.align.metadata import PairMetadata  # noqa: E402
from lorakernels.moe.delta.ops import MoEPath, MoEWorkspace, moe_delta  # noqa: E402
from lorakernels.moe.weights import ExpertFactors  # noqa: E402
from lorakernels.runtime.streams import fork_join  # noqa: E402

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, RANK, SLOTS, ROWS = 2, 2, 16, 16, 4, 2, 4
CPU = torch.device("cpu")


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Layer:
    """A layer with the state of a step."""

    def __init__(self, seed: int) -> None:
        sizes = (EXPERTS, 2 * INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)
        weights = [randn(*size, seed=seed + i) for i, size in enumerate(sizes)]
        self.layer = FusedMoELoRA(*weights, gate_up=GateUp.HALVES, num_slots=SLOTS, rank=RANK)
        a = randn(EXPERTS, RANK, HIDDEN, seed=seed + 2)
        b = randn(EXPERTS, INTERMEDIATE, RANK, seed=seed + 3)
        self.layer.load_adapter(0, {"experts.gate_proj": ExpertFactors(a, b, 1.5)})
        step = {"max_tokens": ROWS, "top_k": TOP_K}
        self.scratch = MoEScratch([self.layer], **step)
        self.pairs = PairMetadata(
            **step, num_experts=EXPERTS, max_slots=SLOTS, device="cpu", with_base=True
        )
        self.batch = BatchMetadata(max_tokens=ROWS, max_slots=SLOTS, device="cpu")
        self.batch.prepare(torch.tensor([0, -1, 0, 0], dtype=torch.int32))
        self.x = randn(ROWS, HIDDEN, seed=seed + 4)
        self.ids = torch.tensor([[0, 1], [1, 0]] * 2, dtype=torch.int32)

    def run(self) -> Tensor:
        weights = torch.full((ROWS, TOP_K), 0.5)
        return self.layer(self.x, self.ids, weights, self.batch, self.pairs, self.scratch)


def copying(out: Tensor, work: Callable[[], Tensor]) -> Callable[[], None]:
    def run() -> None:
        out.copy_(work())

    return run


def test_layers_with_buffers_of_their_own_run_beside_each_other(recorded_streams: Any) -> None:
    first, second = Layer(0), Layer(10)
    wanted = first.run(), second.run()
    out = torch.empty(ROWS, HIDDEN)
    assert torch.equal(fork_join(CPU, first.run, copying(out, second.run)), wanted[0])
    assert torch.equal(out, wanted[1])


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        ("pairs", "pairs must not be shared by parts of a fork"),
        ("scratch", "scratch must not be shared by parts of a fork"),
    ],
)
def test_layers_that_share_a_buffer_are_refused(
    shared: str, message: str, recorded_streams: Any
) -> None:
    first, second = Layer(0), Layer(10)
    setattr(second, shared, getattr(first, shared))
    wanted = first.run()
    with pytest.raises(ValueError, match=message):
        fork_join(CPU, first.run, copying(torch.empty(ROWS, HIDDEN), second.run))
    assert torch.equal(first.run(), wanted)


def test_scratch_that_shares_its_workspace_is_refused(recorded_streams: Any) -> None:
    first, second = Layer(0), Layer(10)
    second.scratch.workspace = first.scratch.workspace
    with pytest.raises(ValueError, match="workspace must not be shared by parts of a fork"):
        fork_join(CPU, first.run, copying(torch.empty(ROWS, HIDDEN), second.run))


@pytest.mark.parametrize("path", MoEPath)
def test_deltas_share_pairs_but_no_workspace(path: MoEPath, recorded_streams: Any) -> None:
    made = Layer(0)
    made.run()
    slots = made.layer.w13_slots

    def delta(workspace: MoEWorkspace) -> Callable[[], None]:
        out = torch.zeros(ROWS * TOP_K, 2 * INTERMEDIATE)
        return lambda: moe_delta(made.x, slots, made.pairs, workspace, out, path=path)

    first, second = (MoEWorkspace([slots], max_tokens=ROWS, top_k=TOP_K) for _ in range(2))
    fork_join(CPU, delta(first), delta(second))
    with pytest.raises(ValueError, match="workspace must not be shared by parts of a fork"):
        fork_join(CPU, delta(first), delta(first))
