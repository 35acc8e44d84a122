"""The project's own kernels and layers.

lora_linear and gdn_in_proj run all tensor-parallel ranks of a layer in this process, one after the
other: parts of the output are concatenated slice by slice, partial outputs of a row-parallel layer
added up.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib import metadata
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from loragate.core.machine import Machine
from loragate.inputs.draw import torch_dtype
from loragate.matrix.case import (
    Bias,
    Case,
    Cut,
    Dtype,
    Execution,
    Ids,
    Parallel,
    Path,
    Products,
    Quantisation,
    Site,
    Streams,
)
from loragate.matrix.engine_case import Active, Graphs, Model, Speculation, Targets
from loragate.protocol import (
    AnyInstance,
    BaseExperts,
    BaseLayer,
    Capabilities,
    Guard,
    HotPath,
    Others,
    Pool,
    Rounding,
)
from loragate.subjects.lorakernels.dead_ranks import keep_dead_nan
from loragate.subjects.lorakernels.factors import factors
from loragate.subjects.lorakernels.gdn import DeltaNetInput
from loragate.subjects.lorakernels.mapping import Mapping, in_dims
from loragate.subjects.lorakernels.moe_delta import MoEDelta
from loragate.subjects.lorakernels.moe_layer import MoELayer
from lorakernels.common.stacked_weights import MAX_RANK
from lorakernels.dense.forms import LinearForm
from lorakernels.dense.ops import DenseWorkspace, dense_delta
from lorakernels.dense.weights import SlotWeights
from lorakernels.layers import partition
from lorakernels.layers.linear import LoRALinear
from lorakernels.moe.delta.plan import MAX_FUSED_RANK
from lorakernels.moe.weights import ExpertWeights
from lorakernels.runtime import streams


class LoraKernelsSubject:
    name = "lorakernels"

    def version(self) -> str:
        try:
            # both packages come in one distribution
            return metadata.version("loragate")
        except metadata.PackageNotFoundError:
            return "source tree"

    def capabilities(self, machine: Machine) -> Capabilities | str:
        return Capabilities(
            sites=frozenset(Site),
            supports={
                "dtype": frozenset(Dtype),
                "execution": frozenset(Execution),
                "rank": range(1, MAX_RANK + 1),
                "parallel": frozenset(Parallel),
                "path": frozenset(Path),
                "quantisation": frozenset(Quantisation),
                "ids": frozenset(Ids),
                "bias": frozenset(Bias),
                "cut": frozenset(Cut),
                "heads": range(1 << 16),
                "input_dims": range(2, 4),
                "spare_rows": range(1 << 31),
                "streams": frozenset(Streams),
                "products": frozenset(Products),
                "model": frozenset({Model.DENSE, Model.MOE}),
                "speculation": frozenset(
                    {Speculation.NONE, Speculation.NGRAM, Speculation.DRAFT_MODEL}
                ),
                # there are none without a GPU
                "graphs": frozenset({Graphs.NONE})
                if machine.interpreted
                else frozenset({Graphs.NONE, Graphs.FULL_DECODE}),
                "active": frozenset(Active),
                "targets": frozenset(Targets),
            },
            # in the interpreter the order in which numpy sums a row depends on the row's place
            place_invariant=not machine.interpreted,
            skips_dead_ranks=True,
            rank_per_slice=True,
            roundings=_roundings,
            # a row with another slot sits elsewhere in its tile, see place_invariant; sizes of
            # tiles and splits of K follow from the batch size, so another size is not promised
            batch_invariant=frozenset({Others.VALUES})
            if machine.interpreted
            else frozenset(Others),
            work_follows_tiles=True,
            slot_memory=slot_memory,
            guards=frozenset(Guard),
            hot_path=frozenset(HotPath),
            allocates=_allocates,
            traceable=True,
            streams_from=_streams_from,
            refuses=_refuses,
        )

    def engine_target(self, case: Case) -> str:
        return "loragate.subjects.lorakernels.engine:ServingEngine"

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> AnyInstance:
        if isinstance(base, BaseExperts):
            return MoELayer(case, machine, base)
        if case.site is Site.MOE_DELTA:
            return MoEDelta(case, machine)
        if base is None:
            return _DenseDelta(case, machine)
        if case.site is Site.GDN_IN_PROJ:
            return DeltaNetInput(case, machine, base)
        return _LoRALinear(case, machine, base)


def _refuses(case: Case) -> str | None:
    if case.site is not Site.ENGINE:
        return None
    if find_spec("transformers") is None:
        return "transformers is not installed, on whose models the decoder is built"
    if case.streams is Streams.DUAL:
        return "the decoder runs its layers on one stream"
    return None


def _streams_from(module: Any) -> AbstractContextManager[object]:
    return patch.object(streams, "stream_module", lambda device: module)


def _roundings(case: Case) -> frozenset[Rounding]:
    # base and delta are added in fp32 on every path
    if case.path is Path.SMALL_BATCH and case.rank <= MAX_FUSED_RANK:
        return frozenset()
    return frozenset({Rounding.SHRUNK})


def _allocates(case: Case) -> int | None:
    """A layer of one rank allocates its output, which is put together here slice by slice; that of
    a delta net has two parts as well. What beside streams, several ranks and the rounding of a
    quantised layer's input need is not promised."""
    if case.tp > 1 or case.ep > 1 or case.quantisation is not Quantisation.NONE:
        return None
    output = case.out_rows * case.out_features * torch_dtype(case.dtype).itemsize
    if case.site is Site.GDN_IN_PROJ:
        return 2 * output
    if case.site is Site.LORA_LINEAR:
        return 0 if case.parallel is Parallel.ROW else output
    return None if case.site is Site.MOE_LAYER and case.streams is Streams.DUAL else 0


