from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.bench import dense, timer
from loragate.bench.contender import Contender, WrongResult
from loragate.bench.dense import measure_row, measure_steps, run_dense
from loragate.bench.figures import Times
from loragate.bench.rows import BASE, DenseRow
from loragate.commands.bench import judge
from loragate.core.machine import Machine
from loragate.core.verdict import ExitCode
from loragate.inputs.pairs import out_rows
from loragate.matrix.case import Case, Execution, Site
from loragate.oracles.numeric.deltas import deltas
from loragate.protocol import BaseLayer, Batch, Capabilities, Instance, Pool

CPU = Machine("cpu", "test", None, 1, 0)
ROW = DenseRow("down", 1, 16)


class PlainInstance:
    """The delta by plain torch; `factor` makes it a wrong one. Counts what it was asked."""

    def __init__(self, factor: float) -> None:
        self.factor, self.steps = factor, list[list[int]]()
        self.pool: Pool | None = None

    def load(self, slot: int, pool: Pool) -> None:
        self.pool = pool

    def unload(self, slot: int) -> None:
        raise AssertionError("nothing is unloaded in a benchmark")

    def prepare(self, token_slots: Tensor) -> None:
        self.token_slots = token_slots.cpu()
        self.steps.append(self.token_slots.tolist())

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        assert self.pool is not None
        rows = out_rows(Batch(x, self.token_slots, out))
        delta = deltas(self.pool, x, rows, torch.float32) * self.factor
        return out.add_(delta.to(out.dtype))


class PlainSubject:
    def __init__(self, name: str, factor: float = 1.0) -> None:
        self.name, self._factor = name, factor
        self.opened: list[PlainInstance] = []

    def version(self) -> str:
        return "1"

    def capabilities(self, machine: Machine) -> Capabilities:
        raise AssertionError("the caller has asked already")

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> Instance:
        self.opened.append(PlainInstance(self._factor))
        return self.opened[-1]


def contender(name: str, factor: float = 1.0) -> Contender:
    have = Capabilities(
        sites=frozenset({Site.DENSE_DELTA}),
        supports={
            "dtype": frozenset({ROW.case.dtype}),
            "execution": frozenset({Execution.EAGER}),
            "rank": range(1, 513),
        },
    )
    return Contender(PlainSubject(name, factor), have)


@pytest.fixture(autouse=True)
def counted_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is the number of calls so far: nothing here depends on a clock or a device."""

    def count(calls: Mapping[str, Callable[[], object]], each: float = 10.0) -> dict[str, float]:
        for call in calls.values():
            call()
        return {name: each * (index + 1) for index, name in enumerate(calls)}

    monkeypatch.setattr(dense, "graph_of", lambda call: call)
    monkeypatch.setattr(dense, "replay_in_turns", count)
    monkeypatch.setattr(dense, "in_turns", count)
    monkeypatch.setattr(dense, "in_turns_cold", lambda calls: count(calls, 15.0))
    monkeypatch.setattr(dense, "wall", lambda call: (call(), (1.0, 2.0))[1])
    monkeypatch.setattr(dense, "copy_bytes_per_s", lambda: 4e12)


def test_a_subject_is_timed_together_with_the_base_and_listed_by_name() -> None:
    measured = measure_row(ROW, [contender("ours"), contender("theirs")], CPU)
    assert measured.base_us == 10.0
    assert measured.with_lora_us == {"ours": 20.0, "theirs": 30.0}
    assert measured.cold == Times(15.0, {"ours": 30.0, "theirs": 45.0})
    assert all(0.5 < error < 1.5 for error in measured.errors.values())


def test_what_is_timed_of_a_subject_is_the_base_product_and_its_delta_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, found = dense._draw_step(ROW, CPU), dict[str, Tensor]()

    def clock(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        for name, call in calls.items():
            step.out.fill_(float("nan"))
            call()
            found[name] = step.out.clone()
        return dict.fromkeys(calls, 1.0)

    monkeypatch.setattr(dense, "_draw_step", lambda row, machine: step)
    monkeypatch.setattr(dense, "in_turns", clock)
    measure_row(ROW, [contender("ours")], CPU)
    assert found.keys() == {BASE, "ours"}
    assert not any(result.isnan().any() for result in found.values())
    assert not torch.equal(found[BASE], found["ours"])


def test_a_cold_call_follows_an_eviction_whose_time_is_taken_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    def replay(graphs: Mapping[Any, Callable[[], object]]) -> dict[Any, float]:
        """Ten microseconds for each part of a graph."""
        times = {}
        for name, graph in graphs.items():
            before = len(done)
            graph()
            times[name] = 10.0 * (len(done) - before)
        return times

    monkeypatch.setattr(timer, "_eviction", lambda: lambda: done.append("evict"))
    monkeypatch.setattr(timer, "graph_of", lambda call: call)
    monkeypatch.setattr(timer, "replay_in_turns", replay)
    calls = {"one": lambda: done.append("one"), "two": lambda: done.extend(["two"] * 2)}
    assert timer.in_turns_cold(calls) == {"one": 10.0, "two": 20.0}
    assert done == ["evict", "one", "evict", "two", "two", "evict"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, which has an L2 cache")
def test_an_eviction_reads_twice_what_the_cache_holds_and_can_be_captured() -> None:
    x = torch.ones(1 << 20, device="cuda")
    times = timer.in_turns_cold({"read": lambda: x.sum()})
    assert set(times) == {"read"}
    (data,) = [cell for cell in _cells(timer._eviction()) if cell.dim() == 2]
    assert data.nbytes >= 1.9 * torch.cuda.get_device_properties(0).L2_cache_size


def _cells(function: Callable[[], object]) -> list[Tensor]:
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


@pytest.mark.parametrize("factor", [0.9, 0.0, float("nan")])
def test_a_subject_with_a_wrong_result_is_never_timed(factor: float) -> None:
    with pytest.raises(WrongResult, match=r"theirs at down\.m1\.r16: its error is"):
        measure_row(ROW, [contender("ours"), contender("theirs", factor)], CPU)


def test_metadata_is_timed_without_adapters_with_one_and_with_all_slots_active() -> None:
    ours = contender("ours")
    steps = list(measure_steps(ours, CPU, captured=True))
    assert [(s.tokens, s.active) for s in steps[:5]] == [(1, 0), (1, 1), (16, 0), (16, 1), (16, 8)]
    assert [s.device_us for s in steps] == [10.0] * len(steps)
    assert {s.device_us for s in measure_steps(ours, CPU, captured=False)} == {None}


def test_a_run_has_every_row_and_the_steps_of_both_subjects() -> None:
    lines: list[str] = []
    run = run_dense(contender("ours"), contender("theirs"), [ROW], CPU, lines.append)
    assert (run.candidate, run.baseline, len(run.rows)) == ("ours", "theirs", 1)
    assert {step.subject for step in run.steps} == {"ours", "theirs"}
    assert lines[0] == "[1/1] down.m1.r16: base 10.0, ours +10.0, theirs +20.0"
    assert run.payload()["executed"] == 1
    assert judge(run) is not ExitCode.OK
