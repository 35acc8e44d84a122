"""Errors that many elements have in common: a factor on the delta, one rounding too many."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from loragate.core.verdict import Failure, Judgement, Verdict
from loragate.execution.session import inputs_of
from loragate.inputs import DataKind, make_batch, make_pool
from loragate.matrix.case import Bias, Case, Dtype, Mix, Ranks, Site
from loragate.oracles.numeric.compare import populations, row_findings, tail
from loragate.oracles.numeric.errors import MANTISSA, RowErrors, half_ulp, row_errors
from loragate.oracles.numeric.golden import eager, folded, golden
from loragate.oracles.numeric.reference import judge_result
from loragate.oracles.numeric.zscore import FOURTH_MOMENT, act_in_common
from loragate.protocol import BaseLayer, Batch, Pool, Rounding, Trial

NARROW = [Dtype.BF16, Dtype.FP16]
LARGE = {"tokens": 100, "in_features": 64, "slices": (160,), "rank": 16, "slots": 1}


@dataclass(frozen=True)
class Result:
    """out + scale * (x @ A.T) @ B.T in fp32, rounded once, and where else it is said."""

    scale: float = 1.0
    rounds_sums: bool = False
    rounds_scaled_sums: bool = False
    truncates_sums: bool = False
    rounds_delta: bool = False

    def of(self, pool: Pool, batch: Batch) -> Tensor:
        out, dtype = batch.out.clone(), batch.out.dtype
        for slot in range(pool.num_slots):
            rows, column = (batch.token_slots == slot).nonzero().flatten(), 0
            for part, b in enumerate(pool.b):
                sums = batch.x[rows].float() @ pool.a[slot, part].float().T
                delta = self.between(sums, pool.scales[slot][part], dtype) @ b[slot].float().T
                delta = delta.to(dtype).float() if self.rounds_delta else delta
                columns = slice(column, column + b.shape[1])
                out[rows, columns] = (out[rows, columns].float() + delta).to(dtype)
                column = columns.stop
        return out

    def between(self, sums: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        sums = sums.to(dtype).float() if self.rounds_sums else sums
        sums = sums * (scale * self.scale)
        if self.truncates_sums:
            sums = (sums.view(torch.int32) & ~0xFFFF).view(torch.float32)
        return sums.to(dtype).float() if self.rounds_scaled_sums else sums


ONCE = Result(rounds_scaled_sums=True)


def judge(
    make_trial: Callable[..., Trial], result: Result, seed: int, *promised: Rounding, **axes: object
) -> Judgement:
    trial = make_trial(seed=seed, **axes)
    have = replace(trial.capabilities, roundings=lambda case: promised)
    trial = replace(trial, capabilities=have)
    pool = make_pool(trial.case, seed, DataKind.SIGNED, trial.machine, have)
    batch = make_batch(trial.case, seed, 0, DataKind.SIGNED, trial.machine)
    return judge_result(trial, pool, batch, None, result.of(pool, batch))


@pytest.mark.parametrize(
    ("dtype", "scale"), [(Dtype.BF16, 1.005), (Dtype.BF16, 0.997), (Dtype.FP16, 1.0005)]
)
def test_a_scale_that_drowns_in_the_rounding_of_each_element_is_seen(
    dtype: Dtype, scale: float, make_trial: Callable[..., Trial]
) -> None:
    for seed in range(5):
        axes = LARGE | {"dtype": dtype, "mix": Mix.SINGLE, "ranks": Ranks.FULL}
        judgement = judge(make_trial, replace(ONCE, scale=scale), seed, **axes)
        assert judgement.failure is Failure.WRONG_ANSWER, judgement
        assert judgement.metrics["ratio"] < 1
        assert judgement.metrics["bias"] == pytest.approx(scale - 1, rel=0.3)


def test_many_features_hide_no_scale(make_trial: Callable[..., Trial]) -> None:
    axes = LARGE | {"in_features": 4096, "mix": Mix.SINGLE, "ranks": Ranks.FULL}
    for seed in range(2):
        trial = make_trial(seed=seed, dtype=Dtype.BF16, **axes)
        pool, batch, base = inputs_of(trial, DataKind.SIGNED)
        result = replace(ONCE, scale=1.005).of(pool, batch)
        judgement = judge_result(trial, pool, batch, base, result)
        assert "too large" in judgement.message, judgement
        assert judgement.metrics["ratio"] < 1


def test_sums_that_are_truncated_are_seen(make_trial: Callable[..., Trial]) -> None:
    for seed in range(5):
        axes = LARGE | {"dtype": Dtype.BF16, "mix": Mix.SINGLE, "ranks": Ranks.FULL}
        judgement = judge(make_trial, Result(truncates_sums=True), seed, Rounding.SHRUNK, **axes)
        assert "too small" in judgement.message or "something else" in judgement.message


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(
    ("result", "promised"),
    [
        (replace(ONCE, rounds_sums=True), {Rounding.SHRUNK}),
        (replace(ONCE, rounds_delta=True), {Rounding.SHRUNK}),
        (ONCE, {Rounding.DELTA}),
        (ONCE, set[Rounding]()),
    ],
)
def test_a_rounding_that_is_not_promised_is_seen(
    result: Result, promised: set[Rounding], dtype: Dtype, make_trial: Callable[..., Trial]
) -> None:
    if promised == {Rounding.DELTA}:
        result = replace(result, rounds_delta=True)
    for seed in range(5):
        axes = LARGE | {"dtype": dtype, "mix": Mix.SINGLE, "ranks": Ranks.FULL}
        judgement = judge(make_trial, result, seed, *promised, **axes)
        assert judgement.failure is Failure.WRONG_ANSWER, judgement
        assert "something else is rounded" in judgement.message


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(
    ("result", "promised"),
    [
        (Result(), set[Rounding]()),
        (ONCE, {Rounding.SHRUNK}),
        (Result(rounds_sums=True), {Rounding.SHRUNK}),
        (Result(rounds_delta=True), {Rounding.DELTA}),
        (replace(ONCE, rounds_delta=True), {Rounding.SHRUNK, Rounding.DELTA}),
    ],
)
@pytest.mark.parametrize(
    "axes",
    [
        LARGE,
        {"tokens": 40, "rank": 1, "slices": (3,), "slots": 2},
        {"tokens": 130, "in_features": 8, "rank": 2, "slices": (64, 8), "slots": 3},
        {"tokens": 300, "in_features": 16, "rank": 4, "slices": (32,), "slots": 2},
        # all rows are multiples of each other, and so are many of their roundings
        {"tokens": 1300, "in_features": 1, "rank": 75, "slices": (96,), "slots": 1},
    ],
)
def test_promised_roundings_raise_no_alarm(
    result: Result,
    promised: set[Rounding],
    axes: dict[str, object],
    dtype: Dtype,
    make_trial: Callable[..., Trial],
) -> None:
    for seed in range(10):
        judgement = judge(
            make_trial, result, seed, *promised, dtype=dtype, ranks=Ranks.FULL, **axes
        )
        assert judgement.verdict is Verdict.PASS, judgement


def test_products_of_few_digits_whose_roundings_are_alike_raise_no_alarm(
    make_trial: Callable[..., Trial],
) -> None:
    # one rank and no base: 128 numbers of B times one number of each row
    axes = {"tokens": 60, "rank": 1, "slices": (512,), "slots": 30, "in_features": 64}
    for seed in range(5):
        trial = make_trial(seed=seed, dtype=Dtype.BF16, ranks=Ranks.FULL, **axes)
        trial = replace(trial, capabilities=replace(trial.capabilities, roundings=lambda case: ()))
        pool = make_pool(trial.case, seed, DataKind.SIGNED, trial.machine, trial.capabilities)
        batch = make_batch(trial.case, seed, 0, DataKind.SIGNED, trial.machine)
        batch.out.zero_()
        judgement = judge_result(trial, pool, batch, None, Result().of(pool, batch))
        assert judgement.verdict is Verdict.PASS, judgement


def test_a_base_product_that_rounds_its_parts_is_not_charged_to_the_adapters(
    make_trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    def split_in_two(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        half = x.shape[1] // 2
        return x[:, :half] @ weight[:, :half].T + x[:, half:] @ weight[:, half:].T

    monkeypatch.setattr(functional, "linear", split_in_two)
    axes = LARGE | {"dtype": Dtype.BF16, "mix": Mix.SINGLE, "site": Site.LORA_LINEAR}
    for seed, adds_in_fp32 in itertools.product(range(3), (True, False)):
        trial = make_trial(seed=seed, **axes)
        trial = replace(trial, capabilities=replace(trial.capabilities, roundings=lambda case: ()))
        pool, batch, base = inputs_of(trial, DataKind.SIGNED)
        assert isinstance(base, BaseLayer)
        plain = batch.x @ base.weight.T if adds_in_fp32 else split_in_two(batch.x, base.weight)
        result = Result().of(pool, replace(batch, out=plain))
        judgement = judge_result(trial, pool, batch, base, result)
        # the base is so large that nothing is proven of the delta
        assert judgement.failure is None, judgement


def test_a_base_product_may_round_more_parts_than_a_plain_one_and_in_other_rows(
    make_trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another algorithm of cuBLAS does, which it takes for another layout."""
    axes = LARGE | {"dtype": Dtype.FP16, "mix": Mix.ALL_BASE, "site": Site.LORA_LINEAR}
    trial = make_trial(seed=1, bias=Bias.ABSENT, **axes)
    pool, batch, base = inputs_of(trial, DataKind.SIGNED)
    assert isinstance(base, BaseLayer)
    right = batch.x.double() @ base.weight.double().T
    off = [torch.zeros_like(right), torch.zeros_like(right)]
    # many steps: what a partial sum of larger numbers loses
    off[0][3] = 32 * half_ulp(right[3], torch.float16)
    off[1][90] = 40 * half_ulp(right[90], torch.float16)
    plain, result = ((right + error).to(batch.x.dtype) for error in off)
    monkeypatch.setattr(functional, "linear", lambda *operands: plain)
    assert judge_result(trial, pool, batch, base, result).failure is None
    worse = (right + 3 * off[1]).to(batch.x.dtype)
    assert judge_result(trial, pool, batch, base, worse).failure is Failure.WRONG_ANSWER
    monkeypatch.setattr(functional, "linear", lambda *operands: right.to(batch.x.dtype))
    assert judge_result(trial, pool, batch, base, result).failure is Failure.WRONG_ANSWER


