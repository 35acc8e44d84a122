"""The project's own linear layers, which hold their base weight or are put around a linear that
exists. All tensor-parallel ranks run in this process, one after the other; what they exchange is
simulated."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from loragate.core.machine import Machine
from loragate.matrix.case import Base, Beside, Case, Cut, Parallel, Sharding, Streams
from loragate.protocol import BaseLayer, Pool
from loragate.subjects.lorakernels.dead_ranks import spoil_dead_ranks
from loragate.subjects.lorakernels.factors import factors
from loragate.subjects.lorakernels.mapping import Mapping, in_dims
from lorakernels.dense.forms import LinearForm
from lorakernels.dense.ops import DenseWorkspace
from lorakernels.dense.weights import SlotWeights
from lorakernels.layers import partition
from lorakernels.layers.linear import LoRALinear
from lorakernels.layers.sharding import sharded_slots
from lorakernels.layers.wrapped import WrappedLoRALinear
from lorakernels.runtime.collectives import Collective, SimulatedRanks

# by what runs beside the base product
FORMS = {Beside.SHRINK: LinearForm.DUAL, Beside.DELTA: LinearForm.STORED}


class LinearLayer(Mapping):
    def __init__(self, case: Case, machine: Machine, base: BaseLayer) -> None:
        super().__init__(case, machine)
        self.case = case
        # a layer around a linear that exists has one form
        self.options = {"form": FORMS[case.beside]} if case.streams is Streams.DUAL else {}
        build = _wrapped if case.base is Base.CALLABLE else _owning
        self.group = SimulatedRanks(case.tp)
        self.ranks = [build(case, base, self.group.rank(rank)) for rank in range(case.tp)]
        self.workspace = DenseWorkspace([r.slots for r in self.ranks], max_tokens=case.max_tokens)

    def load(self, slot: int, pool: Pool) -> None:
        for layer in self.ranks:
            layer.load_adapter(slot, factors(pool, slot))
            # a layer with a part of the ranks computes as many as another one has live
            if layer.slots.a.shape[-2] == layer.slots.rank:
                spoil_dead_ranks(layer.slots, slot, pool)

    def unload(self, slot: int) -> None:
        for layer in self.ranks:
            layer.unload(slot)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        # each rank takes its own columns of the input, as the layer before it would provide them
        outputs = self.group.run([partial(self._run, layer, x) for layer in self.ranks])
        if self.case.parallel is Parallel.ROW:
            total: Tensor = functools.reduce(torch.add, outputs)
            return total
        return torch.cat([*self._gathered(outputs)], dim=1)

    def _run(self, layer: LoRALinear | WrappedLoRALinear, x: Tensor) -> Tensor:
        inputs = layer.cut.inputs
        local = x[:, inputs.start : inputs.stop]
        if inputs.live < inputs.size:
            local = functional.pad(local, (0, inputs.size - inputs.live))
        local = in_dims(local, self.case.input_dims)
        y: Tensor = layer(local, self.metadata, self.workspace, **self.options)
        return y.view(len(x), y.shape[-1])

    def _gathered(self, outputs: list[Tensor]) -> Iterator[Tensor]:
        """The columns of the whole layer, each from one of the ranks that hold it."""
        shards = zip(*(layer.cut.columns for layer in self.ranks), strict=True)
        start = 0
        for part, of_ranks in enumerate(shards):
            stop = 0
            for rank, shard in enumerate(of_ranks):
                holders = [other for other, same in enumerate(of_ranks) if same == shard]
                # of the ranks that hold the same head, another one in each slice
                if shard.live and rank == holders[part % len(holders)]:
                    assert shard.start == stop
                    yield outputs[rank][:, start : start + shard.live]
                    stop = shard.stop
            start += of_ranks[0].size


def _owning(case: Case, base: BaseLayer, group: Collective) -> LoRALinear:
    whole = {"num_slots": case.slots, "rank": case.rank, **_geometry(case, group.rank)}
    if case.sharding is Sharding.RANK:
        whole |= {"sharding": partition.LoRASharding.RANK, "collective": group}
    return LoRALinear(base.weight, base.bias, **whole)


def _wrapped(case: Case, base: BaseLayer, group: Collective) -> WrappedLoRALinear:
    """Around a linear with this rank's part of the weight."""
    geometry, weight = _geometry(case, group.rank), base.weight
    plain = LoRALinear(weight, base.bias, num_slots=1, rank=1, **geometry)
    linear = partial(functional.linear, weight=plain.weight, bias=plain.bias)
    whole = {"in_features": case.in_features, **geometry}
    if case.sharding is Sharding.RANK:
        slots = sharded_slots(
            num_slots=case.slots,
            rank=case.rank,
            dtype=weight.dtype,
            device=weight.device,
            **whole,
        )
        return WrappedLoRALinear(linear, slots, **whole, collective=group)
    own = SlotWeights(
        num_slots=case.slots,
        slice_widths=plain.slots.slice_widths,
        in_features=plain.slots.in_features,
        rank=case.rank,
        dtype=weight.dtype,
        device=weight.device,
    )
    return WrappedLoRALinear(linear, own, **whole)


def _geometry(case: Case, tp_rank: int) -> dict[str, Any]:
    is_cut_by_rows = case.parallel is Parallel.ROW and case.cut is Cut.PADDED
    return {
        "slices": [_slice(case, part) for part in range(len(case.slices))],
        "parallel": partition.Parallel(case.parallel),
        "tp_size": case.tp,
        "tp_rank": tp_rank,
        "padded_in_features": _padded(case, case.in_features) if is_cut_by_rows else None,
    }


def _slice(case: Case, part: int) -> partition.Slice:
    width = case.slices[part]
    is_padded = case.parallel is Parallel.COLUMN and case.cut is Cut.PADDED
    return partition.Slice(
        f"slice{part}",
        width,
        heads=case.heads if case.heads and part else None,
        padded_width=_padded(case, width) if is_padded else None,
    )


def _padded(case: Case, width: int) -> int:
    """The next multiple of the number of ranks."""
    return -(-width // case.tp) * case.tp
