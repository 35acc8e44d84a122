"""Each oracle fails the wrong subjects of moe_delta, and no correct one.

A wrong subject is the torch subject with one change. For every seed the oracle must give FAIL with
the failure that names the kind of the defect.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.inputs.placement import whole
from loragate.matrix.case import (
    Case,
    Dtype,
    ExpertMap,
    Layout,
    Mix,
    RouterWeights,
    Routing,
    Sharing,
    Site,
    Source,
    Write,
)
from loragate.oracles import ORACLES
from loragate.protocol import (
    BaseLayer,
    Capabilities,
    Guard,
    MoEInstance,
    Pool,
    Routes,
    Trial,
    unsupported,
)
from loragate.subjects.torch.subject import MoEDelta, TorchSubject

CPU = Machine("cpu", "test", None, 1, 0)
NUMERIC = (
    OracleName.REFERENCE,
    OracleName.EXACT,
    OracleName.BASE_ROWS,
    OracleName.CANARY,
    OracleName.REPEAT,
    OracleName.PERMUTE,
    OracleName.SEQUENCE,
)
CASE = Case(
    site=Site.MOE_DELTA,
    tokens=16,
    in_features=48,
    slices=(24, 17),
    rank=8,
    slots=3,
    dtype=Dtype.FP32,
    experts=6,
    top_k=2,
)
PARALLEL = replace(CASE, expert_map=ExpertMap.PARALLEL)
WEIGHTED = replace(CASE, router=RouterWeights.OUTPUT, source=Source.PAIR, slices=(33,))
STORED = replace(CASE, write=Write.STORE)


class Subject(TorchSubject):
    """The torch subject with instances of another class."""

    def __init__(self, instance: type[MoEDelta], **promises: Any) -> None:
        self.instance, self.promises = instance, promises

    def capabilities(self, machine: Machine) -> Capabilities:
        have = super().capabilities(machine)
        assert not isinstance(have, str)
        return replace(have, **self.promises)

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> MoEInstance:
        return self.instance(case)


def judge(instance: type[MoEDelta], oracle: OracleName, seed: int, case: Case) -> Judgement:
    subject = Subject(instance)
    trial = Trial(case, subject, subject.capabilities(CPU), CPU, seed)
    assert ORACLES[oracle].applies(trial) is None
    return ORACLES[oracle].judge(trial)


class NextExpert(MoEDelta):
    def local_experts(self, routes: Routes) -> Tensor:
        experts = super().local_experts(routes)
        return torch.where(experts < 0, experts, (experts + 1) % self.case.experts)


class NextExpertsA(MoEDelta):
    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        self.slots[slot] = [(a.roll(1, 0), b, scale) for a, b, scale in self.slots[slot]]


class NextSlotsB(MoEDelta):
    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        other = (slot + 1) % pool.num_slots
        self.slots[slot] = [
            (a, pool.b[part][other, :, :, : a.shape[1]].clone(), scale)
            for part, (a, _, scale) in enumerate(self.slots[slot])
        ]


class UpWithGatesA(MoEDelta):
    """sglang #27274"""

    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        factors = self.slots[slot]
        if len(factors) > 1 and len(factors[1][0][0]):
            a, b, scale = factors[1]
            factors[1] = (pool.a[slot, :, 0, : a.shape[1]].clone(), b, scale)


class GateAndUpSwapped(MoEDelta):
    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        delta = super().apply(x, torch.zeros_like(out), routes)
        gate, up = delta.split(self.case.slices, 1)
        return out.add_(torch.cat([up, gate], 1))


class ZeroAddedToAbsentSlices(MoEDelta):
    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        super().apply(x, out, routes)
        slots = self.token_slots.repeat_interleave(routes.topk_ids.shape[1])
        out[(slots >= 0) & (self.local_experts(routes) >= 0)] += 0.0
        return out


class FirstExpertForAll(MoEDelta):
    """A factor for each expert is read as a shared one."""

    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        self.slots[slot] = [(a[:1], b, scale) for a, b, scale in self.slots[slot]]


class RouterWeightLost(MoEDelta):
    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        return super().apply(x, out, replace(routes, weights=None))


class RouterWeightTwice(MoEDelta):
    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        assert routes.weights is not None
        return super().apply(x, out, replace(routes, weights=routes.weights.square()))


