"""An MoE layer with an error in its mathematics or in how it is cut over ranks is a wrong answer. A
wrong subject is the torch subject with one change."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from loragate.core.verdict import Failure, Judgement, OracleName
from loragate.inputs.base_experts import SWIGLU_ALPHA, SWIGLU_LIMIT, dequantised, quantised
from loragate.matrix.case import (
    Activation,
    Bias,
    Case,
    Dtype,
    GateUp,
    Placement,
    Quantisation,
    RouterWeights,
    Sharing,
    Site,
)
from loragate.protocol import BaseExperts, Pool, Routes
from loragate.subjects.torch.moe_layer import Factors, MoELayer, Rank

Judge = Callable[[type[MoELayer], OracleName, int, Case], Judgement]
REFERENCE, EXACT = OracleName.REFERENCE, OracleName.EXACT
CASE = Case(
    site=Site.MOE_LAYER,
    tokens=16,
    in_features=48,
    slices=(24, 24),
    rank=8,
    slots=3,
    dtype=Dtype.BF16,
    experts=6,
    top_k=2,
    router=RouterWeights.OUTPUT,
)
ON_INPUT = replace(CASE, router=RouterWeights.INPUT)
PLAIN = replace(CASE, slices=(24,))
CUT = replace(CASE, tp=2)
PADDED = replace(CASE, slices=(23, 23), tp=3)
PARALLEL = replace(CASE, ep=2)
# three digits of bf16 hide some of what three bits do
FP8 = replace(CASE, quantisation=Quantisation.FP8, dtype=Dtype.FP16)
# few numbers do not distinguish the cost of quantising from one number that is quantised otherwise
MANY_FP8 = replace(FP8, tokens=200, slices=(96, 96))
SHARED = replace(CASE, sharing=Sharing.SHARED_OUTER)
BIASED = replace(CASE, expert_bias=Bias.PRESENT)
GPT_OSS = replace(BIASED, activation=Activation.SWIGLU_OAI, gate_up=GateUp.INTERLEAVED)
REPLICATED = replace(PARALLEL, placement=Placement.REPLICATED)


class RouterWeightTwice(MoELayer):
    def pairs(self, rank: Rank, expert: int, x: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
        return super().pairs(rank, expert, x, tokens, weights.square())


class RouterWeightLost(MoELayer):
    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        assert routes.weights is not None
        return super().apply(x, out, replace(routes, weights=torch.ones_like(routes.weights)))


class FirstChoicesWeight(MoELayer):
    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        assert routes.weights is not None
        weights = routes.weights[:, :1].expand_as(routes.weights)
        return super().apply(x, out, replace(routes, weights=weights))


class RouterWeightOnTheOtherSide(MoELayer):
    def __init__(self, case: Case, base: BaseExperts) -> None:
        sides = {
            RouterWeights.INPUT: RouterWeights.OUTPUT,
            RouterWeights.OUTPUT: RouterWeights.INPUT,
        }
        super().__init__(replace(case, router=sides[case.router]), base)


class GateAndUpSwapped(MoELayer):
    def activated(self, inner: Tensor) -> Tensor:
        gate, up = inner.chunk(2, 1)
        return super().activated(torch.cat([up, gate], 1))


class AdaptersOfGateAndUpSwapped(MoELayer):
    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        (gate, up), down = self.slots[slot]
        self.slots[slot] = ([up, gate], down)


class UpWithGatesA(MoELayer):
    """sglang #27274"""

    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        (gate, up), down = self.slots[slot]
        rank = up.a.shape[1]
        self.slots[slot] = ([gate, replace(up, a=pool.a[slot, :, 0, :rank].clone())], down)


class ActivationBeforeTheDelta(MoELayer):
    def first(self, rank: Rank, expert: int, x: Tensor, tokens: Tensor) -> Tensor:
        slots, self.slots = self.slots, {}
        self.base = super().first(rank, expert, x, tokens)
        self.slots = slots
        return super().first(rank, expert, x, tokens)

    def activated(self, inner: Tensor) -> Tensor:
        delta = inner - self.base
        delta_of_up = delta.chunk(len(self.case.slices), 1)[-1]
        return super().activated(self.base) + delta_of_up


class NoActivation(MoELayer):
    def activated(self, inner: Tensor) -> Tensor:
        return inner


class SigmoidForSilu(MoELayer):
    def activated(self, inner: Tensor) -> Tensor:
        gate, up = inner.chunk(2, 1)
        return functional.sigmoid(gate) * up


class NoDeltaOnDown(MoELayer):
    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        up, down = self.slots[slot]
        self.slots[slot] = (up, replace(down, scale=0.0))


