"""When the reference oracle fails, when it is inconclusive, and which place it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.inputs import DataKind, copy_batch, make_batch, make_pool
from loragate.inputs.pairs import out_rows
from loragate.matrix.case import Dtype, Mix, Ranks
from loragate.oracles.evidence import judge_bits
from loragate.oracles.numeric.compare import population_finding, populations, ranks_of_errors
from loragate.oracles.numeric.errors import row_errors
from loragate.oracles.numeric.golden import eager, folded, golden
from loragate.oracles.numeric.reference import judge_result
from loragate.protocol import Batch, Pool, Trial

NARROW = [Dtype.BF16, Dtype.FP16]


def data(trial: Trial) -> tuple[Pool, Batch]:
    case, seed, kind = trial.case, trial.seed, DataKind.SIGNED
    pool = make_pool(case, seed, kind, trial.machine, trial.capabilities)
    return pool, make_batch(case, seed, 0, kind, trial.machine)


def judge(trial: Trial, result: torch.Tensor) -> Judgement:
    pool, batch = data(trial)
    return judge_result(trial, pool, batch, None, result)


def as_computed(trial: Trial) -> torch.Tensor:
    pool, batch = data(trial)
    return eager(trial.case, pool, batch)


@pytest.mark.parametrize("dtype", Dtype)
def test_the_best_possible_result_and_the_plain_one_pass(
    dtype: Dtype, make_trial: Callable[..., Trial]
) -> None:
    for seed in range(20):
        trial = make_trial(seed=seed, dtype=dtype)
        pool, batch = data(trial)
        best = golden(pool, batch).out.to(batch.out.dtype)
        for result in (best, as_computed(trial)):
            judgement = judge(trial, result)
            assert judgement.verdict is Verdict.PASS, judgement
            assert judgement.metrics["ratio"] < 0.7


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_few_rows_of_low_rank_are_no_reason_to_fail_or_to_doubt(
    dtype: Dtype, tokens: int, make_trial: Callable[..., Trial]
) -> None:
    for seed in range(20):
        trial = make_trial(
            seed=seed, dtype=dtype, tokens=tokens, mix=Mix.SINGLE, rank=1, slices=(8,), slots=2
        )
        pool, batch = data(trial)
        best = golden(pool, batch).out.to(batch.out.dtype)
        for result in (best, as_computed(trial)):
            assert judge(trial, result).verdict is Verdict.PASS


@pytest.mark.parametrize(("dtype", "too_large"), [(Dtype.BF16, 1.015), (Dtype.FP16, 1.003)])
def test_a_scale_that_is_off_by_a_little_is_seen(
    dtype: Dtype, too_large: float, make_trial: Callable[..., Trial]
) -> None:
    for seed in range(5):
        trial = make_trial(seed=seed, dtype=dtype, tokens=64, in_features=256, slices=(128, 64))
        pool, batch = data(trial)
        scales = tuple(tuple(s * too_large for s in row) for row in pool.scales)
        judgement = judge(trial, eager(trial.case, replace(pool, scales=scales), batch))
        assert judgement.failure is Failure.WRONG_ANSWER, judgement
        assert judgement.metrics["bias"] == pytest.approx(too_large - 1, rel=0.25)


def test_products_in_tf32_are_not_accepted_as_fp32(make_trial: Callable[..., Trial]) -> None:
    trial = make_trial(dtype=Dtype.FP32)
    pool, batch = data(trial)
    tf32 = (pool.a.view(torch.int32) & ~0x1FFF).view(torch.float32)
    judgement = judge(trial, eager(trial.case, replace(pool, a=tf32), batch))
    assert judgement.failure is Failure.WRONG_ANSWER


def cancelled(trial: Trial) -> tuple[Pool, Batch, int]:
    """A row whose product with A is a thousandth of the terms that it adds up, and that row."""
    pool, batch = data(trial)
    slot = trial.case.slots - 1
    row = int((batch.token_slots == slot).nonzero()[0])
    a = pool.a[slot, 0].double()
    x = batch.x[row].double()
    x -= 0.999 * a.T @ torch.linalg.lstsq(a.T, x[:, None]).solution[:, 0]
    batch.x[row] = x.float()
    return pool, batch, row


def test_what_fp32_loses_where_its_terms_cancel_is_no_fault(
    make_trial: Callable[..., Trial],
) -> None:
    trial = make_trial(dtype=Dtype.FP32, rank=2, in_features=64, slices=(16,))
    pool, batch, row = cancelled(trial)
    result = golden(pool, batch).out
    for share, verdict in ((0.0, Verdict.PASS), (1.0, Verdict.PASS), (20.0, Verdict.FAIL)):
        # of a unit roundoff in each of 64 terms, common to all columns
        error = share * 2.0**-24 * 8 * _addends_rms(pool, batch, row)
        wrong = result.clone()
        wrong[row] += error
        assert judge_result(trial, pool, batch, None, wrong.float()).verdict is verdict, share


def _addends_rms(pool: Pool, batch: Batch, row: int) -> float:
    addends = golden(pool, batch).addends_sq
    assert addends is not None
    return float(addends[row].mean().sqrt())


def test_one_wrong_row_of_a_small_slice_is_seen_and_named(
    make_trial: Callable[..., Trial],
) -> None:
    trial = make_trial(tokens=64, slices=(512, 8))
    result = as_computed(trial)
    pool, batch = data(trial)
    row = int((batch.token_slots == trial.case.slots - 1).nonzero()[0])
    delta = golden(pool, batch).delta
    part = 1 if pool.ranks[trial.case.slots - 1][1] else 0
    columns = slice(512, 520) if part else slice(0, 512)
    result[row, columns] += (delta[row, columns] * 0.2).to(result.dtype)
    judgement = judge(trial, result)
    assert judgement.verdict is Verdict.FAIL
    assert judgement.where["token"] == row
    assert judgement.where["slot"] == trial.case.slots - 1
    assert judgement.where["slice"] == part
    assert judgement.metrics["ratio"] == pytest.approx(
        judgement.metrics["err"] / judgement.metrics["threshold"]
    )


@pytest.mark.parametrize("dtype", NARROW)
def test_a_row_whose_elements_are_all_a_little_wrong_is_seen(
    dtype: Dtype, make_trial: Callable[..., Trial]
) -> None:
    # no element is wrong by itself, and in the population one row does not show
    axes = {"tokens": 64, "slices": (512,), "rank": 16, "slots": 1, "ranks": Ranks.FULL}
    for seed in range(3):
        trial = make_trial(seed=seed, dtype=dtype, mix=Mix.SINGLE, **axes)
        result, right = as_computed(trial), golden(*data(trial)).out
        rms = (result - right).square().mean().sqrt()
        signs = 1 - 2 * (torch.arange(512) % 2)
        result[20] = (right[20] + 8 * rms * signs).to(result.dtype)
        judgement = judge(trial, result)
        assert judgement.message.startswith("the rms of a row's errors"), judgement
        assert judgement.where["token"] == 20


def test_one_wrong_element_is_named(make_trial: Callable[..., Trial]) -> None:
    trial = make_trial()
    result = as_computed(trial)
    result[5, 40 + 3] += 1
    judgement = judge(trial, result)
    assert judgement.verdict is Verdict.FAIL
    assert (judgement.where["token"], judgement.where["slice"], judgement.where["column"]) == (
        5,
        1,
        3,
    )


@pytest.mark.parametrize(
    ("value", "name"), [(float("nan"), "NaN"), (float("inf"), "Inf"), (-float("inf"), "-Inf")]
)
def test_nan_and_inf_are_reported_before_any_error_is_measured(
    value: float, name: str, make_trial: Callable[..., Trial]
) -> None:
    trial = make_trial()
    result = as_computed(trial)
    result[7, 2] = value
    judgement = judge(trial, result)
    assert judgement.failure is Failure.WRONG_ANSWER
    assert judgement.message.startswith(f"1 element is {name} on one side only")
    assert judgement.where["token"] == 7
    assert judgement.where["column"] == 2


@pytest.mark.parametrize("row", [0, 7, 23])
def test_every_piece_of_a_large_batch_is_judged(
    row: int, make_trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    # a row at a time
    monkeypatch.setattr("loragate.oracles.numeric.golden._CHUNK", 1)
    trial = make_trial()
    result = as_computed(trial)
    assert judge(trial, result).verdict is Verdict.PASS
    for value, what in ((result[row, 2] + 2, "the largest"), (torch.nan, "1 element is NaN")):
        result[row, 2] = value
        judgement = judge(trial, result)
        assert judgement.message.startswith(what)
        assert (judgement.where["token"], judgement.where["column"]) == (row, 2)


def test_a_nan_that_belongs_there_is_no_error(make_trial: Callable[..., Trial]) -> None:
    trial = make_trial()
    pool, batch = data(trial)
    row = int((batch.token_slots < 0).nonzero()[0])
    batch.out[row, 3] = float("nan")
    result = eager(trial.case, pool, copy_batch(batch))
    assert judge_result(trial, pool, batch, None, result).verdict is Verdict.PASS
    result[row, 3] = 0
    assert judge_result(trial, pool, batch, None, result).verdict is Verdict.FAIL


@pytest.mark.parametrize("dtype", NARROW)
def test_a_delta_that_drowns_in_the_base_is_inconclusive_and_never_a_pass(
    dtype: Dtype, make_trial: Callable[..., Trial]
) -> None:
    trial = make_trial(dtype=dtype)
    pool, batch = data(trial)
    batch.out.copy_(batch.out * 4096)
    judgement = judge_result(trial, pool, batch, None, eager(trial.case, pool, batch))
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert "nothing is proven" in judgement.message
    assert judgement.metrics["eager_miss"] > 0.1
    # a gross error is still one
    wrong = judge_result(trial, pool, batch, None, batch.out * 2)
    assert wrong.verdict is Verdict.FAIL


def test_a_scale_in_b_is_judged_by_its_own_rounding_where_it_is_declared(
    make_trial: Callable[..., Trial],
) -> None:
    trial = make_trial(tokens=64, in_features=256, slices=(128, 64))
    declared = replace(
        trial, capabilities=replace(trial.capabilities, folds_scale_into_weights=True)
    )
    pool, batch = data(trial)
    result = eager(trial.case, folded(pool), batch)
    plain, folding = judge(trial, result), judge(declared, result)
    assert folding.verdict is Verdict.PASS
    assert folding.metrics["ratio"] < 0.9 * plain.metrics["ratio"]


def test_rows_without_adapter_may_not_move_at_all(make_trial: Callable[..., Trial]) -> None:
    trial = make_trial(mix=Mix.ALL_BASE)
    result = as_computed(trial)
    assert judge(trial, result).verdict is Verdict.PASS
    result[3, 4] *= 1.05
    judgement = judge(trial, result)
    assert judgement.verdict is Verdict.FAIL
    assert judgement.where["slot"] == -1


def test_any_error_of_rows_that_nothing_rounds_is_infinitely_many_times_too_large(
    make_trial: Callable[..., Trial],
) -> None:
    trial = make_trial(mix=Mix.ALL_BASE, slices=(8,))
    pool, batch = data(trial)
    batch.out.zero_()
    for error, ratio in ((0.0, 0.0), (1e-6, float("inf"))):
        errors = row_errors(trial.case, golden(pool, batch), batch.out, batch.out + error)
        (group,) = populations(trial.case, pool, out_rows(batch), errors)
        assert group.threshold == 0
        assert population_finding([group], errors).ratio == ratio


def test_a_failure_says_how_many_rows_are_wrong_and_how_right_the_others_are(
    make_trial: Callable[..., Trial],
) -> None:
    trial = make_trial(tokens=40, in_features=64, slices=(96, 48), rank=8, dtype=Dtype.FP16)
    result = as_computed(trial)
    few = result.clone()
    few[[3, 17], 5] += 1
    metrics = judge(trial, few).metrics
    assert metrics["wrong_rows"] == 2
    assert 0 < metrics["rest_ratio"] <= 1
    # one that is wrong and one that is no number
    few[17, 5] = float("nan")
    metrics = judge(trial, few).metrics
    assert metrics["wrong_rows"] == 2
    assert 0 < metrics["rest_ratio"] <= 1
    # every delta is a little too large, which few rows show by themselves
    _, batch = data(trial)
    subtle = batch.out + (result - batch.out).float() * 1.0015
    metrics = judge(trial, subtle.half()).metrics
    assert metrics["rest_ratio"] > 1
    metrics = judge(trial, -result).metrics
    assert metrics["wrong_rows"] > 30


def test_a_row_counts_as_wrong_for_a_single_element(make_trial: Callable[..., Trial]) -> None:
    # in so many columns one of them does not show in the rms
    trial = make_trial(tokens=12, slices=(2048,), dtype=Dtype.FP16)
    result = as_computed(trial)
    result[7, 100] += 8 * torch.finfo(torch.float16).eps * result[7].abs().max()
    judgement = judge(trial, result)
    assert judgement.message.startswith("the largest error of a row")
    assert judgement.metrics["wrong_rows"] == 1
    assert judgement.metrics["rest_ratio"] <= 1


def test_a_nan_in_place_of_a_number_is_an_infinite_error(make_trial: Callable[..., Trial]) -> None:
    trial = make_trial()
    _, batch = data(trial)
    result = batch.out.clone()
    result[3, 1] += 2
    result[3, 2] = float("nan")
    judged = judge_bits(
        trial,
        batch,
        result,
        batch.out,
        oracle=OracleName.EXACT,
        failure=Failure.WRONG_ANSWER,
        claim="the base",
    )
    assert judged is not None
    # a listed finding limits both
    assert judged.metrics["differing"] == 2
    assert judged.metrics["largest"] > torch.finfo(torch.float32).max


def test_errors_of_a_layer_are_spread_over_the_fewest_ranks_of_its_products_that_have_any() -> None:
    none = torch.empty(0)
    down = Pool(none, (none,), ((8,), (4,), (0,), (3,)), ((1.0,),) * 4)
    ranks = ((8, 8), (8, 0), (0, 0), (0, 0))
    layer = Pool(none, (none, none), ranks, ((1.0, 1.0),) * 4, down)
    assert ranks_of_errors(layer) == ((8,), (4,), (1,), (3,))
    assert ranks_of_errors(replace(layer, down=None)) == ranks
