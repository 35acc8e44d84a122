"""Tolerance zero: on data that leaves nothing to round, any tile, split or order must give the
bits of the fp64 result. See inputs/exactness.py and inputs/exact_layer.py for why that holds in
every dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from loragate.core.verdict import Failure, Judgement, OracleName
from loragate.execution.session import Session, inputs_of
from loragate.inputs import DataKind, copy_batch
from loragate.inputs.cancelling import Cancelling, cancelling, has_cancelling
from loragate.inputs.exactness import EXACT_UNITS, UNIT
from loragate.inputs.pairs import out_rows
from loragate.inputs.pool_changes import is_small
from loragate.inputs.vocabulary import as_linear
from loragate.matrix.case import Case, Quantisation, Site
from loragate.oracles.evidence import judge_bits, passed
from loragate.oracles.numeric.deltas import deltas
from loragate.oracles.numeric.golden import chunks, magnitudes
from loragate.oracles.numeric.golden_layer import eager_of, golden_of, rounds_always
from loragate.protocol import BaseLayer, Batch, Pool, Rounding, Trial, subject_code

# elements of a batch, for each choice of a token, and of the base layer: a few hundred MiB in fp64
# with all that a result is made of. The errors of larger batches are judged together (zscore.py)
_MOST = 1 << 22


class Exact:
    name = OracleName.EXACT

    def applies(self, trial: Trial) -> str | None:
        if trial.case.quantisation is not Quantisation.NONE:
            return "a quantised product rounds on any data"
        return rounds_always(trial.case)

    def judge(self, trial: Trial) -> Judgement:
        data = inputs_of(trial, DataKind.EXACT)
        wanted = _exact_result(trial.case, *as_linear(trial.case, *data))
        wrong = _compared(trial, *data, wanted, "the exact result")
        may_cancel = _rounds_nothing_between(trial) and _are_small(trial.case, *data)
        if wrong is None and may_cancel:
            wrong = _judge_cancelling(trial, cancelling(trial.case, *data))
        return wrong or passed(self.name)


def _compared(
    trial: Trial, pool: Pool, batch: Batch, base: BaseLayer | None, wanted: Tensor, claim: str
) -> Judgement | None:
    """`wanted` is NaN where nothing is known."""
    result = Session(trial, base, pool).step(copy_batch(batch))
    return judge_bits(
        trial,
        batch,
        # the sign of a zero sum depends on the order of its terms
        result + 0.0,
        torch.where(wanted.isnan(), result, wanted) + 0.0,
        oracle=OracleName.EXACT,
        failure=Failure.WRONG_ANSWER,
        claim=claim,
    )


def _rounds_nothing_between(trial: Trial) -> bool:
    """Whether sums stay in fp32 until they are whole: what the shrink gives may be rounded."""
    have = trial.capabilities
    if have.roundings is None or have.folds_scale_into_weights or not has_cancelling(trial.case):
        return False
    with subject_code():
        return set(have.roundings(trial.case)) <= {Rounding.SHRUNK}


def _are_small(case: Case, pool: Pool, batch: Batch, base: BaseLayer | None) -> bool:
    """Whether there is memory for all of them twice, and for a result that is computed at once."""
    values = (batch.x.numel() + batch.out.numel()) * max(1, case.top_k)
    weights = 0 if base is None else base.weight.numel()
    return is_small(pool) and values + weights <= _MOST


def _judge_cancelling(trial: Trial, data: Cancelling) -> Judgement | None:
    case, known = trial.case, data.rows.to(data.batch.out.device)
    right = golden_of(case, data.pool, data.batch, data.base).out
    wanted = right.to(data.batch.out.dtype)
    if case.site is Site.MOE_LAYER:
        # in fp64 silu gives 1e-50 in place of zero
        right = eager_of(case, data.pool, data.batch, data.base)
    assert torch.equal(right[known].double() + 0.0, wanted[known].double() + 0.0), "it rounds"
    wanted[~known] = float("nan")
    claim = "what is left when large terms cancel"
    return _compared(trial, data.pool, data.batch, data.base, wanted, claim)


def _exact_result(case: Case, pool: Pool, batch: Batch, base: BaseLayer | None) -> Tensor:
    wanted: list[Tensor] = []
    for _, piece in chunks(batch, sum(case.slices)):
        right = golden_of(case, pool, piece, base).out.to(batch.out.dtype)
        if case.site is Site.MOE_LAYER:
            plain = eager_of(case, pool, piece, base)
            # in fp64 silu gives 1e-50 in place of zero, and a zero of either sign
            assert torch.equal(plain + 0.0, right + 0.0), "something rounds"
        else:
            assert_exact(pool, piece, base)
        wanted.append(right)
    return torch.cat(wanted)


def assert_exact(pool: Pool, batch: Batch, base: BaseLayer | None) -> None:
    """Check on the data itself what inputs/exactness.py claims: no sum of magnitudes leaves the
    exact range."""
    x = batch.x.double().abs()
    start = batch.out.double().abs()
    if base is not None:
        bias = 0.0 if base.bias is None else base.bias.double().abs()
        # abs first: a copy of the weight in fp64 is four times as large
        start = x @ base.weight.abs().double().T + bias
    delta = deltas(magnitudes(pool), x, out_rows(batch), torch.float64)
    if not delta.numel():
        return
    off_grid = [values.remainder(UNIT).any().double() for values in (start, delta)]
    # one copy from the device, for which the host waits
    of_base, of_delta, top = torch.stack([*off_grid, (start + delta).max()]).tolist()
    assert not of_base, "base values off the grid"
    assert not of_delta, "delta off the grid"
    assert top <= EXACT_UNITS * UNIT, f"a sum of magnitudes reaches {top}"
