"""An MoE layer that reads, writes, keeps or forgets what it must not fails the oracle for that, and
the correct layer passes all of them. A wrong subject is the torch subject with one change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.matrix.case import (
    Case,
    Dtype,
    Layout,
    Mix,
    Quantisation,
    RouterWeights,
    Routing,
    Sharing,
    Site,
)
from loragate.oracles import ORACLES
from loragate.protocol import Guard, Pool, Routes, Trial, unsupported
from loragate.subjects.torch.moe_layer import Factors, MoELayer, Rank

Judge = Callable[[type[MoELayer], OracleName, int, Case], Judgement]
BASE_ROWS, CANARY = OracleName.BASE_ROWS, OracleName.CANARY
PERMUTE, SEQUENCE = OracleName.PERMUTE, OracleName.SEQUENCE
NUMERIC = (
    OracleName.REFERENCE,
    OracleName.EXACT,
    BASE_ROWS,
    CANARY,
    OracleName.REPEAT,
    PERMUTE,
    SEQUENCE,
)
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
FP8 = replace(CASE, quantisation=Quantisation.FP8)
SHARED = replace(CASE, sharing=Sharing.SHARED_OUTER)


class DeltaForBaseRows(MoELayer):
    def prepare(self, token_slots: Tensor) -> None:
        self.token_slots = token_slots.clamp(min=0)


class BaseRowsLoseADigit(MoELayer):
    """Base rows in a batch with adapters are rounded to 16 bits once more."""

    def second(self, rank: Rank, expert: int, act: Tensor, tokens: Tensor) -> Tensor:
        y = super().second(rank, expert, act, tokens)
        return y.half().float() if self.slots else y


class ReadsWeightsOfSkippedPairs(MoELayer):
    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        assert routes.weights is not None
        return super().apply(x, out, routes) + 0 * routes.weights.sum().to(x.dtype)


class ReadsUnusedAdapters(MoELayer):
    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        result = super().apply(x, out, routes)
        for _, down in self.slots.values():
            result = result + 0 * (down.a.float().sum() * down.b.float().sum()).to(x.dtype)
        return result


class ChangesTheBase(MoELayer):
    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        result = super().apply(x, out, routes)
        self.w2[0, 0, 0] += 1
        return result


class WritesIntoOut(MoELayer):
    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        return out.copy_(super().apply(x, out, routes))


class CountsItsRuns(MoELayer):
    runs = 0

    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        result = super().apply(x, out, routes) + self.runs
        self.runs += 1
        return result


class DependsOnTheExpertsNumber(MoELayer):
    def second(self, rank: Rank, expert: int, act: Tensor, tokens: Tensor) -> Tensor:
        return super().second(rank, expert, act, tokens) + expert


class DependsOnTheRowsPlace(MoELayer):
    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        place = torch.arange(len(x))[:, None] % 2
        return super().apply(x, out, routes) + place.to(x.dtype)


class KeepsTheFirstRouting(MoELayer):
    kept: Tensor | None = None

    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        if self.kept is None:
            self.kept = routes.topk_ids.clone()
        return super().apply(x, out, replace(routes, topk_ids=self.kept[: len(x)]))


class LoadsDownOnce(MoELayer):
    def load(self, slot: int, pool: Pool) -> None:
        before = self.slots.get(slot)
        super().load(slot, pool)
        if before is not None:
            self.slots[slot] = (self.slots[slot][0], before[1])


class AddsToTheStepBefore(MoELayer):
    last: Tensor | None = None

    def apply(self, x: Tensor, out: Tensor, routes: Routes) -> Tensor:
        result = super().apply(x, out, routes)
        if self.last is not None:
            count = min(len(self.last), len(result))
            result[:count] += self.last[:count]
        self.last = result.clone()
        return result


OTHERS = [
    (BASE_ROWS, Failure.BASE_ROW_CHANGED, DeltaForBaseRows, CASE),
    (BASE_ROWS, Failure.BASE_ROW_CHANGED, DeltaForBaseRows, FP8),
    (BASE_ROWS, Failure.BASE_ROW_CHANGED, BaseRowsLoseADigit, replace(CASE, dtype=Dtype.FP32)),
    (CANARY, Failure.FOREIGN_MEMORY, ReadsWeightsOfSkippedPairs, PARALLEL),
    (CANARY, Failure.FOREIGN_MEMORY, ReadsUnusedAdapters, CASE),
    (CANARY, Failure.FOREIGN_MEMORY, ChangesTheBase, CASE),
    (CANARY, Failure.FOREIGN_MEMORY, WritesIntoOut, CASE),
    (OracleName.REPEAT, Failure.NONDETERMINISTIC, CountsItsRuns, CASE),
    (PERMUTE, Failure.NOT_EQUIVARIANT, DependsOnTheExpertsNumber, CASE),
    (PERMUTE, Failure.NOT_EQUIVARIANT, DependsOnTheExpertsNumber, PARALLEL),
    (PERMUTE, Failure.NOT_EQUIVARIANT, DependsOnTheRowsPlace, CASE),
    (SEQUENCE, Failure.STALE_STATE, KeepsTheFirstRouting, CASE),
    (SEQUENCE, Failure.STALE_STATE, LoadsDownOnce, CASE),
    (SEQUENCE, Failure.STALE_STATE, AddsToTheStepBefore, FP8),
]


@pytest.mark.parametrize(
    ("oracle", "failure", "instance", "case"),
    [pytest.param(*row, id=f"{row[0]}-{row[2].__name__}-{i}") for i, row in enumerate(OTHERS)],
)
def test_an_oracle_fails_a_layer_with_its_defect_for_every_seed(
    judge_layer: Judge,
    oracle: OracleName,
    failure: Failure,
    instance: type[MoELayer],
    case: Case,
) -> None:
    for seed in range(5):
        judgement = judge_layer(instance, oracle, seed, case)
        assert (judgement.verdict, judgement.failure) == (Verdict.FAIL, failure), (seed, judgement)


RIGHT = {
    "gated": CASE,
    "plain": PLAIN,
    "on_input": replace(ON_INPUT, layout=Layout.COLUMN_SLICE, mix=Mix.SHUFFLED),
    "a_group": replace(PADDED, ep=4, layout=Layout.PADDED_ROWS, mix=Mix.LAST_SLOT),
    "quantised": replace(FP8, layout=Layout.TRANSPOSED, routing=Routing.SKEWED),
    "quantised_group": replace(FP8, ep=3, slices=(24,)),
    "shared_outer": SHARED,
    "all_experts_of_a_token": replace(CASE, top_k=6),
    "one_expert": replace(CASE, experts=1, top_k=1),
    "all_base": replace(CASE, mix=Mix.ALL_BASE),
    "no tokens": replace(CASE, tokens=0),
}


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("name", RIGHT)
def test_no_oracle_fails_the_correct_layer(
    layer_trial: Callable[..., Trial], name: str, dtype: Dtype
) -> None:
    for seed in range(5):
        trial = layer_trial(MoELayer, seed, replace(RIGHT[name], dtype=dtype))
        for oracle in NUMERIC:
            if ORACLES[oracle].applies(trial) is None:
                judgement = ORACLES[oracle].judge(trial)
                assert judgement.verdict is Verdict.PASS, (seed, judgement)


class Rounded(Factors):
    def delta(self, rows: Tensor, expert: int) -> Tensor:
        a, b = (f[min(expert, len(f) - 1)].float() for f in (self.a, self.b))
        return (self.scale * rows.float() @ a.T).to(rows.dtype).float() @ b.T


class RoundsShrinkOutputs(MoELayer):
    """As a kernel must that folds the expand into a product on tensor cores. In a few places act
    then differs from golden's in its last bit, and some of these are quantised to the next
    number."""

    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        up, down = self.slots[slot]
        self.slots[slot] = ([Rounded(f.a, f.b, f.scale) for f in up], down)


class AddsUpAsTensorCoresDo(MoELayer):
    """Sums in fp32, with errors of a random walk of K steps."""

    def first(self, rank: Rank, expert: int, x: Tensor, tokens: Tensor) -> Tensor:
        y = super().first(rank, expert, x, tokens)
        terms = self.as_base_sees_it(x).square() @ self.w13[expert].float().square().T
        walk = (terms * self.case.in_features / 2).sqrt() * 2.0**-24
        noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(expert))
        return y + noise * walk


def test_base_rows_of_a_quantised_layer_may_be_added_up_in_fp32(judge_layer: Judge) -> None:
    # the output of base rows is as exact as their base: a single flip is seen
    case = replace(FP8, dtype=Dtype.FP16, tokens=300, in_features=1024, slices=(128, 128))
    case = replace(case, mix=Mix.LAST_SLOT, top_k=4)
    for seed in range(6):
        judgement = judge_layer(AddsUpAsTensorCoresDo, OracleName.REFERENCE, seed, case)
        assert judgement.verdict is Verdict.PASS, (seed, judgement)


@pytest.mark.parametrize("dtype", [Dtype.FP16, Dtype.BF16])
def test_a_quantised_layer_may_round_its_shrink_outputs(judge_layer: Judge, dtype: Dtype) -> None:
    for seed in range(80):
        case = replace(FP8, dtype=dtype)
        judgement = judge_layer(RoundsShrinkOutputs, OracleName.REFERENCE, seed, case)
        assert judgement.verdict is Verdict.PASS, (seed, judgement)


def test_a_quantised_product_has_no_exact_result(layer_trial: Callable[..., Trial]) -> None:
    for oracle in (OracleName.EXACT, PERMUTE):
        reason = ORACLES[oracle].applies(layer_trial(MoELayer, 0, FP8))
        assert reason == "a quantised product rounds on any data"
    # bits are compared on data that rounds where the subject promises it
    trial = layer_trial(MoELayer, 0, FP8, place_invariant=True)
    assert ORACLES[PERMUTE].applies(trial) is None


def test_a_quantised_layer_is_skipped_unless_the_subject_states_support(
    layer_trial: Callable[..., Trial],
) -> None:
    have = layer_trial(MoELayer, 0, FP8).capabilities
    stated = {axis: values for axis, values in have.supports.items() if axis != "quantisation"}
    have = replace(have, supports=stated)
    assert unsupported(FP8, have) == "quantisation fp8 is not supported"
    assert unsupported(CASE, have) is None


@pytest.mark.parametrize(
    "guard", [Guard.TOPK_DTYPE, Guard.TOPK_SHAPE, Guard.ROUTER_SHAPE, Guard.ADAPTER_EXPERTS]
)
def test_each_promised_refusal_of_an_moe_layer_is_required(
    layer_trial: Callable[..., Trial], guard: Guard
) -> None:
    trial = layer_trial(MoELayer, 0, CASE, guards=frozenset({guard}))
    judgement = ORACLES[OracleName.GUARD].judge(trial)
    assert judgement.failure is Failure.NOT_REFUSED
    assert judgement.where == {"guard": guard.value}
