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

from loragate.bench import graphs, graphs_host, graphs_profile
from loragate.bench.contender import find_contender
from loragate.bench.graphs_figures import MemoryFigures, ReplayFigures
from loragate.bench.graphs_host import HostTime, HostTurns
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
        monkeypatch.setattr(graphs_host.time, "perf_counter", lambda: self.now_us / 1e6)
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


def turns_of(*steps: Callable[[], torch.Tensor]) -> HostTurns:
    return HostTurns([HostRow("dense", number) for number in range(len(steps))], steps)


def figures(work: float, quietest: float | None = None) -> tuple[Any, ...]:
    """A step's whole time, of which 2 us are the launch, and the least time beside it."""
    return pytest.approx((work + 2.0, 2.0, work if quietest is None else quietest))


def figures_of(turns: HostTurns) -> list[tuple[float, float, float]]:
    return [(one.host_us, one.launch_us, one.quietest_us) for one in turns.figures()]


def test_the_hosts_work_is_a_step_without_the_call_that_launches_its_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    assert figures_of(turns_of(clock.step("only", lambda: 4))) == [figures(4)]


def test_steps_of_the_host_follow_each_other_and_themselves_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    turns = turns_of(clock.step("a", lambda: 4), clock.step("b", lambda: 5))
    turns.take()
    pairs = Counter(pairwise(clock.order))
    assert set(pairs) == {("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")}
    assert max(pairs.values()) - min(pairs.values()) <= 1
    assert figures_of(turns) == [figures(4), figures(5)]


def test_a_figure_of_the_host_is_the_median_over_rounds_beside_the_least_of_each_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graphs_host, "_ROUNDS", 5)
    clock = Clock(monkeypatch)
    now = [0.0, 0.0]
    turns = turns_of(clock.step("a", lambda: now[0]), clock.step("b", lambda: now[1]))
    for work in [(9.0, 5.0), (6.0, 8.0), (4.0, 10.0)]:
        now[:] = work
        turns.take()
    # those that are left
    now[:] = 7.0, 9.0
    assert figures_of(turns) == [figures(7, 4), figures(9, 5)]
    assert len(turns.rounds) == 5


@pytest.mark.parametrize(("slow", "wanted"), [(4, figures(4)), (8, figures(44, 4))])
def test_a_machine_that_is_slow_in_some_rounds_changes_no_figure_and_in_most_all_but_the_least(
    monkeypatch: pytest.MonkeyPatch, slow: int, wanted: tuple[float, float, float]
) -> None:
    a_round = graphs_host._WARM_UP + graphs_host._TURNS
    clock = Clock(monkeypatch)
    step = clock.step("only", lambda: 44 if len(clock.order) <= slow * a_round else 4)
    assert figures_of(turns_of(step)) == [wanted]


def test_the_first_turns_of_a_step_in_a_round_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_host, "_TURNS", 1)
    monkeypatch.setattr(graphs_host, "_ROUNDS", 1)
    clock = Clock(monkeypatch)
    only = clock.step("only", lambda: 4 if len(clock.order) > graphs_host._WARM_UP else 100)
    assert figures_of(turns_of(only)) == [figures(4)]


def test_rounds_of_the_host_are_spread_over_the_other_rows_of_a_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [
        MemoryRow("dense"),
        HostRow("dense", 2),
        ReplayRow("dense", 1, 1),
        HostRow("other", 2),
        HostRow("other", 8),
        MemoryRow("other"),
    ]
    done: list[object] = []

    def a_round(steps: list[HostRow]) -> list[HostTime]:
        done.append(steps)
        return [HostTime(30.0 + step.slots, 20.0) for step in steps]

    def memory(row: MemoryRow, machine: Machine) -> MemoryFigures:
        done.append(row)
        return MemoryFigures(row, 1, 1)

    def replay(row: ReplayRow, machine: Machine, profile: object) -> ReplayFigures:
        done.append(row)
        return ReplayFigures(row, 1.0, 1.0)

    monkeypatch.setattr(graphs, "decode_model", lambda model, slots, machine: small(SHAPES[0]))
    monkeypatch.setattr(graphs_host, "_step", lambda row, model: row)
    monkeypatch.setattr(graphs_host, "_round", a_round)
    monkeypatch.setattr(graphs_host, "_ROUNDS", 3)
    monkeypatch.setattr(graphs, "_memory", memory)
    monkeypatch.setattr(graphs, "_replay", replay)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    machine, candidate = Machine("cpu", "", None, 1, 0), find_contender("lorakernels")
    found = graphs.run_graphs(candidate, None, rows, machine, lambda text: None)
    assert [one.row for one in found.measured] == rows
    assert [one.work_us for one in found.hosts] == [32.0, 32.0, 38.0]
    dense, other = [rows[1]], [rows[3], rows[4]]
    assert done == [dense, rows[0], dense, rows[2], dense, other, rows[5], other, other]


def test_builds_are_compared_by_captured_steps_with_adapters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = (ReplayRow("dense", 4, 2), ReplayRow("experts", 1, 1))
    shapes = dict(zip(("dense", "experts"), SHAPES, strict=True))
    monkeypatch.setattr(graphs, "decode_model", lambda model, slots, machine: small(shapes[model]))
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


def process_of(row: ReplayRow, machine: Machine) -> float:
    return float(os.getpid())


def test_what_is_profiled_runs_in_one_other_process_so_that_nothing_stays_attached_to_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graphs_profile, "_profile", process_of)
    row, machine = ReplayRow("dense", 1, 1), Machine("cpu", "", None, 1, 0)
    with graphs_profile.profiler() as profile:
        found = {profile(row, machine) for _ in range(2)}
    assert len(found) == 1
    assert os.getpid() not in found


def test_an_error_of_the_process_that_profiles_is_raised_where_the_row_is_measured() -> None:
    with (
        graphs_profile.profiler() as profile,
        pytest.raises(KeyError, match="no such model"),
    ):
        profile(ReplayRow("no such model", 1, 1), Machine("cpu", "", None, 1, 0))