class FirstChoicesWeight(MoEDelta):
    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        assert routes.weights is not None
        weights = routes.weights[:, :1].expand_as(routes.weights).contiguous()
        return super().apply(x, out, replace(routes, weights=weights))


class RowOfTheTokenForPairs(MoEDelta):
    """x of w2 read as if it were that of w13."""

    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        top_k = routes.topk_ids.shape[1]
        rows = torch.arange(len(out)) // top_k
        return super().apply(x[rows], out, routes)


class LastExpertLost(MoEDelta):
    def local_experts(self, routes: Routes) -> Tensor:
        experts = super().local_experts(routes)
        return torch.where(experts == self.case.experts - 1, -1, experts)


class LastAdapterLostBesideBaseRows(MoEDelta):
    """vllm #32277"""

    def prepare(self, token_slots: Tensor) -> None:
        super().prepare(token_slots)
        if (token_slots < 0).any():
            self.token_slots[token_slots == self.case.slots - 1] = -1


class AddsWhereItShouldStore(MoEDelta):
    def __init__(self, case: Case) -> None:
        super().__init__(replace(case, write=Write.ADD))


class StoresWhereItShouldAdd(MoEDelta):
    def __init__(self, case: Case) -> None:
        super().__init__(replace(case, write=Write.STORE))


class DeltaForBaseRows(MoEDelta):
    def prepare(self, token_slots: Tensor) -> None:
        self.token_slots = token_slots.clamp(min=0)


class ExpertsElsewhereCountAsTheFirst(MoEDelta):
    """sglang #23178"""

    def local_experts(self, routes: Routes) -> Tensor:
        return super().local_experts(routes).clamp(min=0)


class NegativeIdsIndexTheMap(MoEDelta):
    def local_experts(self, routes: Routes) -> Tensor:
        assert routes.expert_map is not None
        # Python counts from the end
        return routes.expert_map[routes.topk_ids.flatten().long()].long()


class GlobalIdsTakenForLocalOnes(MoEDelta):
    def local_experts(self, routes: Routes) -> Tensor:
        ids = super().local_experts(replace(routes, expert_map=None))
        return torch.where(ids < self.case.experts, ids, -1)


class ZeroStoredForSkippedPairs(MoEDelta):
    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        skipped = super().local_experts(routes) < 0
        slots = self.token_slots.repeat_interleave(routes.topk_ids.shape[1])
        out[skipped | (slots < 0)] = 0
        return super().apply(x, out, routes)


class WritesAPairPastTheLast(MoEDelta):
    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        super().apply(x, out, routes)
        whole(out)[out.storage_offset() + out.numel() + 1] += 1
        return out


class SumsAllExperts(MoEDelta):
    """Reads experts that no pair uses, and multiplies by zero."""

    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        super().apply(x, out, routes)
        used = super().local_experts(routes) >= 0
        slots = self.token_slots.repeat_interleave(routes.topk_ids.shape[1])
        for slot, factors in self.slots.items():
            for a, b, _ in factors:
                out[used & (slots == slot)] += 0 * (a.sum() * b.sum())
        return out


class ReadsWeightsOfSkippedPairs(MoEDelta):
    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        super().apply(x, out, routes)
        assert routes.weights is not None
        out += 0 * routes.weights.sum()
        return out


class KeepsWhatItShouldOverwrite(MoEDelta):
    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        before = out.clone()
        super().apply(x, out, routes)
        return out.add_(0 * before)


class ChangesTheIds(MoEDelta):
    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        super().apply(x, out, routes)
        routes.topk_ids.copy_(routes.topk_ids.sort(1).values)
        routes.topk_ids[0, 0] += 1
        return out


class DependsOnTheExpertsNumber(MoEDelta):
    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        number = torch.arange(1, self.case.experts + 1)[:, None, None]
        self.slots[slot] = [(a * number, b, scale) for a, b, scale in self.slots[slot]]


class DependsOnTheChoicesPlace(MoEDelta):
    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        super().apply(x, out, routes)
        out += 0.5 * torch.arange(len(out))[:, None]
        return out


class KeepsTheFirstRouting(MoEDelta):
    routes: Routes | None = None

    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        if self.routes is None:
            self.routes = replace(routes, topk_ids=routes.topk_ids.clone())
        kept = self.routes.topk_ids[: len(routes.topk_ids)]
        return super().apply(x, out, replace(routes, topk_ids=kept))


