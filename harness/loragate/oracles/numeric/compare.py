"""Judge error statistics: which row or population is worst against its threshold.

Pure functions on tensors; the rule itself is in reference.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from loragate.inputs.pairs import OutRows
from loragate.matrix.case import Case, Site
from loragate.oracles.numeric.errors import JUMPS, TAIL, RowErrors
from loragate.protocol import Pool

FACTOR = 2.0


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """An error and its threshold, in units of the output. `row` is the one to look at."""

    ratio: float
    error: float
    threshold: float
    row: int
    part: int
    what: str


@dataclass(frozen=True, slots=True)
class Population:
    """All rows of one slot, for one slice. Errors and delta are rms; `bias` is the part of
    the delta by which the subject is too large (signed)."""

    slot: int
    part: int
    rows: Tensor
    delta: float
    subject: float
    eager: float
    threshold: float
    bias: float

    @property
    def eager_miss(self) -> float:
        """Error of eager relative to the delta; 0 where there is no delta to miss."""
        return self.eager / self.delta if self.delta else 0.0


def populations(case: Case, pool: Pool, rows: OutRows, errors: RowErrors) -> list[Population]:
    """One population for each slot with rows (-1 for rows without a delta) and each slice."""
    slots = rows.slots.long()
    ranks = torch.tensor([*ranks_of_errors(pool), (1,) * len(case.out_slices)])
    # rows without a slot are group -1, which is the last one
    group = slots.remainder(len(ranks))
    tables = _Sums(case, errors, group.to(errors.gain.device), ranks).tables()
    return [
        Population(
            slot,
            part,
            (slots == slot).nonzero().flatten().to(errors.gain.device),
            *tables[slot][part],
        )
        for slot in sorted(set(slots.tolist()))
        for part in range(len(case.out_slices))
    ]


def expert_finding(case: Case, pool: Pool, rows: OutRows, errors: RowErrors) -> Finding:
    """The worst population of one slot, one expert and one slice. `rows` are token-expert pairs;
    the population of an MoE layer is the tokens that chose the expert."""
    device, of_tokens = errors.gain.device, case.site is Site.MOE_LAYER
    errors = errors[rows.x_rows] if of_tokens else errors
    ranks = torch.tensor(ranks_of_errors(pool)).repeat_interleave(case.experts, 0)
    # rows without a delta are the last group: no shrink output, and all of their base
    ranks = torch.cat([ranks, torch.ones_like(ranks[:1])])
    slots = rows.slots.long().to(device)
    group = torch.where(slots < 0, len(ranks) - 1, slots * case.experts + rows.experts)
    sums = _Sums(case, errors, group, ranks)
    ratio = torch.where(sums.subject == 0, 0.0, sums.subject / sums.threshold)
    # groups without rows do not count
    ratio[torch.bincount(group, minlength=len(ranks)) == 0] = -1.0
    (worst, part), found = largest_of(ratio, sums.subject, sums.threshold)
    # errors are no less than zero
    of_group = torch.where(group == worst, errors.subject_sq[:, part], -1.0)
    row = of_group.argmax()[None]
    row = rows.x_rows[row] if of_tokens else row
    return Finding(*found, int(row), part, "the rms of all errors of one expert")


def ranks_of_errors(pool: Pool) -> tuple[tuple[int, ...], ...]:
    """[slots][slices of the output]: over how many ranks errors of the shrink output are spread."""
    if pool.down is None:
        return pool.ranks
    # errors of each product reach the whole output
    rows = zip(pool.ranks, pool.down.ranks, strict=True)
    return tuple((min([r for r in (*up, *down) if r] or [1]),) for up, down in rows)


class _Sums:
    """Statistics of groups of rows, fp64 [groups, slices] each; those of an empty group are
    meaningless. `ranks` [groups, slices]."""

    def __init__(self, case: Case, errors: RowErrors, group: Tensor, ranks: Tensor) -> None:
        device = errors.gain.device
        ranks, widths = ranks.to(device), torch.tensor(case.out_slices, device=device)
        rows = torch.bincount(group, minlength=len(ranks)).clamp(min=1)[:, None]

        def mean(sums: Tensor) -> Tensor:
            """The mean over all elements of a group; `sums` are over columns already."""
            total = sums.new_zeros(len(ranks), len(widths)).index_add_(0, group, sums)
            return total / (rows * widths)

        delta_sq = mean(errors.delta_sq)
        self.delta, self.eager = delta_sq.sqrt(), mean(errors.eager_sq).sqrt()
        self.subject = mean(errors.subject_sq).sqrt()
        # a few roundings can all be lucky, so never allow less than their expected cost, which is
        # a third of the square of half a step: below for two roundings and for one
        bound_sq = mean(errors.bound_sq)
        # errors of the shrink output are common to all columns: only rows x ranks are independent
        independent = rows * widths.minimum(ranks.clamp(min=1))
        # one row of a group may have the largest jump
        rows_of = group[:, None].expand_as(errors.jump_sq)
        jump = torch.zeros_like(delta_sq).scatter_reduce_(0, rows_of, errors.jump_sq, "amax")
        shrunk_sq = mean(errors.shrunk_sq) + jump / FACTOR**2 / (rows * widths)
        shrunk = _unlucky(independent) * shrunk_sq.sqrt()
        allowed = FACTOR * self.eager.maximum((bound_sq / 6).sqrt()).hypot(shrunk)
        allowed += mean(errors.floor_sq).maximum(bound_sq / 12).sqrt()
        self.threshold = (1 + 2 * independent.double() ** -0.5) * allowed
        self.bias = torch.where(delta_sq > 0, mean(errors.gain) / delta_sq, 0.0)

    def tables(self) -> list[list[list[float]]]:
        """[groups][slices]: the statistics in the order of the fields of Population."""
        columns = (self.delta, self.subject, self.eager, self.threshold, self.bias)
        # one copy from the device, for which the host waits
        found: list[list[list[float]]] = torch.stack(columns, dim=-1).tolist()
        return found


def _unlucky(independent: Tensor) -> Tensor:
    """How far above its mean the rms of that many roundings may be, apart from FACTOR."""
    return 1 + independent.double() ** -0.5


def population_finding(populations: Iterable[Population], errors: RowErrors) -> Finding:
    """The worst of all populations."""
    of_each = [((_ratio(p.subject, p.threshold), p.subject, p.threshold), p) for p in populations]
    (ratio, error, threshold), worst = max(of_each, key=lambda each: each[0])
    row = worst.rows[errors.subject_sq[worst.rows, worst.part].argmax()[None]]
    what = "the rms of all rows' errors"
    return Finding(ratio, error, threshold, int(row), worst.part, what)


def row_findings(case: Case, errors: RowErrors) -> Iterator[Finding]:
    """The worst (row, slice) by rms and by largest element."""
    for error, threshold, what in _of_rows(case, errors):
        yield _worst(error, threshold, what)


def wrong_rows(case: Case, errors: RowErrors) -> Tensor:
    """bool [rows]: whether a row is wrong by itself, whatever the other rows of its population."""
    wrong = [error > threshold for error, threshold, _ in _of_rows(case, errors)]
    return torch.stack(wrong).any(0).any(1)


def _of_rows(case: Case, errors: RowErrors) -> Iterator[tuple[Tensor, Tensor, str]]:
    """Error and threshold [rows, slices] of each (row, slice), by rms and by largest element."""
    widths = torch.tensor(case.out_slices, device=errors.gain.device)
    subject, eager = (errors.subject_sq / widths).sqrt(), (errors.eager_sq / widths).sqrt()
    bound = (errors.bound_sq / widths).sqrt()
    # the shrink output is rounded once for each rank, for all columns alike
    shrunk_sq = (errors.shrunk_sq + (JUMPS / FACTOR) ** 2 * errors.jump_sq) / widths
    unlucky = _unlucky(widths.clamp(max=case.rank))
    if case.site is Site.MOE_LAYER:
        # all columns have the errors of act in common, which of few features are far from average
        unlucky = unlucky.clamp(min=1 + tail(len(errors.gain)) / math.sqrt(2 * case.slices[0]))
    shrunk = unlucky * shrunk_sq.sqrt()
    # eager may be lucky in a row of few columns: see populations()
    allowed = FACTOR * eager.maximum(bound / 6**0.5).hypot(shrunk) + bound
    yield subject, allowed, "the rms of a row's errors"
    eager = errors.eager_max.maximum(errors.bound_max / 2)
    sigmas = tail(len(errors.gain) * sum(case.out_slices))
    allowed = FACTOR * eager.hypot(sigmas / FACTOR * errors.shrunk_max) + errors.bound_max
    yield errors.subject_max, allowed, "the largest error of a row"


def tail(elements: int) -> float:
    """How many sigma the largest of so many elements may lie at: that of normal numbers, and 1.5
    more, which one set of a million reaches in thousands."""
    return max(TAIL, math.sqrt(2 * math.log(max(elements, 1))) + 1.5)


def _worst(error: Tensor, threshold: Tensor, what: str) -> Finding:
    ratio = torch.where(error == 0, 0.0, error / threshold)
    (row, part), found = largest_of(ratio, error, threshold)
    return Finding(*found, row, part, what)


def largest_of(
    ratio: Tensor, value: Tensor, other: Tensor
) -> tuple[tuple[int, int], tuple[float, float, float]]:
    """Row and column of the largest `ratio` [rows, columns], and what it and the others, which have
    the same shape, are there. The host waits for the device once."""
    place = ratio.argmax()[None]
    here = [each.flatten()[place].double() for each in (ratio, value, other)]
    index, *found = torch.cat([place.double(), *here]).tolist()
    return divmod(int(index), ratio.shape[1]), (found[0], found[1], found[2])


def _ratio(error: float, threshold: float) -> float:
    if threshold:
        return error / threshold
    return float("inf") if error else 0.0
