"""The project's own vocabulary embedding. All tensor-parallel ranks run in this process, one after
the other, and their results are added up."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.matrix.case import Case, Cut
from loragate.protocol import BaseLayer, Pool
from loragate.subjects.lorakernels.dead_ranks import spoil_dead_ranks
from loragate.subjects.lorakernels.factors import factors
from loragate.subjects.lorakernels.mapping import Mapping, in_dims
from lorakernels.dense.ops import DenseWorkspace
from lorakernels.layers.embedding import LoRAEmbedding

_NAME = "embed_tokens"


class Embedding(Mapping):
    def __init__(self, case: Case, machine: Machine, base: BaseLayer) -> None:
        super().__init__(case, machine)
        self.case = case
        # the next multiple of the number of ranks
        padded = -(-case.in_features // case.tp) * case.tp if case.cut is Cut.PADDED else None
        self.ranks = [
            LoRAEmbedding(
                base.weight,
                num_slots=case.slots,
                rank=case.rank,
                name=_NAME,
                tp_size=case.tp,
                tp_rank=tp_rank,
                padded_vocabulary=padded,
            )
            for tp_rank in range(case.tp)
        ]
        self.workspace = DenseWorkspace([r.slots for r in self.ranks], max_tokens=case.max_tokens)

    def load(self, slot: int, pool: Pool) -> None:
        own = factors(pool, slot)
        for layer in self.ranks:
            layer.load_adapter(slot, {_NAME: own[0]} if own else {})
            spoil_dead_ranks(layer.slots, slot, pool)

    def unload(self, slot: int) -> None:
        for layer in self.ranks:
            layer.unload(slot)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        ids = in_dims(x, self.case.input_dims)[..., 0]
        outputs = [layer(ids, self.metadata, self.workspace) for layer in self.ranks]
        total: Tensor = functools.reduce(torch.add, outputs)
        return total.view(len(x), total.shape[-1])
