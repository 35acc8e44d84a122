"""A case with execution GRAPH is captured with another mapping than it is replayed with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.core.verdict import OracleName, Verdict
from loragate.execution import runners
from loragate.execution.graph import Captured
from loragate.matrix.case import Case, Dtype, Execution, Site
from loragate.oracles import ORACLES
from loragate.protocol import BaseLayer, Capabilities, Instance, Trial, raised_by_subject
from loragate.subjects.torch.subject import DenseDelta, TorchSubject

CUDA = Machine("cuda", "test", None, 1, 0)
CPU = Machine("cpu", "test", None, 1, 0)
CASE = Case(
    site=Site.DENSE_DELTA,
    tokens=24,
    in_features=64,
    slices=(32, 16),
    rank=8,
    slots=3,
    dtype=Dtype.BF16,
)
JUDGES = [
    OracleName.REFERENCE,
    OracleName.EXACT,
    OracleName.BASE_ROWS,
    OracleName.CANARY,
    OracleName.REPEAT,
    OracleName.PERMUTE,
    OracleName.SEQUENCE,
]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


class Masked(DenseDelta):
    """Every slot for every row, selected by a mapping on the device: nothing is frozen by a
    capture but shapes. Weights live in buffers that keep their addresses."""

    def __init__(self, case: Case, device: str) -> None:
        super().__init__(case)
        self.mapping = torch.full((case.tokens,), -1, device=device)
        self.a, self.b = [], []
        self.scales = torch.zeros(case.slots, len(case.slices), device=device)
        for width in case.slices:
            self.a.append(torch.zeros(case.slots, case.rank, case.in_features, device=device))
            self.b.append(torch.zeros(case.slots, width, case.rank, device=device))

    def load(self, slot: int, pool: object) -> None:
        super().load(slot, pool)  # type: ignore[arg-type]
        for part, (a, b, scale) in enumerate(self.slots[slot]):
            self.a[part][slot].zero_()[: len(a)] = a
            self.b[part][slot].zero_()[:, : len(a)] = b
            self.scales[slot, part] = scale

    def unload(self, slot: int) -> None:
        for weight in (*self.a, *self.b):
            weight[slot].zero_()

    def prepare(self, token_slots: Tensor) -> None:
        self.mapping.fill_(-1)[: len(token_slots)] = token_slots.to(self.mapping.device)

    def live(self, slot: int, rows: int) -> Tensor:
        return (self.mapping[:rows] == slot)[:, None]

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        for slot in range(len(self.scales)):
            column = 0
            for part, (a, b) in enumerate(zip(self.a, self.b, strict=True)):
                columns = out[:, column : column + b.shape[1]]
                delta = self.scales[slot, part] * (x.float() @ a[slot].T) @ b[slot].T
                live = self.live(slot, len(x))
                columns.copy_(torch.where(live, columns + delta.to(out.dtype), columns))
                column += b.shape[1]
        return out


class CapturedMapping(Masked):
    """What is in the mapping at the first step of a shape stays."""

    def __init__(self, case: Case, device: str) -> None:
        super().__init__(case, device)
        self.captured: dict[int, Tensor] = {}

    def live(self, slot: int, rows: int) -> Tensor:
        return (self.captured.setdefault(rows, self.mapping[:rows].clone()) == slot)[:, None]


class SkipsUnusedSlots(Masked):
    """A slot without rows at the time of the capture is left out of the graph."""

    used: frozenset[int] = frozenset()

    def prepare(self, token_slots: Tensor) -> None:
        super().prepare(token_slots)
        self.used = frozenset(token_slots.tolist())

    def live(self, slot: int, rows: int) -> Tensor:
        live = super().live(slot, rows)
        return live if slot in self.used else torch.zeros_like(live)


class GraphSubject(TorchSubject):
    def __init__(self, instance: type[Masked]) -> None:
        self.instance = instance

    def capabilities(self, machine: Machine) -> Capabilities:
        have = super().capabilities(machine)
        assert not isinstance(have, str)
        return replace(have, supports={**have.supports, "execution": frozenset(Execution)})

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> Instance:
        return self.instance(case, machine.device)


def verdict(
    instance: type[Masked], oracle: OracleName, machine: Machine, execution: Execution
) -> Verdict:
    subject = GraphSubject(instance)
    case = replace(CASE, execution=execution)
    trial = Trial(case, subject, subject.capabilities(machine), machine, seed=3)
    return ORACLES[oracle].judge(trial).verdict


@pytest.mark.parametrize("oracle", JUDGES)
@pytest.mark.parametrize("instance", [Masked, SkipsUnusedSlots])
def test_without_a_graph_nothing_is_wrong(instance: type[Masked], oracle: OracleName) -> None:
    assert verdict(instance, oracle, CPU, Execution.EAGER) is Verdict.PASS


@needs_gpu
@pytest.mark.parametrize("oracle", JUDGES)
def test_a_subject_that_can_be_replayed_passes(oracle: OracleName) -> None:
    assert verdict(Masked, oracle, CUDA, Execution.GRAPH) is Verdict.PASS


@needs_gpu
@pytest.mark.parametrize("oracle", [OracleName.REFERENCE, OracleName.EXACT])
@pytest.mark.parametrize("instance", [CapturedMapping, SkipsUnusedSlots])
def test_what_a_capture_freezes_is_wrong_for_the_step(
    instance: type[Masked], oracle: OracleName
) -> None:
    assert verdict(instance, oracle, CUDA, Execution.GRAPH) is Verdict.FAIL


@dataclass
class RunsAgain:
    """In place of a CUDA graph: runs the captured call again, into the memory of its result."""

    call: Callable[[], Tensor]
    result: Tensor

    def replay(self) -> None:
        self.result.copy_(self.call())


@pytest.fixture
def captured_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Tensor]]:
    """What was captured; nothing is frozen but what the call itself keeps."""
    captured: list[Callable[[], Tensor]] = []

    def capture(call: Callable[[], Tensor]) -> Captured[Tensor]:
        captured.append(call)
        result = call()
        graph: Any = RunsAgain(call, result)
        return Captured(graph, result)

    monkeypatch.setattr(runners, "capture", capture)
    return captured


@pytest.mark.parametrize("oracle", JUDGES)
def test_a_step_of_a_graph_is_a_replay_with_the_mapping_and_the_memory_of_the_step(
    captured_on_cpu: list[Callable[[], Tensor]], oracle: OracleName
) -> None:
    assert verdict(Masked, oracle, CPU, Execution.GRAPH) is Verdict.PASS
    assert captured_on_cpu


@pytest.mark.parametrize("oracle", [OracleName.REFERENCE, OracleName.EXACT])
def test_a_graph_is_captured_with_another_mapping_than_that_of_the_step(
    captured_on_cpu: list[Callable[[], Tensor]], oracle: OracleName
) -> None:
    assert verdict(CapturedMapping, oracle, CPU, Execution.GRAPH) is Verdict.FAIL


def test_an_error_that_shows_when_the_capture_ends_is_the_subjects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def capture(call: Callable[[], Tensor]) -> Captured[Tensor]:
        call()
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(runners, "capture", capture)
    with pytest.raises(RuntimeError, match="previous error during capture") as caught:
        verdict(Masked, OracleName.REFERENCE, CPU, Execution.GRAPH)
    assert raised_by_subject(caught.value)


def test_every_execution_of_the_matrix_has_a_runner() -> None:
    assert runners.RUNNERS.keys() == set(Execution)
