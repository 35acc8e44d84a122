"""The model that `bench graphs` measures, small and in the interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"

from loragate.bench import graphs
from loragate.bench.contender import find_contender
from loragate.bench.graphs_figures import MemoryFigures
from loragate.bench.graphs_rows import HostRow, MemoryRow, ModelShape, ReplayRow
from loragate.bench.lorakernels_decode import DecodeSteps
from loragate.core.machine import Machine
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


def test_the_hosts_work_is_a_step_without_the_call_that_launches_its_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]

    class Graph:
        def replay(self) -> None:
            # a launch that takes 2 us in 3 of 4 steps
            now[0] += 2e-6 if len(steps) % 4 else 9e-6

    steps: list[int] = []

    def run() -> torch.Tensor:
        steps.append(1)
        now[0] += 3e-6
        torch.cuda.CUDAGraph.replay(graph)  # type: ignore[arg-type]
        now[0] += 1e-6
        return torch.empty(0)

    graph = Graph()
    monkeypatch.setattr(graphs.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("torch.cuda.CUDAGraph", Graph)
    assert graphs._host_us(run) == (pytest.approx(6.0), pytest.approx(2.0))


def test_rows_of_the_host_take_turns_and_a_disturbed_round_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [HostRow("dense", 2), MemoryRow("dense"), HostRow("other", 2), HostRow("other", 8)]
    timed: list[HostRow] = []

    def host_us(step: HostRow) -> tuple[float, float]:
        timed.append(step)
        # the machine is slow while each of them has its third and fourth turn
        slow = 40.0 if timed.count(step) in (3, 4) else 0.0
        return 50.0 + step.slots + slow, 20.0

    monkeypatch.setattr(graphs, "_model", lambda model, slots, machine: small(SHAPES[0]))
    monkeypatch.setattr(graphs, "_host_step", lambda row, model: row)
    monkeypatch.setattr(graphs, "_host_us", host_us)
    monkeypatch.setattr(graphs, "_memory", lambda row, machine: MemoryFigures(row, 1, 1))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    machine, candidate = Machine("cpu", "", None, 1, 0), find_contender("lorakernels")
    found = graphs.run_graphs(candidate, None, rows, machine, lambda text: None)
    assert [one.row for one in found.measured] == rows
    assert [one.work_us for one in found.hosts] == [32.0, 32.0, 38.0]
    # both rows of a model within each round
    assert timed[-4:] == rows[2:] * 2
    assert [timed.count(row) for row in (rows[0], *rows[2:])] == [graphs._ROUNDS] * 3


def test_builds_are_compared_by_captured_steps_with_adapters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = (ReplayRow("dense", 4, 2), ReplayRow("experts", 1, 1))
    shapes = dict(zip(("dense", "experts"), SHAPES, strict=True))
    monkeypatch.setattr(graphs, "_model", lambda model, slots, machine: small(shapes[model]))
    heard: list[torch.Tensor] = []

    def clock(calls: Mapping[Any, Callable[[], object]]) -> dict[Any, float]:
        assert list(calls) == ["step"]
        heard.append(cast(torch.Tensor, calls["step"]()))
        return {"step": 7.0}

    machine = Machine("cpu", "", None, 1, 0)
    candidate = find_contender("lorakernels")
    measured = list(graphs.measure(candidate, None, rows, machine, clock, print))
    assert measured == [graphs.StepTime(row, 7.0) for row in rows]
    assert [tuple(step.shape) for step in heard] == [(4, 32), (1, 32)]
    for row, step in zip(rows, heard, strict=True):
        model = small(shapes[row.model])
        nobody = torch.full((row.tokens,), -1, dtype=torch.int32)
        model.inputs.write(nobody, {"ids": torch.arange(row.tokens)})
        model.buffers.batch.prepare(nobody)
        with torch.no_grad():
            base = model.step(row.tokens)
        # every row of the step has an adapter
        assert (step != base).any(dim=1).all()
