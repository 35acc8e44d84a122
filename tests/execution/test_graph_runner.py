"""What a runner of graphs changes between a capture and a replay, so that a leftover shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.execution.session import Session, inputs_of
from loragate.execution.streams.model import MODULE
from loragate.inputs import DataKind, copy_batch, make_batch
from loragate.matrix.case import Case, Dtype, Execution, RouterWeights, Site
from loragate.protocol import BaseLayer, Capabilities, Routes, Trial
from loragate.subjects.torch.subject import TorchSubject

CPU = Machine("cpu", "test", None, 1, 0)
CASE = Case(
    site=Site.MOE_DELTA,
    tokens=9,
    in_features=8,
    slices=(8,),
    rank=2,
    slots=2,
    dtype=Dtype.FP32,
    experts=5,
    top_k=2,
    router=RouterWeights.OUTPUT,
    execution=Execution.GRAPH,
)


class Adds:
    """Knows no adapters."""

    def load(self, *adapter: object) -> None: ...

    def unload(self, slot: int) -> None: ...

    def prepare(self, token_slots: Tensor) -> None: ...


class AddsItsIds(Adds):
    def ids(self, routes: Routes) -> Tensor:
        return routes.topk_ids

    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        return out.add_(self.ids(routes).view(-1, 1))


class AddsItsFirstIds(AddsItsIds):
    first: Tensor | None = None

    def ids(self, routes: Routes) -> Tensor:
        if self.first is None:
            self.first = routes.topk_ids.clone()
        return self.first


class LeavesTheLastRow(Adds):
    """A captured step writes all rows but the last one, which the first step has written."""

    result: Tensor | None = None

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        if self.result is None:
            self.result = torch.ones_like(out)
        self.result[:-1].copy_(out[:-1])
        return self.result


class Opens(TorchSubject):
    def __init__(self, instance: type[Adds]) -> None:
        self.instance = instance

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> Any:
        return self.instance()


def trial_of(instance: type[Adds], case: Case) -> Trial:
    subject = Opens(instance)
    have = subject.capabilities(CPU)
    assert isinstance(have, Capabilities)
    return Trial(case, subject, have, CPU, seed=3)


def replayed(instance: type[Adds], case: Case) -> tuple[Tensor, Any]:
    """The result of a step, and its batch as it was before."""
    trial = trial_of(instance, case)
    _, batch, base = inputs_of(trial, DataKind.SIGNED)
    return Session(trial, base).step(copy_batch(batch)), batch


def test_the_ids_of_the_experts_are_others_while_a_step_is_captured() -> None:
    for instance, is_right in ((AddsItsIds, True), (AddsItsFirstIds, False)):
        result, batch = replayed(instance, CASE)
        assert torch.equal(result, batch.out + batch.routes.topk_ids.view(-1, 1)) is is_right


def test_what_a_replay_does_not_write_of_its_result_is_nan() -> None:
    result, batch = replayed(LeavesTheLastRow, replace(CASE, site=Site.LORA_LINEAR))
    assert torch.equal(result[:-1], batch.out[:-1])
    assert result[-1].isnan().all()


def test_graphs_of_one_session_share_their_memory_and_those_of_two_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pools: list[object] = []
    graph = MODULE.graph

    @contextmanager
    def noted(cuda_graph: Any, *, pool: object = None, **options: Any) -> Iterator[None]:
        pools.append(pool)
        with graph(cuda_graph, pool=pool, **options):
            yield

    # what `torch.cuda.graph` means while a graph is captured
    monkeypatch.setattr(MODULE, "graph", noted)
    trial = trial_of(AddsItsIds, CASE)
    for _ in range(2):
        session = Session(trial, None)
        for tokens in (9, 4, 2):
            case = replace(CASE, tokens=tokens)
            session.step(make_batch(case, 3, 0, DataKind.SIGNED, CPU))
    assert None not in pools
    assert pools == [pools[0]] * 3 + [pools[3]] * 3
    assert pools[0] != pools[3]