class LoadsASlotOnce(MoEDelta):
    def load(self, slot: int, pool: Pool) -> None:
        if slot not in self.slots:
            super().load(slot, pool)


class CountsItsRuns(MoEDelta):
    runs = 0

    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        super().apply(x, out, routes)
        out += self.runs
        self.runs += 1
        return out


REFERENCE, EXACT = OracleName.REFERENCE, OracleName.EXACT
WRONG_ANSWERS = [
    (NextExpert, CASE),
    (NextExpertsA, CASE),
    (NextSlotsB, CASE),
    (UpWithGatesA, CASE),
    (GateAndUpSwapped, replace(CASE, slices=(24, 24))),
    (FirstExpertForAll, CASE),
    (RouterWeightLost, WEIGHTED),
    (RouterWeightTwice, WEIGHTED),
    (FirstChoicesWeight, WEIGHTED),
    (RowOfTheTokenForPairs, replace(CASE, source=Source.PAIR)),
    (LastExpertLost, CASE),
    (LastAdapterLostBesideBaseRows, CASE),
    (AddsWhereItShouldStore, STORED),
    (StoresWhereItShouldAdd, CASE),
    (ExpertsElsewhereCountAsTheFirst, PARALLEL),
    (NegativeIdsIndexTheMap, PARALLEL),
    (GlobalIdsTakenForLocalOnes, PARALLEL),
    (ZeroStoredForSkippedPairs, STORED),
]
OTHERS = [
    (OracleName.BASE_ROWS, Failure.BASE_ROW_CHANGED, DeltaForBaseRows, CASE),
    (OracleName.BASE_ROWS, Failure.BASE_ROW_CHANGED, ZeroStoredForSkippedPairs, STORED),
    (
        OracleName.BASE_ROWS,
        Failure.BASE_ROW_CHANGED,
        ExpertsElsewhereCountAsTheFirst,
        replace(PARALLEL, mix=Mix.SINGLE),
    ),
    (OracleName.CANARY, Failure.FOREIGN_MEMORY, WritesAPairPastTheLast, CASE),
    (OracleName.CANARY, Failure.FOREIGN_MEMORY, SumsAllExperts, CASE),
    (OracleName.CANARY, Failure.FOREIGN_MEMORY, ReadsWeightsOfSkippedPairs, WEIGHTED),
    (OracleName.CANARY, Failure.FOREIGN_MEMORY, KeepsWhatItShouldOverwrite, STORED),
    (OracleName.CANARY, Failure.FOREIGN_MEMORY, ChangesTheIds, CASE),
    (OracleName.REPEAT, Failure.NONDETERMINISTIC, CountsItsRuns, CASE),
    (OracleName.PERMUTE, Failure.NOT_EQUIVARIANT, DependsOnTheExpertsNumber, CASE),
    (OracleName.PERMUTE, Failure.NOT_EQUIVARIANT, DependsOnTheChoicesPlace, CASE),
    (OracleName.SEQUENCE, Failure.STALE_STATE, KeepsTheFirstRouting, CASE),
    (OracleName.SEQUENCE, Failure.STALE_STATE, LoadsASlotOnce, CASE),
]
WRONG = [
    *(
        (oracle, Failure.WRONG_ANSWER, *row)
        for oracle in (REFERENCE, EXACT)
        for row in WRONG_ANSWERS
    ),
    *OTHERS,
]


@pytest.mark.parametrize(
    ("oracle", "failure", "instance", "case"),
    [pytest.param(*row, id=f"{row[0]}-{row[2].__name__}") for row in WRONG],
)
def test_an_oracle_fails_a_wrong_moe_subject_for_every_seed(
    oracle: OracleName, failure: Failure, instance: type[MoEDelta], case: Case
) -> None:
    for seed in range(6):
        judgement = judge(instance, oracle, seed, case)
        assert (judgement.verdict, judgement.failure) == (Verdict.FAIL, failure), (seed, judgement)


def test_one_expert_that_loses_a_rank_is_seen_among_many_rows_of_others() -> None:
    class OneExpertsLastRankLost(MoEDelta):
        def load(self, slot: int, pool: Pool) -> None:
            super().load(slot, pool)
            for _, b, _ in self.slots[slot]:
                b[3, :, -1:] *= 0.9

    case = replace(CASE, tokens=60, dtype=Dtype.BF16)
    for seed in range(6):
        judgement = judge(OneExpertsLastRankLost, REFERENCE, seed, case)
        assert judgement.failure is Failure.WRONG_ANSWER, (seed, judgement)
        assert judgement.where["expert"] == 3


