"""A case with execution GRAPH is captured with another mapping than it is replayed with."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.execution import runners
from loragate.execution.graph import Captured
from loragate.inputs import DataKind, make_batch
from loragate.matrix.case import Case, Dtype, Execution, Site
from loragate.oracles import ORACLES
from loragate.oracles.state import graph
from loragate.protocol import (
    BaseLayer,
    Capabilities,
    HotPath,
    Instance,
    Trial,
    raised_by_subject,
    subject_code,
)
from loragate.run.trial import judge_with
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
    OracleName.GRAPH,
]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="real graphs need a GPU")
MACHINES = [pytest.param(CPU, id="model"), pytest.param(CUDA, id="gpu", marks=needs_gpu)]


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


class LoadsIntoNewMemory(Masked):
    """A graph reads the weights that were there when it was captured."""

    def load(self, slot: int, pool: object) -> None:
        self.a = [weight.clone() for weight in self.a]
        super().load(slot, pool)


class NewMappingEachStep(Masked):
    def prepare(self, token_slots: Tensor) -> None:
        self.mapping = self.mapping.clone()
        super().prepare(token_slots)


class ScalesOnTheHost(Masked):
    """Scales become numbers of the captured operators."""

    def __init__(self, case: Case, device: str) -> None:
        super().__init__(case, device)
        self.host_scales = self.scales.tolist()

    def load(self, slot: int, pool: object) -> None:
        super().load(slot, pool)
        self.host_scales = self.scales.tolist()

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        scales, self.scales = self.scales, _Scales(self.host_scales)  # type: ignore[assignment]
        try:
            return super().apply(x, out)
        finally:
            self.scales = scales


class _Scales(list[list[float]]):
    def __getitem__(self, place: Any) -> Any:
        slot, part = place
        return super().__getitem__(slot)[part]


class SumsOverPadding(Masked):
    """Rows are given the sum of all rows, times zero."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        return super().apply(x + x.sum() * 0, out)


class WritesPastTheLastColumn(Masked):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        super().apply(x, out)
        end = out.storage_offset() + (len(out) - 1) * out.stride(0) + out.shape[1]
        out.as_strided((1,), (1,), end).fill_(0)
        return out