class ScaleOfGateForDown(MoELayer):
    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        up, down = self.slots[slot]
        self.slots[slot] = (up, replace(down, scale=up[0].scale))


class FirstExpertsBForAll(MoELayer):
    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        up, down = self.slots[slot]
        self.slots[slot] = ([replace(part, b=part.b[:1]) for part in up], down)


class SharedSideOverwritten(MoELayer):
    """sglang #28564: the shared factor is that of one expert."""

    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        up, down = self.slots[slot]
        self.slots[slot] = (up, replace(down, b=down.b.roll(1, 1)))


class LastExpertLost(MoELayer):
    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        ids = routes.topk_ids
        last = self.case.experts - 1
        return super().apply(x, out, replace(routes, topk_ids=torch.where(ids == last, -1, ids)))


class LastChoiceLost(MoELayer):
    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        ids = routes.topk_ids.clone()
        ids[:, -1] = -1
        return super().apply(x, out, replace(routes, topk_ids=ids))


class SumInTheWrongToken(MoELayer):
    """Outputs of pairs are added up as if all first choices came before all second ones."""

    def partial(self, rank: Rank, x: Tensor, routes: Routes) -> Tensor:
        top_k = routes.topk_ids.shape[1]
        out = torch.zeros(x.shape)
        for choice in range(top_k):
            ids = torch.full_like(routes.topk_ids, -1)
            ids[:, choice] = routes.topk_ids[:, choice]
            out += super().partial(rank, x, replace(routes, topk_ids=ids)).roll(choice, 0)
        return out


class NegativeIdsCountFromTheEnd(MoELayer):
    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        ids = routes.topk_ids % self.case.experts
        return super().apply(x, out, replace(routes, topk_ids=ids))


class AdapterOfAnotherEpRank(MoELayer):
    """The experts of an adapter are indexed with the local ids of the rank."""

    def first(self, rank: Rank, expert: int, x: Tensor, tokens: Tensor) -> Tensor:
        before = self.slots
        self.slots = {
            slot: ([self.shifted(part, rank) for part in up], down)
            for slot, (up, down) in before.items()
        }
        inner = super().first(rank, expert, x, tokens)
        self.slots = before
        return inner

    def shifted(self, part: Factors, rank: Rank) -> Factors:
        start = min(rank.experts)
        return replace(part, a=part.a.roll(start, 0), b=part.b.roll(start, 0))


class OuterRankForExperts(MoELayer):
    """sglang #24171: the rank in the whole group is used as the rank among the experts."""

    def __init__(self, case: Case, base: BaseExperts) -> None:
        super().__init__(case, base)
        share = case.experts // case.ep
        self.ranks = [
            replace(rank, experts=range(share * index, min(share * (index + 1), case.experts)))
            for index, rank in enumerate(self.ranks)
        ]


class NextRanksColumnsOfB(MoELayer):
    def first(self, rank: Rank, expert: int, x: Tensor, tokens: Tensor) -> Tensor:
        slots, self.slots = self.slots, {}
        base = super().first(rank, expert, x, tokens)
        self.slots = slots
        width = self.case.slices[0] // self.case.tp
        columns = slice(width, 2 * width) if rank.columns.start == 0 else slice(0, width)
        other = replace(rank, columns=columns)
        with_delta = super().first(other, expert, x, tokens)
        self.slots = {}
        without = super().first(other, expert, x, tokens)
        self.slots = slots
        return base + with_delta - without


class BothHalvesCutAtOnce(MoELayer):
    """A rank of two gets all of gate or all of up."""

    def first(self, rank: Rank, expert: int, x: Tensor, tokens: Tensor) -> Tensor:
        whole = super().first(replace(rank, columns=slice(None)), expert, x, tokens)
        return whole.chunk(self.case.tp, 1)[rank.columns.start > 0]


class DownNotCut(MoELayer):
    """Each rank takes the first columns of A of down."""

    def second(self, rank: Rank, expert: int, act: Tensor, tokens: Tensor) -> Tensor:
        before = self.slots
        start = rank.columns.start
        self.slots = {
            slot: (up, replace(down, a=down.a.roll(start, -1)))
            for slot, (up, down) in before.items()
        }
        y = super().second(rank, expert, act, tokens)
        self.slots = before
        return y


class StrideOfTheUnpaddedWidth(MoELayer):
    """vllm #42595: the base is cut by the padded width, the adapter by its own."""

    def second(self, rank: Rank, expert: int, act: Tensor, tokens: Tensor) -> Tensor:
        before = self.slots
        share = self.case.slices[0] // self.case.tp
        index = rank.columns.start // share if rank.columns.start else 0
        shift = rank.columns.start - index * share
        self.slots = {
            slot: (up, replace(down, a=down.a.roll(shift, -1)))
            for slot, (up, down) in before.items()
        }
        y = super().second(rank, expert, act, tokens)
        self.slots = before
        return y