def test_a_base_product_that_is_rounded_once_excuses_nothing_else(
    make_trial: Callable[..., Trial],
) -> None:
    for dtype in NARROW:
        trial = make_trial(seed=1, dtype=dtype, site=Site.LORA_LINEAR, **LARGE)
        pool, batch, base = inputs_of(trial, DataKind.SIGNED)
        right = golden(pool, batch, base)
        rounded = right.base.to(batch.x.dtype)
        alone = row_errors(trial.case, right, batch.out, batch.out)
        beside = row_errors(trial.case, right, batch.out, batch.out, (rounded, rounded))
        # bf16 by way of fp32 is rounded twice
        torch.testing.assert_close(beside.bound_sq, alone.bound_sq, rtol=1e-3, atol=0)
        torch.testing.assert_close(beside.bound_max, alone.bound_max, rtol=1e-3, atol=0)


def test_products_of_a_delta_net_may_round_as_those_that_write_columns_of_its_output(
    make_trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = LARGE | {"mix": Mix.ALL_BASE, "site": Site.GDN_IN_PROJ, "slices": (64, 8)}
    trial = make_trial(seed=1, dtype=Dtype.FP16, **axes)
    pool, batch, base = inputs_of(trial, DataKind.SIGNED)
    assert isinstance(base, BaseLayer)
    right = batch.x.double() @ base.weight.double().T
    off = torch.zeros_like(right)
    off[3] = 32 * half_ulp(right[3], torch.float16)
    result = (right + off).to(batch.x.dtype)
    assert judge_result(trial, pool, batch, base, result).failure is Failure.WRONG_ANSWER

    def written(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        columns = slice(0, 64) if out.shape[1] == 64 else slice(64, None)
        return out.copy_(result[:, columns])

    monkeypatch.setattr(torch, "mm", written)
    assert judge_result(trial, pool, batch, base, result).failure is None
    worse = (right + 3 * off).to(batch.x.dtype)
    assert judge_result(trial, pool, batch, base, worse).failure is Failure.WRONG_ANSWER


@pytest.mark.parametrize("features", [1, 2, 1024])
def test_rows_of_few_features_may_be_far_from_average(features: int) -> None:
    """Errors of act are products, of which few are large, and all columns of a row share them."""
    case = Case(
        site=Site.MOE_LAYER,
        tokens=4096,
        in_features=64,
        slices=(features, features),
        rank=16,
        slots=1,
        dtype=Dtype.BF16,
        experts=1,
        top_k=1,
    )
    draw = torch.Generator().manual_seed(3)
    normal = torch.randn(2, case.tokens, features, generator=draw, dtype=torch.float64)
    of_rows = 64 * normal.prod(0).square().mean(1, keepdim=True)
    zeros = {field.name: torch.zeros_like(of_rows) for field in fields(RowErrors)}
    errors = replace(
        RowErrors(**zeros), subject_sq=of_rows, shrunk_sq=torch.full_like(of_rows, 64.0)
    )
    assert max(row_findings(case, errors)).ratio < 1
    # no more than the average allows of many features
    wrong = 3.0 if features == 1024 else 15.0
    assert max(row_findings(case, replace(errors, subject_sq=of_rows * wrong**2))).ratio > 1


def test_a_population_allows_the_largest_jump_of_its_rows_in_one_of_them() -> None:
    case = Case(
        site=Site.DENSE_DELTA,
        tokens=64,
        in_features=64,
        slices=(32,),
        rank=8,
        slots=1,
        dtype=Dtype.BF16,
    )
    pool: Any = SimpleNamespace(ranks=((case.rank,),), down=None)
    of_slot: Any = SimpleNamespace(slots=torch.zeros(case.tokens, dtype=torch.int32))
    rows = torch.zeros(case.tokens, 1, dtype=torch.float64)
    zeros = {field.name: rows for field in fields(RowErrors)}

    def threshold(jumps: Tensor) -> float:
        errors = replace(RowErrors(**zeros), delta_sq=rows + 1, jump_sq=jumps)
        (population,) = populations(case, pool, of_slot, errors)
        return population.threshold

    of_one, of_all = rows.clone(), rows + 16.0
    of_one[3] = 16.0
    assert threshold(rows) == 0 < threshold(of_one) == threshold(of_all)


def test_the_largest_of_a_million_errors_may_be_larger_than_that_of_a_thousand() -> None:
    # what an element of a correct result may miss, in sigma
    limits = [tail(elements) for elements in (1, 1000, 1_000_000)]
    generator = torch.Generator().manual_seed(1)
    largest = torch.randn(1_000_000, generator=generator).abs().max().item()
    assert limits == sorted(limits)
    assert limits[1] < largest + 0.5 < limits[2]


@pytest.mark.parametrize("width", [32, 256])
def test_the_roundings_of_act_vary_more_than_those_of_ranks_and_no_more_than_is_assumed(
    width: int, make_trial: Callable[..., Trial]
) -> None:
    generator = torch.Generator().manual_seed(1)
    gate, up = torch.randn(2, 10_000, width, generator=generator, dtype=torch.float64)
    act = functional.silu(gate) * up
    cost = (act.to(torch.bfloat16).double() - act).square().sum(1)
    wanted = MANTISSA * (2.0**-8) ** 2 / 3 * act.square().sum(1)
    variance = ((cost - wanted).square().mean() / wanted.square().mean()).item()
    layer = make_trial(site=Site.MOE_LAYER, slices=(width, width)).case
    assert 2 * FOURTH_MOMENT / width < variance < 2 * act_in_common(layer)


def test_a_scale_that_is_folded_into_b_raises_no_alarm(make_trial: Callable[..., Trial]) -> None:
    for seed in range(10):
        for slices in ((160,), (3,)):
            axes = LARGE | {"slices": slices, "mix": Mix.SINGLE, "rank": 2, "tokens": 300}
            trial = make_trial(seed=seed, **axes)
            have = replace(trial.capabilities, folds_scale_into_weights=True)
            trial = replace(trial, capabilities=have)
            pool = make_pool(trial.case, seed, DataKind.SIGNED, trial.machine, have)
            batch = make_batch(trial.case, seed, 0, DataKind.SIGNED, trial.machine)
            result = eager(trial.case, folded(pool), batch)
            assert judge_result(trial, pool, batch, None, result).verdict is Verdict.PASS
