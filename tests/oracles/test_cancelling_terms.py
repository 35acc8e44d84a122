"""Large terms that cancel: whoever rounds in between loses the small ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.core.verdict import Failure, Judgement, Verdict
from loragate.execution.session import inputs_of
from loragate.inputs import DataKind
from loragate.inputs.cancelling import Cancelling, cancelling, has_cancelling
from loragate.matrix.case import (
    Activation,
    Bias,
    Case,
    Dtype,
    GateUp,
    Mix,
    Parallel,
    Ranks,
    RouterWeights,
    Sharing,
    Site,
)
from loragate.oracles.numeric import exact
from loragate.oracles.numeric.exact import Exact
from loragate.oracles.numeric.golden_layer import golden_of
from loragate.protocol import Pool, Rounding, Routes, Trial
from loragate.subjects.torch.moe_layer import Factors, MoELayer, Rank
from loragate.subjects.torch.subject import DenseDelta, TorchSubject

CPU = Machine("cpu", "test", None, 1, 0)
DENSE = Case(
    site=Site.DENSE_DELTA,
    tokens=9,
    in_features=24,
    slices=(17, 9),
    rank=5,
    slots=3,
    dtype=Dtype.BF16,
    mix=Mix.SHUFFLED,
    ranks=Ranks.FULL,
)
LINEAR = replace(DENSE, site=Site.LORA_LINEAR, bias=Bias.PRESENT)
DELTA = replace(
    DENSE, site=Site.MOE_DELTA, experts=4, top_k=2, router=RouterWeights.OUTPUT, in_features=33
)
LAYER = replace(DELTA, site=Site.MOE_LAYER, tokens=16, slices=(16, 16), top_k=3)
LAYERS = [
    LAYER,
    replace(LAYER, dtype=Dtype.FP16),
    replace(LAYER, slices=(16,)),
    replace(LAYER, router=RouterWeights.INPUT, sharing=Sharing.SHARED_OUTER),
    replace(LAYER, gate_up=GateUp.INTERLEAVED, expert_bias=Bias.PRESENT),
    replace(LAYER, activation=Activation.GELU_TANH),
]
HALF = [replace(case, dtype=Dtype.FP16) for case in (DENSE, LINEAR, DELTA)]
# the torch subject rounds a delta before it adds it, but in moe_layer
ROUNDED = [DENSE, LINEAR, DELTA, *HALF]


def trial_of(case: Case, *promised: Rounding) -> Trial:
    subject = TorchSubject()
    have = subject.capabilities(CPU)
    assert not isinstance(have, str)
    return Trial(case, subject, replace(have, roundings=lambda case: promised), CPU, seed=3)


def judge(case: Case, *promised: Rounding) -> Judgement:
    return Exact().judge(trial_of(case, *promised))


def data_of(case: Case) -> Cancelling:
    return cancelling(case, *inputs_of(trial_of(case), DataKind.EXACT))


@pytest.mark.parametrize("case", ROUNDED, ids=lambda case: f"{case.site}-{case.dtype}")
def test_a_delta_that_is_rounded_before_it_is_added_is_seen(case: Case) -> None:
    found = judge(case, Rounding.SHRUNK)
    assert (found.verdict, found.failure) == (Verdict.FAIL, Failure.WRONG_ANSWER)
    assert "from what is left when large terms cancel" in found.message
    assert judge(case, Rounding.SHRUNK, Rounding.DELTA).verdict is Verdict.PASS


class OneIsNotANumber(DenseDelta):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        result = super().apply(x, out)
        result[-1, -1] = torch.nan
        return result


def test_a_result_that_is_not_a_number_is_not_exact(make_trial: Callable[..., Trial]) -> None:
    assert Exact().judge(make_trial(DenseDelta)).verdict is Verdict.PASS
    found = Exact().judge(make_trial(OneIsNotANumber))
    assert found.failure is Failure.WRONG_ANSWER, found


@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_that_adds_up_in_fp32_passes(case: Case) -> None:
    assert judge(case, Rounding.SHRUNK).verdict is Verdict.PASS


@pytest.mark.parametrize("case", [*ROUNDED, *LAYERS])
def test_a_result_has_no_more_digits_than_its_terms_and_many_rows_are_judged(case: Case) -> None:
    data = data_of(case)
    right = golden_of(case, data.pool, data.batch, data.base).out[data.rows]
    assert len(right) > len(data.rows) // 3
    if case.site is not Site.MOE_LAYER:
        assert torch.equal(right.to(data.batch.out.dtype).double(), right)


class Rounded(Tensor):
    """Its product with another matrix is rounded."""

    low: torch.dtype

    def __matmul__(self, other: Tensor) -> Tensor:
        return (self.as_subclass(Tensor) @ other).to(self.low).float()


class RoundsBaseOfUp(MoELayer):
    width_of_input = LAYER.in_features

    def as_base_sees_it(self, values: Tensor) -> Tensor:
        seen = super().as_base_sees_it(values)
        if values.shape[1] != self.width_of_input:
            return seen
        found = seen.as_subclass(Rounded)
        found.low = values.dtype
        return found


class RoundsBaseOfDown(RoundsBaseOfUp):
    width_of_input = LAYER.slices[0]


class RoundsDeltas(MoELayer):
    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        first, down = self.slots[slot]
        self.slots[slot] = ([*map(RoundedFactors.of, first)], RoundedFactors.of(down))


class RoundedFactors(Factors):
    @staticmethod
    def of(plain: Factors) -> Factors:
        return RoundedFactors(plain.a, plain.b, plain.scale)

    def delta(self, rows: Tensor, expert: int) -> Tensor:
        return Factors.delta(self, rows, expert).to(rows.dtype).float()


class RoundsSums(MoELayer):
    def partial(self, rank: Rank, x: Tensor, routes: Routes) -> Tensor:
        # one choice after the other
        total = torch.zeros_like(x)
        for choice in range(routes.topk_ids.shape[1]):
            ids = torch.full_like(routes.topk_ids, -1)
            ids[:, choice] = routes.topk_ids[:, choice]
            total += super().partial(rank, x, replace(routes, topk_ids=ids)).to(x.dtype)
        return total.float()


@pytest.mark.parametrize("wrong", [RoundsBaseOfUp, RoundsBaseOfDown, RoundsDeltas, RoundsSums])
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16])
def test_a_layer_that_rounds_in_between_is_seen(
    wrong: type[MoELayer], dtype: Dtype, layer_trial: Callable[..., Trial]
) -> None:
    def judged(*promised: Rounding) -> Judgement:
        case = replace(LAYER, dtype=dtype)
        return Exact().judge(layer_trial(wrong, 3, case, roundings=lambda case: promised))

    assert "from what is left when large terms cancel" in judged(Rounding.SHRUNK).message
    assert judged(Rounding.SHRUNK, Rounding.DELTA).verdict is Verdict.PASS


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": Dtype.FP32},
        {"in_features": 1},
        {"tp": 2},
        {"ep": 2},
        {"activation": Activation.SWIGLU_OAI},
    ],
)
def test_cases_that_round_in_any_case_have_no_such_data(change: dict[str, object]) -> None:
    assert has_cancelling(LAYER)
    assert not has_cancelling(replace(LAYER, **change))  # type: ignore[arg-type]


def test_what_ranks_of_a_row_parallel_layer_add_up_is_rounded_one_by_one() -> None:
    case = replace(LINEAR, slices=(24,), parallel=Parallel.ROW)
    assert has_cancelling(case)
    assert not has_cancelling(replace(case, tp=2))
    assert has_cancelling(replace(case, parallel=Parallel.COLUMN, tp=2))


@pytest.mark.parametrize(
    "change",
    [
        # the batch, the choices of its tokens, the base layer, and adapters
        {"site": Site.DENSE_DELTA, "tokens": 200_000},
        {"site": Site.MOE_DELTA, "tokens": 30_000, "experts": 4, "top_k": 4},
        {"site": Site.LORA_LINEAR, "slices": (40_000,), "in_features": 120, "rank": 1},
        {"site": Site.DENSE_DELTA, "slices": (40_000,), "rank": 20},
    ],
)
def test_large_cases_are_not_judged_twice(
    change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact, "cancelling", lambda *data: pytest.fail("memory of a second case"))
    case = replace(DENSE, slots=2, **change)  # type: ignore[arg-type]
    assert judge(case, Rounding.SHRUNK).verdict is Verdict.PASS
