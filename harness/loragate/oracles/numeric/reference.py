"""Is the result as good as a plain computation in the same dtype?

Three implementations of one step: fp64 from the same low-precision numbers (golden), the
same-dtype computation (eager), and the subject. Shape, dtype and the positions of NaN and Inf
must agree first. Then errors against golden are compared, relative to the delta and never to
delta + base:

    err(subject) <= 2 * err(eager) + rounding

* for each (row, slice): rms and largest error, `rounding` being the worst case of all casts;
* for each (slot, slice) over all its rows, and at MoE sites for each (slot, expert, slice): rms,
  `rounding` being what one cast of the golden output really costs. This threshold is tight; a
  population of n numbers gets a margin of 1 + 2 / sqrt(n), because its rms is itself uncertain.

Where these hold, what many elements have in common is judged: see zscore.py.

Where eager itself misses the delta by more than 10 % the result is INCONCLUSIVE.

A FAIL also says how far the fault reaches: `wrong_rows` are beyond the threshold of a row, and
`rest_ratio` is the worst population of all other rows, over its threshold.

Power, as error / allowed on 64 rows x 4096 features x 512 columns, rank 16 (above 1: FAIL). Each
subject has this one fault alone; the smallest of six seeds, in bf16 / fp16 / fp32:

    adapter of the neighbour's A    130 / 1000 / 2e5
    last column of A lost            64 /  500 / 1e5
    one inner column of A lost      1.7 /   13 / 3000
    last rank lost                   21 /  170 / 4e4
    scale 1 % too large             1.1 /    6 / 1400
    scale 0.5 % too large           0.7 /    3 /  700 (and see zscore.py)

Correct subjects that round in other places (the shrink output to the dtype, the scale folded into
B, one rounding in place of two) stay below 0.7.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from loragate.core.plural import counted
from loragate.core.verdict import Failure, Judgement, OracleName, Verdict
from loragate.execution.session import Session, inputs_of
from loragate.inputs import DataKind, copy_batch
from loragate.inputs.pairs import out_rows, pair_rows
from loragate.inputs.vocabulary import as_linear
from loragate.matrix.case import MOE_SITES, Site
from loragate.oracles.evidence import locate, passed
from loragate.oracles.numeric.compare import (
    Finding,
    Population,
    expert_finding,
    population_finding,
    populations,
    row_findings,
    wrong_rows,
)
from loragate.oracles.numeric.errors import RowErrors, concatenated, row_errors
from loragate.oracles.numeric.golden import chunks, condition_number, folded
from loragate.oracles.numeric.golden_layer import eager_of, golden_of, plain_bases_of
from loragate.oracles.numeric.zscore import Deviation, worst_deviation
from loragate.protocol import BaseLayer, Batch, Pool, Trial, subject_code

_ILL_CONDITIONED = 0.1


class Reference:
    name = OracleName.REFERENCE

    def applies(self, trial: Trial) -> str | None:
        return None

    def judge(self, trial: Trial) -> Judgement:
        pool, batch, base = inputs_of(trial, DataKind.SIGNED)
        # golden needs the base that an in-place subject overwrites
        result = Session(trial, base, pool).step(copy_batch(batch))
        return judge_result(trial, pool, batch, base, result)


def judge_result(
    trial: Trial, pool: Pool, batch: Batch, base: BaseLayer | None, result: Tensor
) -> Judgement:
    """Judge a subject's result for `batch`, which the subject must not have changed."""
    if not batch.out.shape[0]:
        # an empty batch has nothing to compare
        return passed(OracleName.REFERENCE)
    pieces: list[RowErrors] = []
    misplaced: list[Judgement] = []
    odd: list[Tensor] = []
    pool, batch, base = as_linear(trial.case, pool, batch, base)
    low = folded(pool) if trial.capabilities.folds_scale_into_weights else pool
    promises_nothing = trial.capabilities.roundings is None
    for rows, piece in chunks(batch, sum(trial.case.slices)):
        right = golden_of(trial.case, pool, piece, base, rounds_all=promises_nothing)
        masks = _not_finite_alike(right.out, result[rows])
        misplaced += _misplaced(trial, batch, rows.start, right.out, result[rows], masks)
        odd.append(torch.stack([*masks.values()]).any(0).any(1))
        plain = eager_of(trial.case, low, piece, base)
        alone = plain_bases_of(trial.case, piece, base)
        pieces.append(row_errors(trial.case, right, plain, result[rows], alone))
    errors = concatenated(pieces)
    if misplaced:
        first = misplaced[0]
        extent = _extent(trial, pool, batch, errors, torch.cat(odd))
        return replace(first, metrics={**first.metrics, **extent})
    return judge_errors(trial, pool, batch, errors)