class PaddingIsAdded(MoELayer):
    """The last rank has a column of padding, with silu of garbage in it."""

    def second(self, rank: Rank, expert: int, act: Tensor, tokens: Tensor) -> Tensor:
        y = super().second(rank, expert, act, tokens)
        if rank.columns.stop == self.case.slices[0]:
            y = y + self.w2[expert][:, :1].float().T
        return y


class BaseOnEveryRank(MoELayer):
    """What one rank alone must add is added by every rank."""

    def partial(self, rank: Rank, x: Tensor, routes: Routes) -> Tensor:
        out = super().partial(rank, x, routes)
        slots, self.slots = self.slots, {}
        if rank.columns.start:
            out = out + super().partial(self.ranks[0], x, routes)
        self.slots = slots
        return out


class BiasOfDownOnEveryRank(MoELayer):
    def second(self, rank: Rank, expert: int, act: Tensor, tokens: Tensor) -> Tensor:
        y = super().second(rank, expert, act, tokens)
        assert self.b2 is not None
        return y + self.b2[expert].float() if rank.columns.start else y


class BiasBehindTheRouterWeight(MoELayer):
    def pairs(self, rank: Rank, expert: int, x: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
        assert self.b2 is not None
        y = super().pairs(rank, expert, x, tokens, weights)
        return (y + (1 - weights) * self.b2[expert].float()).to(x.dtype)


class EveryReplicaComputes(MoELayer):
    def chosen_here(self, rank: Rank, ids: Tensor, top_k: int) -> Tensor:
        return ids


class InterleavedTakenForHalves(MoELayer):
    def __init__(self, case: Case, base: BaseExperts) -> None:
        super().__init__(case, base)
        self.w13, self.b13 = base.weight, base.bias


class SiluForSwigluOfGptOss(MoELayer):
    def activated(self, inner: Tensor) -> Tensor:
        gate, up = inner.chunk(2, 1)
        return functional.silu(gate) * up


class ClampsOtherwise(MoELayer):
    limits = -SWIGLU_LIMIT, SWIGLU_LIMIT
    most_of_gate = SWIGLU_LIMIT

    def activated(self, inner: Tensor) -> Tensor:
        gate, up = inner.chunk(2, 1)
        gate, up = gate.clamp(max=self.most_of_gate), up.clamp(*self.limits)
        return (up + 1) * gate * torch.sigmoid(SWIGLU_ALPHA * gate)


class GateNotClamped(ClampsOtherwise):
    most_of_gate = math.inf


class UpClampedBelowOnly(ClampsOtherwise):
    limits = -SWIGLU_LIMIT, math.inf


class UpClampedAboveOnly(ClampsOtherwise):
    limits = -math.inf, SWIGLU_LIMIT


class DownSeesQuantisedActivations(MoELayer):
    """vllm #42120"""

    def second(self, rank: Rank, expert: int, act: Tensor, tokens: Tensor) -> Tensor:
        return super().second(rank, expert, dequantised(*quantised(act)).to(act.dtype), tokens)


class AdaptersSeeQuantisedInput(MoELayer):
    def first(self, rank: Rank, expert: int, x: Tensor, tokens: Tensor) -> Tensor:
        return super().first(rank, expert, dequantised(*quantised(x)).to(x.dtype), tokens)


class AdaptersSeeValuesWithoutScale(AdaptersSeeQuantisedInput):
    def first(self, rank: Rank, expert: int, x: Tensor, tokens: Tensor) -> Tensor:
        values, _ = quantised(x)
        return MoELayer.first(self, rank, expert, values.to(x.dtype), tokens)


class AdaptersOfHalfPrecision(MoELayer):
    def load(self, slot: int, pool: Pool) -> None:
        half = [b.half().to(b.dtype) for b in pool.b]
        super().load(slot, replace(pool, a=pool.a.half().to(pool.a.dtype), b=tuple(half)))


class HalfPrecisionShrinkOutputs(MoELayer):
    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        up, down = self.slots[slot]
        self.slots[slot] = ([HalfPrecisionShrink(f.a, f.b, f.scale) for f in up], down)


class HalfPrecisionShrink(Factors):
    def delta(self, rows: Tensor, expert: int) -> Tensor:
        a, b = (f[min(expert, len(f) - 1)].float() for f in (self.a, self.b))
        return self.scale * (rows.float() @ a.T).half().float() @ b.T


class NothingQuantised(MoELayer):
    def as_base_sees_it(self, values: Tensor) -> Tensor:
        return values.float()


WRONG_ANSWERS = [
    (RouterWeightTwice, CASE),
    (RouterWeightTwice, ON_INPUT),
    (RouterWeightLost, CASE),
    (RouterWeightLost, ON_INPUT),
    (FirstChoicesWeight, CASE),
    (RouterWeightOnTheOtherSide, CASE),
    (RouterWeightOnTheOtherSide, ON_INPUT),
    (GateAndUpSwapped, CASE),
    (AdaptersOfGateAndUpSwapped, CASE),
    (UpWithGatesA, CASE),
    (ActivationBeforeTheDelta, CASE),
    (ActivationBeforeTheDelta, PLAIN),
    (NoActivation, PLAIN),
    (SigmoidForSilu, CASE),
    (NoDeltaOnDown, CASE),
    (ScaleOfGateForDown, CASE),
    (FirstExpertsBForAll, CASE),
    (SharedSideOverwritten, SHARED),
    (LastExpertLost, CASE),
    (LastChoiceLost, CASE),
    (SumInTheWrongToken, CASE),
    (NegativeIdsCountFromTheEnd, PARALLEL),
    (AdapterOfAnotherEpRank, PARALLEL),
    (OuterRankForExperts, replace(PARALLEL, tp=2)),
    (NextRanksColumnsOfB, CUT),
    (BothHalvesCutAtOnce, CUT),
    (DownNotCut, CUT),
    (StrideOfTheUnpaddedWidth, PADDED),
    (PaddingIsAdded, PADDED),
    (BaseOnEveryRank, CUT),
    (BiasOfDownOnEveryRank, replace(BIASED, tp=2)),
    (BiasBehindTheRouterWeight, BIASED),
    (EveryReplicaComputes, REPLICATED),
    (InterleavedTakenForHalves, replace(BIASED, gate_up=GateUp.INTERLEAVED)),
]
# a quantised product and a gate that is clamped always round, and have no exact result
ROUNDED = [
    (DownSeesQuantisedActivations, MANY_FP8),
    (AdaptersSeeQuantisedInput, FP8),
    (AdaptersSeeValuesWithoutScale, FP8),
    (NothingQuantised, MANY_FP8),
    (SiluForSwigluOfGptOss, GPT_OSS),
    (GateNotClamped, GPT_OSS),
    (UpClampedBelowOnly, GPT_OSS),
    (UpClampedAboveOnly, GPT_OSS),
    (InterleavedTakenForHalves, GPT_OSS),
    (AdaptersOfHalfPrecision, replace(FP8, dtype=Dtype.FP32)),
    (HalfPrecisionShrinkOutputs, replace(FP8, dtype=Dtype.FP32)),
]
WRONG = [
    *((oracle, *row) for oracle in (REFERENCE, EXACT) for row in WRONG_ANSWERS),
    *((REFERENCE, *row) for row in ROUNDED),
]


@pytest.mark.parametrize(
    ("oracle", "instance", "case"),
    [pytest.param(*row, id=f"{row[0]}-{row[1].__name__}-{i}") for i, row in enumerate(WRONG)],
)
def test_a_layer_that_computes_something_else_is_wrong_for_every_seed(
    judge_layer: Judge, oracle: OracleName, instance: type[MoELayer], case: Case
) -> None:
    for seed in range(5):
        judgement = judge_layer(instance, oracle, seed, case)
        assert judgement.failure is Failure.WRONG_ANSWER, (seed, judgement)


def test_one_expert_that_loses_a_rank_of_down_is_seen_among_many_others(
    judge_layer: Judge,
) -> None:
    class OneExpertsLastRankLost(MoELayer):
        def load(self, slot: int, pool: Pool) -> None:
            super().load(slot, pool)
            _, down = self.slots[slot]
            down.b[3, :, -1:] = 0

    case = replace(CASE, tokens=60)
    for seed in range(6):
        judgement = judge_layer(OneExpertsLastRankLost, REFERENCE, seed, case)
        assert judgement.failure is Failure.WRONG_ANSWER, (seed, judgement)


def test_a_wrong_answer_names_the_token_and_the_column(judge_layer: Judge) -> None:
    class OneElement(MoELayer):
        def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
            result = super().apply(x, out, routes)
            result[11, 30] += 1
            return result

    where = judge_layer(OneElement, EXACT, 0, CASE).where
    assert (where["token"], where["slice"], where["column"]) == (11, 0, 30)
    assert "expert" not in where
