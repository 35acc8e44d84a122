"""Statistics of errors are those of each expert and of the parts that really round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loragate.execution.session import inputs_of
from loragate.inputs import DataKind
from loragate.inputs.pairs import OutRows, out_rows, pair_rows
from loragate.matrix.case import Case, Dtype, Mix, Parallel, Ranks, Site
from loragate.oracles.numeric.compare import (
    expert_finding,
    population_finding,
    populations,
    row_findings,
)
from loragate.oracles.numeric.errors import RowErrors, row_errors
from loragate.oracles.numeric.golden import Golden, golden
from loragate.oracles.numeric.golden_layer import eager_of, golden_of
from loragate.oracles.numeric.reference import judge_errors
from loragate.oracles.numeric.zscore import worst_deviation
from loragate.protocol import Trial

EXPERTS, CHOSEN = 8, 5


class Pairs:
    """The errors of a right result of a MoE delta, and the pairs of one of its experts."""

    def __init__(self, trial: Trial) -> None:
        self.pool, batch, base = inputs_of(trial, DataKind.SIGNED)
        self.trial, self.batch = trial, batch
        right = golden_of(trial.case, self.pool, batch, base)
        eager = eager_of(trial.case, self.pool, batch, base)
        self.case: Case = trial.case
        self.errors = row_errors(trial.case, right, eager, right.out.to(batch.out.dtype))
        self.rows: OutRows = out_rows(batch)
        self.pairs = pair_rows(batch)
        self.own: Tensor = (self.pairs.experts == CHOSEN) & (self.pairs.slots >= 0)

    def with_rows_of_the_expert(self, name: str, values: Tensor) -> RowErrors:
        changed = torch.where(self.own[:, None], values, getattr(self.errors, name))
        return replace(self.errors, **{name: changed})


@pytest.fixture
def pairs(make_trial: Callable[..., Trial]) -> Pairs:
    axes = {"experts": EXPERTS, "top_k": 2, "slots": 1, "mix": Mix.SINGLE, "ranks": Ranks.FULL}
    shape = {"tokens": 200, "in_features": 64, "slices": (64,), "rank": 16, "dtype": Dtype.BF16}
    return Pairs(make_trial(site=Site.MOE_DELTA, **axes, **shape))


def test_errors_of_one_expert_are_seen_that_drown_in_those_of_its_slot(pairs: Pairs) -> None:
    errors = pairs.with_rows_of_the_expert("subject_sq", 1.65**2 * pairs.errors.bound_sq)
    groups = populations(pairs.case, pairs.pool, pairs.rows, errors)
    assert max([population_finding(groups, errors), *row_findings(pairs.case, errors)]).ratio < 1
    found = expert_finding(pairs.case, pairs.pool, pairs.pairs, errors)
    assert found.ratio > 1
    assert pairs.own[found.row]


def test_an_expert_that_is_wrong_beside_a_wrong_row_is_part_of_the_rest(pairs: Pairs) -> None:
    errors = pairs.with_rows_of_the_expert("subject_sq", 1.65**2 * pairs.errors.bound_sq)
    other = int((~pairs.own).nonzero()[0])
    errors.subject_sq[other] *= 1e4
    judgement = judge_errors(pairs.trial, pairs.pool, pairs.batch, errors)
    assert judgement.metrics["wrong_rows"] == 1
    assert judgement.metrics["rest_ratio"] > 1
    # the wrong row alone
    alone = replace(pairs.errors, subject_sq=pairs.errors.subject_sq.clone())
    alone.subject_sq[other] *= 1e4
    judgement = judge_errors(pairs.trial, pairs.pool, pairs.batch, alone)
    assert judgement.metrics["wrong_rows"] == 1
    assert judgement.metrics["rest_ratio"] < 1


def test_a_factor_on_the_deltas_of_one_expert_is_seen(pairs: Pairs) -> None:
    def judged(factor: float) -> tuple[float, bool]:
        gain = pairs.errors.gain + factor * pairs.errors.delta_sq
        errors = pairs.with_rows_of_the_expert("gain", gain)
        given = pairs.case, pairs.pool, pairs.rows, pairs.pairs, errors
        found = worst_deviation(*given, promised=None)
        return found.ratio, bool(pairs.own[found.row])

    assert judged(0.0)[0] < 0.7
    for factor in (0.003, -0.003):
        ratio, is_own = judged(factor)
        assert ratio > 1
        assert is_own
    # in the same data with one expert the deltas of all others would hide it
    alone = pairs.with_rows_of_the_expert("gain", pairs.errors.gain + 0.003 * pairs.errors.delta_sq)
    given = pairs.case, pairs.pool, pairs.rows, None, alone
    assert worst_deviation(*given, promised=None).ratio < 1


def errors_of(case: Case, right: Golden, dtype: torch.dtype = torch.float32) -> RowErrors:
    return row_errors(case, right, right.out.to(dtype), right.out.to(dtype))


def data_of(trial: Trial) -> Golden:
    pool, batch, _ = inputs_of(trial, DataKind.SIGNED)
    return golden(pool, batch)


def test_partial_outputs_that_are_added_up_may_be_rounded_and_columns_of_shards_once(
    make_trial: Callable[..., Trial],
) -> None:
    trial = make_trial(dtype=Dtype.BF16)
    case, right = trial.case, data_of(trial)
    whole, of_columns, of_rows = (
        errors_of(replace(case, parallel=parallel, tp=tp), right, torch.bfloat16).bound_max
        for parallel, tp in ((case.parallel, 1), (Parallel.COLUMN, 4), (Parallel.ROW, 4))
    )
    torch.testing.assert_close(of_columns, whole)
    torch.testing.assert_close(of_rows, 4 * whole, rtol=0.01, atol=0)


def test_in_fp32_the_error_of_a_sum_grows_with_the_root_of_the_number_of_terms(
    make_trial: Callable[..., Trial],
) -> None:
    trial = make_trial(dtype=Dtype.FP32, in_features=96, rank=4)
    right = data_of(trial)
    features = (100, 400, 700)
    few, more, most = (
        errors_of(replace(trial.case, in_features=n), right).floor_sq for n in features
    )
    assert (more > few).any()
    torch.testing.assert_close(most - more, more - few)
