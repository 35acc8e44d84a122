"""The input projections of a gated delta net in plain torch: one product after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from loragate.matrix.case import Case
from loragate.matrix.delta_net import columns_of
from loragate.protocol import BaseLayer, Instance, Pool


@dataclass(frozen=True, slots=True)
class Rank:
    """What one tensor-parallel rank owns: of each slice its columns, by their numbers within the
    slice, and within the whole layer."""

    of_slices: tuple[Tensor, ...]
    columns: Tensor
    weight: Tensor
    delta: Instance


class DeltaNetInput:
    """The base layer and its adapters, cut over `case.tp` simulated ranks. `deltas`: for each of
    them an instance of dense_delta."""

    def __init__(self, case: Case, base: BaseLayer, deltas: Sequence[Instance]) -> None:
        self.case = case
        self.ranks = [_rank(case, base, rank, delta) for rank, delta in enumerate(deltas)]

    def load(self, slot: int, pool: Pool) -> None:
        for rank in self.ranks:
            b = tuple(part[:, own] for part, own in zip(pool.b, rank.of_slices, strict=True))
            rank.delta.load(slot, Pool(pool.a, b, pool.ranks, pool.scales))

    def unload(self, slot: int) -> None:
        for rank in self.ranks:
            rank.delta.unload(slot)

    def prepare(self, token_slots: Tensor) -> None:
        for rank in self.ranks:
            rank.delta.prepare(token_slots)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        result = x.new_empty(x.shape[0], self.case.out_features)
        for rank in self.ranks:
            # columns that several ranks hold are the same on all of them
            result[:, rank.columns] = rank.delta.apply(x, functional.linear(x, rank.weight))
        return result


def _rank(case: Case, base: BaseLayer, rank: int, delta: Instance) -> Rank:
    of_slices, whole, first = [], [], 0
    for width, kinds in zip(case.slices, columns_of(case.slices, case.key_heads), strict=True):
        own, start = [], 0
        for kind in kinds:
            low, high = kind.local(case.tp, rank)
            own.append(torch.arange(start + low, start + high, device=base.weight.device))
            start += kind.width
        of_slices.append(torch.cat(own))
        whole.append(first + of_slices[-1])
        first += width
    columns = torch.cat(whole)
    return Rank(tuple(of_slices), columns, base.weight[columns], delta)
