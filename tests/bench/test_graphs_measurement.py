"""The model that `bench graphs` measures, small and in the interpreter."""

from __future__ import annotations

import os

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"

from loragate.bench.graphs_rows import ModelShape
from loragate.bench.lorakernels_decode import DecodeSteps
from lorakernels.serving.graph_runner import GraphRunner

SHAPES = [
    ModelShape(32, (32, 16, 16), 48),
    ModelShape(32, (32, 16, 16), 16, experts=4, top_k=2),
]


def small(shape: ModelShape) -> DecodeSteps:
    return DecodeSteps(
        shape, layers=2, slots=3, rank=4, max_tokens=6, dtype=torch.float32, device="cpu"
    )


@pytest.mark.parametrize("shape", SHAPES, ids=["dense", "experts"])
def test_a_step_of_the_runner_is_that_of_the_model_and_adapters_change_it(
    shape: ModelShape,
) -> None:
    model = small(shape)
    runner = GraphRunner(model.step, model.inputs, model.buffers, sizes=[6])
    slots, ids = torch.tensor([0, -1, 2, 1], dtype=torch.int32), torch.arange(4)
    with torch.no_grad():
        base = runner.run(slots, ids=ids).clone()
        with model.adapters():
            adapted = runner.run(slots, ids=ids).clone()
    assert adapted.shape == (4, 32)
    assert adapted.isfinite().all()
    assert (adapted != base).any(dim=1).tolist() == [True, False, True, True]