def judge_errors(trial: Trial, pool: Pool, batch: Batch, errors: RowErrors) -> Judgement:
    """The rule of this module, on statistics of all rows."""
    rows = out_rows(batch)
    groups = populations(trial.case, pool, rows, errors)
    findings = [population_finding(groups, errors)]
    if trial.case.site in MOE_SITES:
        findings.append(expert_finding(trial.case, pool, pair_rows(batch), errors))
    worst = max([*findings, *row_findings(trial.case, errors)])
    where = _where(trial, batch, errors, worst.row, worst.part)
    slot = int(rows.slots[worst.row])
    group = next(g for g in groups if (g.slot, g.part) == (slot, worst.part))
    metrics = _metrics(groups, group, worst)
    miss = metrics["eager_miss"]
    deviation = _deviation(trial, pool, batch, errors)
    metrics["sigmas"] = deviation.z
    if worst.ratio > 1:
        metrics |= _condition(trial, pool, batch, group)
        metrics |= _extent(trial, pool, batch, errors, torch.zeros_like(errors.gain[:, 0]).bool())
        message = (
            f"{worst.what} is {metrics['err']:.3g} of the delta, "
            f"{worst.ratio:.3g} times what is allowed"
        )
        failure = Failure.WRONG_ANSWER
        return Judgement(OracleName.REFERENCE, Verdict.FAIL, failure, message, metrics, where)
    if deviation.ratio > 1:
        where = _where(trial, batch, errors, deviation.row, deviation.part)
        failure, message = Failure.WRONG_ANSWER, deviation.sentence
        return Judgement(OracleName.REFERENCE, Verdict.FAIL, failure, message, metrics, where)
    if miss > _ILL_CONDITIONED:
        vague = max(groups, key=lambda g: g.eager_miss)
        metrics |= _condition(trial, pool, batch, vague)
        message = (
            f"a plain {trial.case.dtype} computation misses the delta of slot {vague.slot}, "
            f"slice {vague.part} by {miss:.0%}: nothing is proven"
        )
        return Judgement(OracleName.REFERENCE, Verdict.INCONCLUSIVE, None, message, metrics, where)
    return Judgement(OracleName.REFERENCE, Verdict.PASS, None, "", metrics, where)


def _deviation(trial: Trial, pool: Pool, batch: Batch, errors: RowErrors) -> Deviation:
    """The worst factor or excess of errors that many elements have in common."""
    case, have = trial.case, trial.capabilities
    # the golden delta does not round scale * B, so that its cost is in every error
    promised = None
    if have.roundings is not None and not have.folds_scale_into_weights:
        with subject_code():
            promised = have.roundings(case)
    pairs = pair_rows(batch) if case.site in MOE_SITES else None
    return worst_deviation(case, pool, out_rows(batch), pairs, errors, promised)


def _where(
    trial: Trial, batch: Batch, errors: RowErrors, row: int, part: int
) -> dict[str, int | str]:
    column = int(errors.worst_column[row, part])
    return locate(trial.case, batch, row, sum(trial.case.out_slices[:part]) + column)


def _metrics(groups: list[Population], group: Population, worst: Finding) -> dict[str, float]:
    """`err` and `threshold` are relative to the delta of the worst population, or of all
    where it has none (base rows)."""
    unit = group.delta or max(g.delta for g in groups) or 1.0
    return {
        "err": worst.error / unit,
        "threshold": worst.threshold / unit,
        "ratio": worst.ratio,
        "rms_vs_eager": group.subject / group.eager if group.eager else float(group.subject > 0),
        "bias": max((g.bias for g in groups), key=abs),
        "eager_miss": max(g.eager_miss for g in groups),
    }


def _condition(trial: Trial, pool: Pool, batch: Batch, group: Population) -> dict[str, float]:
    """The condition number of a delta; an MoE layer is no sum of terms, and has none."""
    if trial.case.site is Site.MOE_LAYER:
        return {}
    return {"condition": condition_number(pool, batch, group.rows, group.part)}


def _extent(
    trial: Trial, pool: Pool, batch: Batch, errors: RowErrors, odd: Tensor
) -> dict[str, float]:
    """How many rows are wrong: those beyond the threshold of a row, and the `odd` ones. The other
    rows may still be wrong together: `rest_ratio` is their worst error over its threshold."""
    case = trial.case
    kept = ~(wrong_rows(case, errors) | odd)
    ratios = [0.0]
    if kept.any():
        rest, rows = errors[kept], out_rows(batch)[kept]
        groups = populations(case, pool, rows, rest)
        ratios.append(population_finding(groups, rest).ratio)
        if case.site is Site.MOE_LAYER:
            pairs = pair_rows(batch)
            ratios.append(expert_finding(case, pool, pairs[kept[pairs.x_rows]], errors).ratio)
        elif case.site in MOE_SITES:
            ratios.append(expert_finding(case, pool, rows, rest).ratio)
    return {"wrong_rows": float((~kept).sum()), "rest_ratio": max(ratios)}


def _not_finite_alike(right: Tensor, result: Tensor) -> dict[str, Tensor]:
    """bool like both, by name: where the value is on one side only."""
    return {
        "NaN": right.isnan() != result.isnan(),
        "Inf": right.isposinf() != result.isposinf(),
        "-Inf": right.isneginf() != result.isneginf(),
    }


def _misplaced(
    trial: Trial,
    batch: Batch,
    first: int,
    right: Tensor,
    result: Tensor,
    masks: dict[str, Tensor],
) -> Iterator[Judgement]:
    """A FAIL for each value that the result has in other places than it should."""
    # one copy from the device, for which the host waits
    has_any = torch.stack([mask.any() for mask in masks.values()]).tolist()
    for (value, mask), is_wrong in zip(masks.items(), has_any, strict=True):
        if is_wrong:
            row, column = (int(i) for i in mask.nonzero()[0])
            have, want = result[row, column].item(), right[row, column].item()
            yield Judgement(
                OracleName.REFERENCE,
                Verdict.FAIL,
                Failure.WRONG_ANSWER,
                f"{counted(int(mask.sum()), 'element is', 'elements are')} {value} on one side "
                f"only; the first is {have!r}, should be {want:.6g}",
                {"ratio": float("inf")},
                locate(trial.case, batch, first + row, column),
            )