def slot_memory(instance: AnyInstance, slot: int) -> list[Tensor]:
    """A, B and scales of a slot, of every simulated rank."""
    if isinstance(instance, MoELayer):
        stacks = [stack for rank in instance.ranks for stack in (rank.w13_slots, rank.w2_slots)]
        return [part for stack in stacks for part in _memory(stack, slot)]
    if isinstance(instance, (_LoRALinear, DeltaNetInput)):
        return [part for rank in instance.ranks for part in _memory(rank.slots, slot)]
    assert isinstance(instance, (_DenseDelta, MoEDelta))
    return _memory(instance.weights, slot)


def _memory(weights: SlotWeights | ExpertWeights, slot: int) -> list[Tensor]:
    return [weights.a[slot], weights.b[slot], weights.scales[slot]]


class _DenseDelta(Mapping):
    def __init__(self, case: Case, machine: Machine) -> None:
        super().__init__(case, machine)
        self.weights = SlotWeights(
            num_slots=case.slots,
            slice_widths=case.slices,
            in_features=case.in_features,
            rank=case.rank,
            dtype=torch_dtype(case.dtype),
            device=machine.device,
        )
        self.workspace = DenseWorkspace([self.weights], max_tokens=case.max_tokens)

    def load(self, slot: int, pool: Pool) -> None:
        parts = factors(pool, slot)
        self.weights.load(slot, [parts.get(part) for part in range(len(pool.b))])
        keep_dead_nan(self.weights, slot, pool)

    def unload(self, slot: int) -> None:
        self.weights.reset(slot)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        dense_delta(x, self.weights, self.metadata, self.workspace, out)
        return out


class _LoRALinear(Mapping):
    def __init__(self, case: Case, machine: Machine, base: BaseLayer) -> None:
        super().__init__(case, machine)
        self.case = case
        self.form = LinearForm.DUAL if case.streams is Streams.DUAL else None
        is_cut_by_rows = case.parallel is Parallel.ROW and case.cut is Cut.PADDED
        self.ranks = [
            LoRALinear(
                base.weight,
                base.bias,
                slices=[_slice(case, part) for part in range(len(case.slices))],
                num_slots=case.slots,
                rank=case.rank,
                parallel=partition.Parallel(case.parallel),
                tp_size=case.tp,
                tp_rank=tp_rank,
                padded_in_features=_padded(case, case.in_features) if is_cut_by_rows else None,
            )
            for tp_rank in range(case.tp)
        ]
        self.workspace = DenseWorkspace([r.slots for r in self.ranks], max_tokens=case.max_tokens)

    def load(self, slot: int, pool: Pool) -> None:
        for layer in self.ranks:
            layer.load_adapter(slot, factors(pool, slot))
            keep_dead_nan(layer.slots, slot, pool)

    def unload(self, slot: int) -> None:
        for layer in self.ranks:
            layer.unload(slot)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        # each rank takes its own columns of the input, as the layer before it would provide them
        outputs = []
        for layer in self.ranks:
            inputs = layer.cut.inputs
            local = x[:, inputs.start : inputs.stop]
            if inputs.live < inputs.size:
                local = functional.pad(local, (0, inputs.size - inputs.live))
            local = in_dims(local, self.case.input_dims)
            y = layer(local, self.metadata, self.workspace, form=self.form)
            outputs.append(y.view(len(x), y.shape[-1]))
        if self.case.parallel is Parallel.ROW:
            total: Tensor = functools.reduce(torch.add, outputs)
            return total
        return torch.cat([*self._gathered(outputs)], dim=1)

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
