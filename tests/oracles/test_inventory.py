"""The inventory oracle, with subjects whose captured graph serves one batch only, on modelled
streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.inputs.draw import torch_dtype
from loragate.matrix.case import Case, Execution, Mix, Streams
from loragate.oracles import ORACLES
from loragate.protocol import HotPath, Pool, Trial
from loragate.run.trial import run_trial

from .stream_layers import Layer, OverwritesTheInput

ORACLE = ORACLES[OracleName.INVENTORY]
PROMISES = {"hot_path": frozenset({HotPath.CAPTURES_ANY_MAPPING})}


class Forked:
    """dense_delta with one matrix a slot: rows are chosen on a side stream, and joined."""

    def __init__(self, case: Case) -> None:
        dtype = torch_dtype(case.dtype)
        width, depth = case.out_features, case.in_features
        self.table = torch.zeros(case.tokens, dtype=torch.int64)
        self.weights = torch.zeros(case.slots + 1, width, depth, dtype=dtype)
        self.chosen = torch.zeros(case.tokens, width, depth, dtype=dtype)
        self.side = torch.cuda.Stream()

    def load(self, slot: int, pool: Pool) -> None:
        self.weights[slot + 1] = 1

    def unload(self, slot: int) -> None:
        self.weights[slot + 1].zero_()

    def prepare(self, token_slots: Tensor) -> None:
        self.table.copy_(token_slots + 1, non_blocking=True)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        self.fork(out)
        with torch.cuda.stream(self.side):
            torch.index_select(self.weights, 0, self.table, out=self.chosen)
        self.join()
        return out.add_(torch.bmm(self.chosen, x.unsqueeze(-1)).squeeze(-1))

    def fork(self, out: Tensor) -> None:
        self.side.wait_stream(torch.cuda.current_stream())

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self.side)


class WithoutJoin(Forked):
    def join(self) -> None:
        pass


class LeavesOutBaseRows(Forked):
    def prepare(self, token_slots: Tensor) -> None:
        super().prepare(token_slots)
        self.has_adapters = bool((token_slots >= 0).any())

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        return super().apply(x, out) if self.has_adapters else out


class ForksForAdapters(LeavesOutBaseRows):
    """Something runs beside the side stream, but in front of it without adapters."""

    def fork(self, out: Tensor) -> None:
        if not self.has_adapters:
            out.add_(0)
        super().fork(out)
        if self.has_adapters:
            out.add_(0)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        return Forked.apply(self, x, out)


class TableForEachStep(Forked):
    def prepare(self, token_slots: Tensor) -> None:
        self.table = torch.empty_like(self.table)
        super().prepare(token_slots)


class TableForOtherSteps(Forked):
    """Keeps the table of the mapping that it met first, and that of the last step."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.kept, self.known = self.table, torch.empty(0)

    def prepare(self, token_slots: Tensor) -> None:
        if not len(self.known):
            self.known = token_slots.clone()
        is_known = torch.equal(token_slots, self.known)
        self.table = self.kept if is_known else torch.empty_like(self.kept)
        super().prepare(token_slots)


class NodeForEachAdapter(Forked):
    """Each adapter that a batch uses has a node, on memory of its own."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.terms = [torch.zeros(()) for _ in range(case.slots)]
        self.used: list[int] = []

    def prepare(self, token_slots: Tensor) -> None:
        super().prepare(token_slots)
        self.used = sorted({slot for slot in token_slots.tolist() if slot >= 0})

    def fork(self, out: Tensor) -> None:
        for slot in self.used:
            out.add_(self.terms[slot])
        super().fork(out)


class WeightsMovedByALoad(Forked):
    def load(self, slot: int, pool: Pool) -> None:
        self.weights = self.weights.clone()
        super().load(slot, pool)


class GivesABufferBack(Forked):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.functional = torch.zeros_like(self.chosen)

    def join(self) -> None:
        super().join()
        self.chosen.copy_(self.functional)


class AssignsANumber(Forked):
    def fork(self, out: Tensor) -> None:
        self.chosen[...] = 0
        super().fork(out)


class ZeroForEachStep(Forked):
    def prepare(self, token_slots: Tensor) -> None:
        super().prepare(token_slots)
        self.zero = torch.zeros(())

    def fork(self, out: Tensor) -> None:
        self.chosen[...] = self.zero
        super().fork(out)


class AsksTheDevice(Forked):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        return super().apply(x, out) if self.table.max().item() >= 0 else out


class ReadsItsOwnFlag(Forked):
    """The flag lies on the host beside a GPU, too, as that of vLLM."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.flag = torch.zeros(1, dtype=torch.bool)

    def prepare(self, token_slots: Tensor) -> None:
        super().prepare(token_slots)
        self.flag.fill_(False)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        return out if self.flag.item() else super().apply(x, out)


ON_HOST = {"host_tensors": lambda instance: [instance.flag]}


