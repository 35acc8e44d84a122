"""The model that `bench graphs` measures, small and in the interpreter."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
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


class Clock:
    """Makes steps that take `beside` us of the host's own work and 2 us of a launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_us, self.order = 0.0, list[str]()
        clock = self

        class Graph:
            def replay(self) -> None:
                # one launch of five takes longer
                clock.now_us += 9 if len(clock.order) % 5 == 0 else 2

        self._graph = Graph()
        monkeypatch.setattr(graphs.time, "perf_counter", lambda: self.now_us / 1e6)
        monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
        monkeypatch.setattr("torch.cuda.CUDAGraph", Graph)

    def step(self, name: str, beside: Callable[[], float]) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            self.order.append(name)
            self.now_us += beside() - 1
            torch.cuda.CUDAGraph.replay(self._graph)  # type: ignore[arg-type]
            self.now_us += 1
            return torch.empty(0)

        return run


def test_the_hosts_work_is_a_step_without_the_call_that_launches_its_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    assert graphs._host_us([clock.step("only", lambda: 4)]) == [pytest.approx((6.0, 2.0))]


def test_steps_of_the_host_follow_each_other_and_themselves_alike_and_a_slow_while_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)

    def work(base: float) -> Callable[[], float]:
        # the machine is slow for a third of the time
        return lambda: base + (40.0 if 500 < len(clock.order) < 1000 else 0.0)

    found = graphs._host_us([clock.step("a", work(4)), clock.step("b", work(5))])
    assert found == [pytest.approx((6.0, 2.0)), pytest.approx((7.0, 2.0))]
    pairs = Counter(pairwise(clock.order))
    assert set(pairs) == {("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")}
    assert max(pairs.values()) - min(pairs.values()) <= 1


def test_the_first_turns_of_a_step_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_TURNS", 1)
    clock = Clock(monkeypatch)
    found = graphs._host_us(
        [clock.step("only", lambda: 4 if len(clock.order) > graphs._WARM_UP else 100)]
    )
    assert found == [pytest.approx((6.0, 2.0))]


def test_rows_of_the_host_that_a_model_has_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [HostRow("dense", 2), MemoryRow("dense"), HostRow("other", 2), HostRow("other", 8)]
    together: list[list[HostRow]] = []

    def host_us(steps: list[HostRow]) -> list[tuple[float, float]]:
        together.append(steps)
        return [(50.0 + step.slots, 20.0) for step in steps]

    monkeypatch.setattr(graphs, "_model", lambda model, slots, machine: small(SHAPES[0]))
    monkeypatch.setattr(graphs, "_host_step", lambda row, model: row)
    monkeypatch.setattr(graphs, "_host_us", host_us)
    monkeypatch.setattr(graphs, "_memory", lambda row, machine: MemoryFigures(row, 1, 1))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    machine, candidate = Machine("cpu", "", None, 1, 0), find_contender("lorakernels")
    found = graphs.run_graphs(candidate, None, rows, machine, lambda text: None)
    assert [one.row for one in found.measured] == rows
    assert [one.work_us for one in found.hosts] == [32.0, 32.0, 38.0]
    assert together == [rows[:1], rows[2:]]


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
