"""One step of a whole MoE layer, product by product, and what its roundings cost.

The roundings are those between the products, as variances in units of one rounding to the dtype of
the case; how they reach the output is computed to first order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loragate.inputs.base_experts import dequantised, in_halves, quantised, quantised_by
from loragate.inputs.expert_places import rank_of_pairs
from loragate.inputs.pairs import OutRows, pair_rows
from loragate.matrix.case import Activation, Case, RouterWeights
from loragate.oracles.numeric.activations import activated, of_gate, slopes
from loragate.oracles.numeric.deltas import deltas
from loragate.oracles.numeric.golden import squared
from loragate.oracles.numeric.grouped import GroupedRows
from loragate.protocol import BaseExperts, Batch, Pool

# distance of adjacent 8-bit numbers relative to one of them; mean of |x| for a normal x of rms 1
_STEP_FP8, _MEAN = 2.0**-3.5, 0.8
# how far a number may move, in multiples of its rms
_REACH = 4.0


@dataclass(frozen=True, slots=True)
class First:
    """Results of the first product for each pair; without a gate it is None."""

    gate: Tensor | None
    up: Tensor
    act: Tensor

    @property
    def gate_and_up(self) -> Tensor:
        """Side by side."""
        return self.up if self.gate is None else torch.cat((self.gate, self.up), 1)


class Layer:
    """One step in `dtype`. Pairs without an expert are left out."""

    def __init__(
        self,
        case: Case,
        base: BaseExperts,
        batch: Batch,
        dtype: torch.dtype,
        *,
        rounds_all: bool = False,
    ) -> None:
        self.case, self.batch, self.dtype, self.rounds_all = case, batch, dtype, rounds_all
        rows = pair_rows(batch)
        rows = rows[(rows.experts >= 0).nonzero().flatten()]
        assert rows.weights is not None
        self.weights = rows.weights.to(dtype)[:, None]
        # of all pairs of the token with the same expert
        alike = rows.x_rows * case.experts + rows.experts
        total = self.weights.new_zeros(batch.x.shape[0] * case.experts, 1)
        self.weights_alike = total.index_add_(0, alike, self.weights)[alike]
        # deltas are not multiplied by the weights one by one
        self.rows = replace(rows, weights=None)
        index = torch.arange(len(rows.x_rows), device=rows.x_rows.device)
        self.act_rows = replace(self.rows, x_rows=index)
        self.grouped = GroupedRows(rows.experts, case.experts)
        self.is_quantised = base.scales is not None
        self.w13, self.w2 = base.weight, base.down
        if base.scales is not None:
            self.w13 = dequantised(self.w13, base.scales[0])
            self.w2 = dequantised(self.w2, base.scales[1])
        self.w13 = in_halves(case, self.w13)
        # of each pair
        self.bias = self.down_bias = self.weights.new_zeros(1, 1)
        if base.bias is not None and base.down_bias is not None:
            self.bias = in_halves(case, base.bias)[rows.experts].to(dtype)
            self.down_bias = base.down_bias[rows.experts].to(dtype)

    def first(self, pool: Pool | None) -> First:
        x = self._as_base_sees_it(self.batch.x).to(self.dtype)
        values = self.grouped.times(x[self.rows.x_rows], self.w13) + self.bias
        if pool is not None:
            values = values + deltas(pool, self.batch.x, self.rows, self.dtype)
        if self.case.router is RouterWeights.INPUT:
            values = values * self.weights
        gated = len(self.case.slices) == 2
        gate, up = values.chunk(2, dim=1) if gated else (None, values)
        return First(gate, up, activated(self.case.activation, gate, up))

    def second(self, down: Pool | None, act: Tensor, columns: slice | None = None) -> Tensor:
        """[pairs, hidden]: the second product over some columns of act. The rank that has the first
        ones adds the bias."""
        columns = columns or slice(None)
        part = act[:, columns]
        y = self.grouped.times(self._as_base_sees_it(part), self.w2[..., columns])
        if not columns.start:
            y = y + self.down_bias
        if down is None:
            return y
        return y + deltas(replace(down, a=down.a[..., columns]), part, self.act_rows, self.dtype)

    def weighted(self, y: Tensor) -> Tensor:
        return y * self.weights if self.case.router is RouterWeights.OUTPUT else y

    def added(self, y: Tensor) -> Tensor:
        """[tokens, hidden]: the sum over the choices."""
        out = torch.zeros_like(self.batch.out, dtype=self.dtype)
        return out.index_add_(0, self.rows.x_rows, y)

    def held_by_ranks(self) -> Iterator[Tensor]:
        """[pairs, 1] for each rank of expert parallelism: which pairs it has. Of replicas a subject
        may choose others: that changes the order of a sum."""
        ranks = rank_of_pairs(self.case, self.rows.experts, self.rows.x_rows)[:, None]
        for rank in range(self.case.ep):
            yield ranks == rank

    def weighted_sum(self, y: Tensor, *, squares: bool = False) -> Tensor:
        """The weighted sum over choices of outputs, or with `squares` of variances."""
        if squares and self.case.router is RouterWeights.OUTPUT:
            # an expert that a token chose twice makes the same error twice
            y = y * self.weights_alike
        return self.added(self.weighted(y))

    def moved(self, pool: Pool, first: First, alone: First) -> Tensor:
        """Variance of act before it is rounded, to first order. alone: without deltas."""
        variance = self.shrunk_rounded(pool, self.batch.x, self.rows)
        if self.batch.x.dtype == torch.float32:
            variance += self._accumulation(variance)
        elif self.is_quantised:
            # nothing else moves a row without an adapter; tensor cores drop a bit more of a sum
            fp32 = torch.finfo(torch.float32).eps / torch.finfo(self.batch.x.dtype).eps
            variance += self._accumulation(variance) * (2 * fp32) ** 2
        if self.case.router is RouterWeights.INPUT:
            variance *= self.weights.square()
        if not self.rounds_all:
            return _act_noise(self.case.activation, first, variance)
        whole, of_base = first.gate_and_up, alone.gate_and_up
        variance += sum(map(self.rounded, (of_base, whole - of_base, whole)))
        moved = _act_noise(self.case.activation, first, variance)
        value = of_gate(self.case.activation, first.up if first.gate is None else first.gate)
        # a small value, which is rounded most, may be multiplied by a large up
        share = torch.where(value == 0, 0.0, self.rounded(value) / value.square())
        return moved + share * first.act.square()

    def noise(self, pool: Pool, first: First, moved: Tensor) -> Tensor:
        """Variance of the outputs of pairs before they are rounded, to first order."""
        assert pool.down is not None
        act = moved + self.rounded(first.act)
        through_base = act
        if self.is_quantised:
            # a value that moves a little may be rounded, and then quantised, to the next number
            flips = _MEAN * (moved * self.unit).sqrt() * first.act.abs() * _STEP_FP8
            through_base = act + flips / self.unit
        total = self.grouped.times(through_base, self.w2, squares=True)
        total += deltas(squared(pool.down), act, self.act_rows, self.dtype)
        return total + self.shrunk_rounded(pool.down, first.act, self.act_rows)

    def shrunk_rounded(self, pool: Pool, x: Tensor, rows: OutRows) -> Tensor:
        """Variance of the deltas for shrink outputs that are rounded."""
        variance = deltas(pool, x, rows, self.dtype, squares=True, smallest=self.smallest)
        # roundings of B cost as much
        return variance * 2 if self.rounds_all else variance

    def outputs_rounded(self, first: First, y: Tensor, columns: slice) -> Tensor:
        """Variance of rounding `y`, the outputs of pairs over some columns of act."""
        variance = self.rounded(y)
        if not self.rounds_all:
            return variance
        of_base = self.second(None, first.act, columns)
        return variance + self.rounded(of_base) + self.rounded(y - of_base)

    def rounded(self, values: Tensor) -> Tensor:
        """Variance of rounding each of `values`; that of the smallest numbers does not follow their
        size."""
        return torch.where(values == 0, 0.0, values.square().clamp(min=self.smallest**2))

    def largest_flip(self, first: First, moved: Tensor, columns: slice) -> Tensor:
        """Squared errors of the outputs of pairs from the largest flip of act: a value so close to
        the middle between two 8-bit numbers that noise decides between them. In fp16 a row has few
        flips, and their cost is far from its average."""
        reach = _REACH * (moved[:, columns] * self.unit).sqrt()
        size, low = first.act[:, columns].abs(), self.batch.x.dtype
        up, down = ((size + move).to(low).to(self.dtype) for move in (reach, -reach))
        # the largest value of a row determines its scale, and moves as well
        size = quantised_by(quantised(down)[1], up) - quantised_by(quantised(up)[1], down)
        largest = torch.where(size == size.amax(1, keepdim=True), size, 0.0)
        return self.grouped.times(largest.square(), self.w2[..., columns], squares=True)

    @property
    def smallest(self) -> float:
        """Normal number of the dtype of the case."""
        return torch.finfo(self.batch.x.dtype).smallest_normal

    @property
    def unit(self) -> float:
        """Relative variance of one rounding to the dtype of the case."""
        return (torch.finfo(self.batch.x.dtype).eps / 2) ** 2 / 3

    def _accumulation(self, variance: Tensor) -> Tensor:
        """Variance of gate and up from sums in fp32. A small gate may be a sum of large terms, and
        where act has few columns nothing averages its error; in 16 bits none of that shows."""
        x = self._as_base_sees_it(self.batch.x).to(self.dtype).square()
        terms = self.grouped.times(x[self.rows.x_rows], self.w13, squares=True) + variance
        # a partial sum grows evenly up to the whole, to which a bias is added in one step
        return terms * self.case.in_features / 2 + self.bias.square()

    def _as_base_sees_it(self, values: Tensor) -> Tensor:
        if not self.is_quantised:
            return values
        # a value is rounded to the dtype before it is quantised: otherwise golden, eager and the
        # subject would quantise slightly different numbers, some of them to different neighbours
        low = values.to(self.batch.x.dtype)
        return dequantised(*quantised(low)).to(self.dtype)


def _act_noise(activation: Activation, first: First, variance: Tensor) -> Tensor:
    """Variance of act, given that of gate and up."""
    by_gate, by_up = slopes(activation, first.gate, first.up)
    if by_gate is None:
        return variance * by_up.square()
    of_gate, of_up = variance.chunk(2, dim=1)
    return of_gate * by_gate.square() + of_up * by_up.square()