def judge(
    instance: type[Forked],
    seed: int,
    make_trial: Callable[..., Trial],
    promises: Mapping[str, object] = PROMISES,
) -> Judgement:
    trial = make_trial(instance, seed, promises, mix=Mix.SHUFFLED, streams=Streams.DUAL)
    trial = replace(trial, case=replace(trial.case, oracles=(OracleName.INVENTORY,)))
    (judgement,) = run_trial(trial)
    return judgement


@pytest.mark.parametrize(
    ("instance", "message"),
    [
        (WithoutJoin, "the end of the capture does not wait for node 0 (index_select)"),
        (LeavesOutBaseRows, "but missing if captured with base rows only"),
        (ForksForAdapters, "if captured with base rows only"),
        (TableForEachStep, "which nobody holds now"),
        (WeightsMovedByALoad, "node 0 (index_select) uses"),
        (ZeroForEachStep, "node 0 (fill_) uses result of zeros, float32 [], which"),
        (GivesABufferBack, "needless copy"),
    ],
)
def test_a_graph_that_is_right_for_its_own_batch_only_fails(
    instance: type[Forked], message: str, make_trial: Callable[..., Trial]
) -> None:
    for seed in range(3):
        judgement = judge(instance, seed, make_trial)
        assert judgement.failure is Failure.WRONG_GRAPH, judgement
        assert message in judgement.message


@pytest.mark.parametrize(
    ("promises", "how"), [(PROMISES, "with base rows only"), ({}, "with another mapping")]
)
def test_memory_of_any_graph_that_nobody_holds_is_found_where_the_first_one_keeps_its_own(
    promises: Mapping[str, object], how: str, make_trial: Callable[..., Trial]
) -> None:
    judgement = judge(TableForOtherSteps, 1, make_trial, promises)
    assert judgement.failure is Failure.WRONG_GRAPH, judgement
    assert judgement.where == {"flaw": "dangling pointer", "captured": how}
    assert "which nobody holds now" in judgement.message


def test_a_graph_with_nodes_for_the_adapters_of_its_own_batch_alone_fails(
    make_trial: Callable[..., Trial],
) -> None:
    for seed in range(3):
        judgement = judge(NodeForEachAdapter, seed, make_trial, promises={})
        assert judgement.failure is Failure.WRONG_GRAPH, judgement
        where = {"flaw": "graph of another batch", "captured": "with another mapping"}
        assert judgement.where == where


def test_nodes_of_one_graph_that_share_bytes_without_a_path_fail(
    judge_streams: Callable[..., Judgement],
) -> None:
    assert judge_streams(Layer, OracleName.INVENTORY).verdict is Verdict.PASS
    judgement = judge_streams(OverwritesTheInput, OracleName.INVENTORY)
    assert judgement.failure is Failure.WRONG_GRAPH, judgement
    assert judgement.where["flaw"] == "unordered pair"


def test_a_step_that_waits_for_the_device_cannot_be_captured(
    make_trial: Callable[..., Trial],
) -> None:
    assert judge(AsksTheDevice, 1, make_trial).failure is Failure.HOST_WAIT


def test_what_a_subject_says_is_on_the_host_is_read_without_a_wait(
    make_trial: Callable[..., Trial],
) -> None:
    judgement = judge(ReadsItsOwnFlag, 1, make_trial, PROMISES | ON_HOST)
    assert judgement.verdict is Verdict.PASS, judgement
    assert judge(ReadsItsOwnFlag, 1, make_trial).failure is Failure.HOST_WAIT


def test_a_graph_that_serves_every_batch_passes(make_trial: Callable[..., Trial]) -> None:
    for seed in range(20):
        judgement = judge(AssignsANumber if seed % 2 else Forked, seed, make_trial)
        assert judgement.verdict is Verdict.PASS, judgement
        assert judgement.metrics["graphs"] == 3


def test_a_graph_is_captured_with_base_rows_alone_only_where_that_is_promised(
    make_trial: Callable[..., Trial],
) -> None:
    judgement = judge(LeavesOutBaseRows, 1, make_trial, promises={})
    assert judgement.verdict is Verdict.PASS, judgement
    assert judgement.metrics["graphs"] == 2


def test_captures_are_judged_where_streams_are_modelled_or_a_case_captures(
    make_trial: Callable[..., Trial],
) -> None:
    assert ORACLE.applies(make_trial(streams=Streams.DUAL)) is None
    assert ORACLE.applies(make_trial()) is not None
    assert ORACLE.applies(make_trial(streams=Streams.DUAL, tokens=0)) is not None
    eager = make_trial(streams=Streams.DUAL)
    on_gpu = replace(eager, machine=replace(eager.machine, device="cuda"))
    assert ORACLE.applies(on_gpu) == "the case captures no graph"
    graph = replace(on_gpu, case=replace(on_gpu.case, execution=Execution.GRAPH))
    assert ORACLE.applies(graph) is None