def test_a_wrong_answer_names_the_token_its_choice_and_the_expert() -> None:
    seen: list[int] = []

    class OneElement(MoEDelta):
        def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
            super().apply(x, out, routes)
            seen.append(int(self.local_experts(routes)[11]))
            out[11, 30] += 1
            return out

    where = judge(OneElement, EXACT, 0, PARALLEL).where
    # pair 11 of two choices each is the second one of token 5, column 30 the seventh of slice 1
    assert (where["token"], where["choice"], where["slice"], where["column"]) == (5, 1, 1, 6)
    assert [where["expert"]] == seen


RIGHT = {
    "plain": CASE,
    "shuffled_columns": replace(CASE, layout=Layout.COLUMN_SLICE, mix=Mix.SHUFFLED),
    "padded_and_mapped": replace(PARALLEL, layout=Layout.PADDED_ROWS, mix=Mix.LAST_SLOT),
    "stored": replace(STORED, expert_map=ExpertMap.PARALLEL, routing=Routing.SKEWED),
    "weighted": WEIGHTED,
    "weighted_and_stored": replace(WEIGHTED, write=Write.STORE, sharing=Sharing.SHARED_B),
    "shared_a": replace(CASE, sharing=Sharing.SHARED_A, layout=Layout.TRANSPOSED),
    "all_of_one": replace(CASE, experts=1, top_k=1),
    "all_base": replace(CASE, mix=Mix.ALL_BASE),
    "no tokens": replace(CASE, tokens=0),
}


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("name", RIGHT)
def test_no_oracle_fails_the_correct_moe_subject(name: str, dtype: Dtype) -> None:
    subject = Subject(MoEDelta)
    for seed in range(8):
        trial = Trial(
            replace(RIGHT[name], dtype=dtype), subject, subject.capabilities(CPU), CPU, seed
        )
        for oracle in NUMERIC:
            if ORACLES[oracle].applies(trial) is None:
                judgement = ORACLES[oracle].judge(trial)
                assert judgement.verdict is Verdict.PASS, (seed, judgement)


def test_a_case_beyond_the_stated_experts_or_writes_is_skipped() -> None:
    have = Subject(MoEDelta).capabilities(CPU)
    fewer = {"experts": range(1, 6), "write": {Write.ADD}}
    have = replace(have, supports={**have.supports, **fewer})
    assert unsupported(CASE, have) == "6 experts are above the limit of 5"
    few = replace(STORED, experts=4)
    assert unsupported(few, have) == "write store is not supported"
    assert unsupported(replace(few, write=Write.ADD), have) is None


def test_each_promised_refusal_of_an_moe_delta_is_required() -> None:
    promised = {Guard.TOPK_DTYPE, Guard.TOPK_SHAPE, Guard.TOPK_STRIDES, Guard.ADAPTER_EXPERTS}
    promised |= {Guard.ROUTER_SHAPE, Guard.ROUTER_STRIDES, Guard.ROUTER_DTYPE}
    for guard in promised:
        subject = Subject(MoEDelta, guards=frozenset({guard}))
        trial = Trial(CASE, subject, subject.capabilities(CPU), CPU, 0)
        judgement = ORACLES[OracleName.GUARD].judge(trial)
        assert judgement.failure is Failure.NOT_REFUSED
        assert judgement.where == {"guard": guard.value}


@pytest.mark.parametrize("write", Write)
def test_a_zero_added_to_slices_that_an_adapter_lacks_fails_where_live_ranks_alone_are_read(
    write: Write,
) -> None:
    # of so many slots some lack a slice
    case = replace(CASE, slots=6, tokens=40, write=write)
    for seed in range(6):
        wrong = judge(ZeroAddedToAbsentSlices, OracleName.BASE_ROWS, seed, case)
        assert wrong.failure is Failure.BASE_ROW_CHANGED, (seed, wrong)
        assert wrong.where["slot"] != -1
        for promises in ({"skips_dead_ranks": False}, {"rank_per_slice": False}):
            subject = Subject(ZeroAddedToAbsentSlices, **promises)
            trial = Trial(case, subject, subject.capabilities(CPU), CPU, seed)
            other = ORACLES[OracleName.BASE_ROWS].judge(trial)
            assert other.verdict is Verdict.PASS, (seed, other)