class RemembersAnEmptyCapture(Masked):
    """Where no adapter is loaded when it is captured, nothing is captured."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        return super().apply(x, out) if self.slots else out


class LeavesBaseRowsOut(Masked):
    """A capture in which no row has an adapter is one without adapters."""

    used = True

    def prepare(self, token_slots: Tensor) -> None:
        super().prepare(token_slots)
        self.used = bool((token_slots >= 0).any())

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        return super().apply(x, out) if self.used else out


class ReadsTheDevice(Masked):
    """A captured step must not wait."""

    def live(self, slot: int, rows: int) -> Tensor:
        live = super().live(slot, rows)
        return live if live.any().item() else torch.zeros_like(live)


# each is right without a graph
FREEZES = [
    SkipsUnusedSlots,
    LoadsIntoNewMemory,
    NewMappingEachStep,
    ScalesOnTheHost,
    RemembersAnEmptyCapture,
]


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
    instance: type[Masked],
    oracle: OracleName,
    machine: Machine,
    execution: Execution = Execution.GRAPH,
    promises: frozenset[HotPath] = frozenset(),
) -> Verdict:
    return ORACLES[oracle].judge(trial_of(instance, machine, execution, promises)).verdict


def trial_of(
    instance: type[Masked],
    machine: Machine,
    execution: Execution = Execution.GRAPH,
    promises: frozenset[HotPath] = frozenset(),
) -> Trial:
    subject = GraphSubject(instance)
    case = replace(CASE, execution=execution)
    have = replace(subject.capabilities(machine), hot_path=promises)
    return Trial(case, subject, have, machine, seed=3)


@pytest.mark.parametrize("oracle", [o for o in JUDGES if o is not OracleName.GRAPH])
@pytest.mark.parametrize("instance", [Masked, *FREEZES, ReadsTheDevice])
def test_without_a_graph_nothing_is_wrong(instance: type[Masked], oracle: OracleName) -> None:
    assert verdict(instance, oracle, CPU, Execution.EAGER) is Verdict.PASS


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("oracle", JUDGES)
def test_a_subject_that_can_be_replayed_passes(oracle: OracleName, machine: Machine) -> None:
    assert verdict(Masked, oracle, machine, Execution.GRAPH) is Verdict.PASS


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("oracle", [OracleName.REFERENCE, OracleName.EXACT])
@pytest.mark.parametrize("instance", [CapturedMapping, SkipsUnusedSlots])
def test_what_a_capture_freezes_is_wrong_for_the_step(
    instance: type[Masked], oracle: OracleName, machine: Machine
) -> None:
    assert verdict(instance, oracle, machine, Execution.GRAPH) is Verdict.FAIL


@pytest.mark.parametrize("machine", MACHINES)
def test_what_a_replay_writes_around_its_output_is_seen(machine: Machine) -> None:
    assert verdict(WritesPastTheLastColumn, OracleName.CANARY, machine) is Verdict.FAIL


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("instance", [CapturedMapping, SumsOverPadding, *FREEZES])
def test_what_changes_between_replays_and_not_in_the_graph_is_seen(
    instance: type[Masked], machine: Machine
) -> None:
    assert verdict(instance, OracleName.GRAPH, machine, Execution.GRAPH) is Verdict.FAIL


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("promises", [frozenset(), frozenset({HotPath.CAPTURES_ANY_MAPPING})])
def test_base_rows_are_captured_where_the_subject_allows_that(
    promises: frozenset[HotPath], machine: Machine
) -> None:
    wanted = Verdict.FAIL if promises else Verdict.PASS
    assert verdict(LeavesBaseRowsOut, OracleName.GRAPH, machine, promises=promises) is wanted


@pytest.mark.parametrize("machine", MACHINES)
def test_a_step_that_waits_for_the_device_cannot_be_captured(machine: Machine) -> None:
    judgement = judge_with(ORACLES[OracleName.GRAPH], trial_of(ReadsTheDevice, machine))
    assert judgement.failure is Failure.EXCEPTION
    # on a GPU what the capture's end says hides the cause
    assert re.search("not permitted|previous error during capture", judgement.message)


def test_an_error_that_becomes_a_system_error_on_its_way_stays_the_subjects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dropped = SystemError("error return without exception set")

    def judge(trial: Trial) -> Judgement:
        with pytest.raises(RuntimeError, match="not permitted"), subject_code():
            raise RuntimeError("not permitted")
        raise dropped

    def judge_without_subject(trial: Trial) -> Judgement:
        raise dropped

    oracle = ORACLES[OracleName.GRAPH]
    monkeypatch.setattr(oracle, "judge", judge)
    judgement = judge_with(oracle, trial_of(Masked, CPU))
    assert judgement.failure is Failure.EXCEPTION
    assert "not permitted" in judgement.message
    # an error of another judgement is no explanation
    monkeypatch.setattr(oracle, "judge", judge_without_subject)
    assert judge_with(oracle, trial_of(Masked, CPU)).failure is Failure.HARNESS


def test_a_system_error_stands_for_the_last_error_of_the_subject_and_for_no_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def judge(trial: Trial) -> Judgement:
        for message in ("provoked", "refused", "not permitted"):
            with pytest.raises(RuntimeError, match=message), subject_code():
                raise RuntimeError(message)
        raise SystemError("error return without exception set")

    oracle = ORACLES[OracleName.GRAPH]
    monkeypatch.setattr(oracle, "judge", judge)
    judgement = judge_with(oracle, trial_of(Masked, CPU))
    assert judgement.failure is Failure.EXCEPTION
    assert judgement.message.startswith("RuntimeError: not permitted")


class EndOfTests(BaseException):
    """What ends a run of tests, as a time limit does."""


@pytest.mark.parametrize("end", [KeyboardInterrupt, EndOfTests])
def test_what_ends_a_run_and_becomes_a_system_error_on_its_way_ends_it(
    end: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(trial: Trial) -> Judgement:
        with pytest.raises(end), subject_code():
            raise end
        raise SystemError("error return without exception set")

    oracle = ORACLES[OracleName.GRAPH]
    monkeypatch.setattr(oracle, "judge", judge)
    with pytest.raises(end):
        judge_with(oracle, trial_of(Masked, CPU))


def test_replays_are_compared_in_every_mixture_of_slots_and_padding() -> None:
    subject = GraphSubject(Masked)
    case = replace(CASE, execution=Execution.GRAPH)
    trial = Trial(case, subject, subject.capabilities(CPU), CPU, seed=3)
    judgement = ORACLES[OracleName.GRAPH].judge(trial)
    # twelve scenes, four of them with two sizes of batches
    assert judgement.metrics == {"steps": 16.0}
    assert ORACLES[OracleName.GRAPH].applies(trial) is None
    eager = replace(trial, case=replace(case, execution=Execution.EAGER))
    assert ORACLES[OracleName.GRAPH].applies(eager) == "only a case of graphs captures"


class NotesItsInput(Masked):
    """Without a graph: what each step has in its rows."""

    seen: ClassVar[list[Tensor]] = []

    def __init__(self, case: Case, device: str) -> None:
        super().__init__(case, device)
        self.is_noted = case.execution is Execution.EAGER

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        if self.is_noted:
            self.seen.append(x.clone())
        return super().apply(x, out)


def test_each_step_has_other_data_so_that_what_is_kept_of_an_earlier_one_shows() -> None:
    NotesItsInput.seen.clear()
    assert verdict(NotesItsInput, OracleName.GRAPH, CPU) is Verdict.PASS
    rows = min(len(x) for x in NotesItsInput.seen)
    given = torch.stack([x[:rows] for x in NotesItsInput.seen]).flatten(1)
    assert len(given) == len(given.unique(dim=0)) == 16


def test_an_error_that_shows_when_the_capture_ends_is_the_subjects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def capture(call: Callable[[], Tensor], *, pool: Any) -> Captured[Tensor]:
        call()
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(runners, "capture", capture)
    with pytest.raises(RuntimeError, match="previous error during capture") as caught:
        verdict(Masked, OracleName.REFERENCE, CPU, Execution.GRAPH)
    assert raised_by_subject(caught.value)


def test_every_execution_of_the_matrix_has_a_runner() -> None:
    assert runners.RUNNERS.keys() == set(Execution)


def test_every_pair_of_a_live_token_is_compared_and_no_pair_of_padding() -> None:
    case = replace(CASE, site=Site.MOE_DELTA, tokens=6, experts=4, top_k=3)
    batch = make_batch(case, 1, 0, DataKind.EXACT, CPU)
    kept = graph._without_padding(torch.ones(18, 4), batch, live=2)
    assert kept[:6].all()
    assert not kept[6:].any()
