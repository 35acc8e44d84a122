"""Judge error statistics: which row or population is worst against its threshold.

Pure functions on tensors; the rule itself is in reference.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import hypot

import torch
from torch import Tensor

from loragate.matrix.case import Case
from loragate.oracles.errors import TAIL, RowErrors
from loragate.subjects.protocol import Pool

FACTOR = 2.0


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """An error next to what is allowed, in units of the output. `row` is the one to look at."""

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


def populations(
    case: Case, pool: Pool, token_slots: Tensor, errors: RowErrors
) -> Iterator[Population]:
    """One for each slot with tokens (-1 for base rows) and each slice."""
    for slot in sorted(set(token_slots.tolist())):
        rows = (token_slots == slot).nonzero().flatten().to(errors.gain.device)
        for part, width in enumerate(case.slices):
            rank = pool.ranks[slot][part] if slot >= 0 else 1

            mean = partial(_mean, rows, part, width)
            eager, delta_sq = mean(errors.eager_sq) ** 0.5, mean(errors.delta_sq)
            # few roundings can all be lucky: never less than what they cost on average, a
            # third of the square of half a step, for two roundings and for one
            bound_sq = mean(errors.bound_sq)
            # errors of the bridge are common to all columns: only rows x ranks are independent
            independent = torch.tensor(len(rows) * min(width, max(rank, 1)))
            bridge = float(_unlucky(independent)) * mean(errors.bridge_sq) ** 0.5
            allowed = FACTOR * hypot(max(eager, (bound_sq / 6) ** 0.5), bridge)
            allowed += max(mean(errors.floor_sq), bound_sq / 12) ** 0.5
            margin = 1 + 2 * float(independent) ** -0.5
            yield Population(
                slot,
                part,
                rows,
                delta_sq**0.5,
                mean(errors.subject_sq) ** 0.5,
                eager,
                margin * allowed,
                mean(errors.gain) / delta_sq if delta_sq else 0.0,
            )


def _unlucky(independent: Tensor) -> Tensor:
    """How far above its mean the rms of that many roundings may be, FACTOR left aside."""
    return 1 + independent.double() ** -0.5


def _mean(rows: Tensor, part: int, width: int, sums: Tensor) -> float:
    """Mean over all elements of a population; `sums` are over the columns already."""
    return (sums[rows, part].sum() / (len(rows) * width)).item()


def population_finding(population: Population, errors: RowErrors) -> Finding:
    worst = int(errors.subject_sq[population.rows, population.part].argmax())
    return Finding(
        _ratio(population.subject, population.threshold),
        population.subject,
        population.threshold,
        int(population.rows[worst]),
        population.part,
        "the rms of all rows' errors",
    )


def row_findings(case: Case, errors: RowErrors) -> Iterator[Finding]:
    """The worst (row, slice) by rms and by largest element."""
    widths = torch.tensor(case.slices, device=errors.gain.device)
    subject, eager = (errors.subject_sq / widths).sqrt(), (errors.eager_sq / widths).sqrt()
    bound = (errors.bound_sq / widths).sqrt()
    # the bridge is rounded once for each rank, for all columns alike
    bridge = _unlucky(widths.clamp(max=case.rank)) * (errors.bridge_sq / widths).sqrt()
    # eager may be lucky in a row of few columns: see populations()
    allowed = FACTOR * eager.maximum(bound / 6**0.5).hypot(bridge) + bound
    yield _worst(subject, allowed, "the rms of a row's errors")
    eager = errors.eager_max.maximum(errors.bound_max / 2)
    allowed = FACTOR * eager.hypot(TAIL / FACTOR * errors.bridge_max) + errors.bound_max
    yield _worst(errors.subject_max, allowed, "the largest error of a row")


def _worst(error: Tensor, threshold: Tensor, what: str) -> Finding:
    ratio = torch.where(error == 0, 0.0, error / threshold)
    row, part = divmod(int(ratio.argmax()), error.shape[1])
    values = (ratio[row, part].item(), error[row, part].item(), threshold[row, part].item())
    return Finding(*values, row, part, what)


def _ratio(error: float, threshold: float) -> float:
    if threshold:
        return error / threshold
    return float("inf") if error else 0.0
