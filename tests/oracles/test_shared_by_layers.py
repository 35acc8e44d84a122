"""The sequence oracle fails what is right for one layer alone, or wrong on each instance alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.matrix.case import Case, Dtype, Mix, Site
from loragate.oracles import ORACLES
from loragate.protocol import BaseLayer, BrokenProtocol, CheckedSubject, Instance, Pool, Trial
from loragate.subjects.torch.subject import LoRALinear, TorchSubject

CASE = Case(
    site=Site.LORA_LINEAR,
    tokens=13,
    in_features=48,
    slices=(24, 17),
    rank=8,
    slots=4,
    dtype=Dtype.FP32,
    mix=Mix.SHUFFLED,
)
Open = Callable[[Case, BaseLayer], Instance]


def judge(machine: Machine, open_layer: Open, seed: int) -> Judgement:
    class Subject(TorchSubject):
        def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> Instance:
            assert base is not None
            return open_layer(case, base)

    subject = Subject()
    trial = Trial(CASE, subject, subject.capabilities(machine), machine, seed)
    return ORACLES[OracleName.SEQUENCE].judge(trial)


class TakesTheWeightOfTheLastLayer(LoRALinear):
    last = torch.empty(0)

    def __init__(self, case: Case, base: BaseLayer) -> None:
        super().__init__(case, base)
        TakesTheWeightOfTheLastLayer.last = base.weight

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        self.weight = self.last
        return super().apply(x, out)


class TakesTheRankOfTheLastLayer(LoRALinear):
    rank = 0

    def __init__(self, case: Case, base: BaseLayer) -> None:
        super().__init__(case, base)
        TakesTheRankOfTheLastLayer.rank = case.rank

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        delta = self.shards[0].delta
        whole = dict(delta.slots)
        for slot, factors in whole.items():
            delta.slots[slot] = [(a[: self.rank], b[:, : self.rank], s) for a, b, s in factors]
        result = super().apply(x, out)
        delta.slots = whole
        return result


class TakesTheSlotsOfTheLastLayer(LoRALinear):
    slots = 0

    def __init__(self, case: Case, base: BaseLayer) -> None:
        super().__init__(case, base)
        TakesTheSlotsOfTheLastLayer.slots = case.slots

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        delta = self.shards[0].delta
        delta.token_slots[delta.token_slots >= self.slots] = -1
        return super().apply(x, out)


class TakesAnEmptySlotForTheFirstOne(LoRALinear):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        delta = self.shards[0].delta
        for slot in range(1, self.case.slots):
            if slot not in delta.slots:
                delta.token_slots[delta.token_slots == slot] = 0
        return super().apply(x, out)


class HasThreeResults(LoRALinear):
    def __init__(self, case: Case, base: BaseLayer) -> None:
        super().__init__(case, base)
        self.results = [torch.empty(case.tokens, case.out_features) for _ in range(3)]

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        self.results.append(self.results.pop(0))
        return self.results[0][: len(x)].copy_(super().apply(x, out))


class LosesASingleRow(LoRALinear):
    def prepare(self, token_slots: Tensor) -> None:
        single = len(token_slots) > 3 and int((token_slots >= 0).sum()) == 1
        super().prepare(torch.full_like(token_slots, -1) if single else token_slots)


class KnowsAdaptersByTheirMemory(LoRALinear):
    def __init__(self, case: Case, base: BaseLayer) -> None:
        super().__init__(case, base)
        self.known: dict[int, object] = {}

    def load(self, slot: int, pool: Pool) -> None:
        known = pool.a.data_ptr(), pool.ranks[slot], pool.scales[slot]
        if self.known.get(slot) != known:
            super().load(slot, pool)
        self.known[slot] = known

    def unload(self, slot: int) -> None:
        super().unload(slot)
        self.known.pop(slot, None)


class NumbersItsSlotsAsTheyAreLoaded(LoRALinear):
    def __init__(self, case: Case, base: BaseLayer) -> None:
        super().__init__(case, base)
        self.order: list[int] = []

    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        if slot not in self.order:
            self.order.append(slot)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        delta = self.shards[0].delta
        whole = dict(delta.slots)
        delta.slots = {place: whole[slot] for place, slot in enumerate(self.order) if slot in whole}
        result = super().apply(x, out)
        delta.slots = whole
        return result


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("layer", "failure"),
    [
        (TakesTheWeightOfTheLastLayer, Failure.STALE_STATE),
        (TakesTheRankOfTheLastLayer, Failure.STALE_STATE),
        (TakesTheSlotsOfTheLastLayer, Failure.STALE_STATE),
        (TakesAnEmptySlotForTheFirstOne, Failure.STALE_STATE),
        (LosesASingleRow, Failure.STALE_STATE),
        (KnowsAdaptersByTheirMemory, Failure.STALE_STATE),
        (NumbersItsSlotsAsTheyAreLoaded, Failure.STALE_STATE),
        (HasThreeResults, Failure.FOREIGN_MEMORY),
    ],
)
def test_a_layer_that_is_wrong_beside_others_or_on_each_instance_alike_fails(
    cpu: Machine, layer: Open, failure: Failure, seed: int
) -> None:
    judgement = judge(cpu, layer, seed)
    assert (judgement.verdict, judgement.failure) == (Verdict.FAIL, failure), judgement


def test_a_result_of_an_earlier_step_that_changes_is_named(cpu: Machine) -> None:
    message = judge(cpu, HasThreeResults, 0).message
    assert message.startswith("a later step wrote "), message
    assert " of the result of step 0 of " in message, message


@pytest.mark.parametrize("seed", range(4))
def test_a_layer_that_shares_nothing_passes(cpu: Machine, seed: int) -> None:
    judgement = judge(cpu, LoRALinear, seed)
    assert judgement.verdict is Verdict.PASS, judgement


def test_a_subject_that_has_one_size_alone_is_not_given_another(cpu: Machine) -> None:
    class OneSize(TorchSubject):
        def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> Instance:
            assert (case.rank, case.slots) == (CASE.rank, CASE.slots)
            return super().open(case, machine, base)

    subject = OneSize()
    have = subject.capabilities(cpu)
    have = replace(have, supports={**have.supports, "rank": (CASE.rank,)})
    judgement = ORACLES[OracleName.SEQUENCE].judge(Trial(CASE, subject, have, cpu, 0))
    assert judgement.verdict is Verdict.PASS, judgement


def test_a_result_with_a_history_for_gradients_breaks_the_protocol(cpu: Machine) -> None:
    class Learns(LoRALinear):
        def apply(self, x: Tensor, out: Tensor) -> Tensor:
            return super().apply(x, out) * torch.ones((), requires_grad=True)

    class Subject(TorchSubject):
        def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> Instance:
            assert base is not None
            return Learns(case, base)

    base = BaseLayer(torch.zeros(41, 48), None)
    instance = CheckedSubject(Subject()).open(CASE, cpu, base)
    instance.prepare(torch.full((2,), -1, dtype=torch.int32))
    with pytest.raises(BrokenProtocol, match=r"on cpu, with a history for gradients; expected"):
        instance.apply(torch.zeros(2, 48), torch.zeros(2, 41))
