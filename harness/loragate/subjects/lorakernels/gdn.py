"""The project's own input projections of a gated delta net. All tensor-parallel ranks run in this
process, one after the other; the columns of the whole layer are put together by the heads of the
case, and not by what the layers say of themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain

import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.matrix.case import Case, Products, Streams
from loragate.matrix.delta_net import columns_of, delta_net
from loragate.protocol import BaseLayer, Pool
from loragate.subjects.lorakernels.dead_ranks import spoil_dead_ranks
from loragate.subjects.lorakernels.factors import factors
from loragate.subjects.lorakernels.mapping import Mapping, in_dims
from lorakernels.dense.ops import DenseWorkspace
from lorakernels.gdn.forms import GDNForm
from lorakernels.layers.gdn import DeltaNetHeads, GatedDeltaNetInputProjection

FORMS = {
    (Products.PLAN, Streams.SEQUENTIAL): None,
    (Products.PLAN, Streams.DUAL): GDNForm.DUAL,
    (Products.TWO, Streams.SEQUENTIAL): GDNForm.SERIAL,
    (Products.TWO, Streams.DUAL): GDNForm.DUAL,
    (Products.ONE, Streams.SEQUENTIAL): GDNForm.MERGED,
    (Products.ONE, Streams.DUAL): GDNForm.BESIDE,
}


class DeltaNetInput(Mapping):
    def __init__(self, case: Case, machine: Machine, base: BaseLayer) -> None:
        super().__init__(case, machine)
        self.case, self.form = case, FORMS[case.products, case.streams]
        heads = DeltaNetHeads(**asdict(delta_net(case.slices, case.key_heads)))
        modules = heads.grouped() if len(case.slices) == 2 else heads.separate()
        self.names = [module.name for module in modules.all]
        of_qkvz = sum(module.width for module in modules.qkvz)
        self.ranks = [
            GatedDeltaNetInputProjection(
                base.weight[:of_qkvz],
                base.weight[of_qkvz:],
                modules=modules,
                num_slots=case.slots,
                rank=case.rank,
                tp_size=case.tp,
                tp_rank=tp_rank,
            )
            for tp_rank in range(case.tp)
        ]
        self.workspace = DenseWorkspace([r.slots for r in self.ranks], max_tokens=case.max_tokens)

    def load(self, slot: int, pool: Pool) -> None:
        parts = {self.names[part]: own for part, own in factors(pool, slot).items()}
        for layer in self.ranks:
            layer.load_adapter(slot, parts)
            spoil_dead_ranks(layer.slots, slot, pool)

    def unload(self, slot: int) -> None:
        for layer in self.ranks:
            layer.unload(slot)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        outputs = []
        for layer in self.ranks:
            inputs = in_dims(x, self.case.input_dims)
            qkvz, ba = layer(inputs, self.metadata, self.workspace, form=self.form)
            both = torch.cat([qkvz, ba], dim=-1)
            outputs.append(both.view(len(x), both.shape[-1]))
        return torch.cat([*self._gathered(outputs)], dim=1)

    def _gathered(self, outputs: list[Tensor]) -> Iterator[Tensor]:
        """The columns of the whole layer, each from one of the ranks that hold it."""
        tp, start = self.case.tp, 0
        kinds = chain(*columns_of(self.case.slices, self.case.key_heads))
        for number, kind in enumerate(kinds):
            parts = min(kind.heads, tp)
            copies, size = tp // parts, kind.width // parts
            for part in range(parts):
                # of the ranks that hold the same columns, another one for each kind
                holder = part * copies + number % copies
                yield outputs[holder][:, start : start + size]
            start += size
