"""The project's own kernels and layers.

lora_linear, gdn_in_proj and embedding run all tensor-parallel ranks of a layer in this process, one
after the other: parts of the output are concatenated slice by slice, partial outputs of a
row-parallel layer and of an embedding added up.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from importlib import metadata
from typing import Any
from unittest.mock import patch

from torch import Tensor

from loragate.core.machine import Machine
from loragate.inputs.draw import torch_dtype
from loragate.matrix.case import (
    Activation,
    Base,
    Beside,
    Bias,
    Buffers,
    Case,
    Cut,
    Dtype,
    Execution,
    GateUp,
    Ids,
    Layout,
    Loading,
    Parallel,
    Path,
    Placement,
    Plans,
    Products,
    Quantisation,
    Sharding,
    Site,
    Streams,
)
from loragate.matrix.engine_case import (
    Active,
    Ends,
    Graphs,
    Logprobs,
    Model,
    Requests,
    Speculation,
    Targets,
    Weights,
)
from loragate.protocol import (
    AnyInstance,
    BaseExperts,
    BaseLayer,
    Capabilities,
    Guard,
    HotPath,
    Others,
    Rounding,
)
from loragate.subjects.lorakernels.dense_delta import DenseDelta
from loragate.subjects.lorakernels.embedding import Embedding
from loragate.subjects.lorakernels.gdn import DeltaNetInput
from loragate.subjects.lorakernels.linear import LinearLayer
from loragate.subjects.lorakernels.moe_delta import MoEDelta
from loragate.subjects.lorakernels.moe_layer import MoELayer
from loragate.subjects.lorakernels.one_plan import OnePlanDense, OnePlanLayer, OnePlanMoE
from loragate.subjects.lorakernels.refusals import refusal
from lorakernels.common.stacked_weights import MAX_RANK
from lorakernels.dense.weights import SlotWeights
from lorakernels.moe.delta.plan import MAX_FUSED_RANK
from lorakernels.moe.weights import ExpertWeights
from lorakernels.runtime import prepared, streams

# the id within a rank, two comparisons, and whether one of them is true
_BYTES_OF_ID = 8 + 3


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
                "activation": frozenset(Activation),
                "gate_up": frozenset(GateUp),
                "placement": frozenset(Placement),
                "expert_bias": frozenset(Bias),
                "ids": frozenset(Ids),
                "bias": frozenset(Bias),
                "base": frozenset(Base),
                "buffers": frozenset(Buffers),
                "loading": frozenset(Loading),
                "cut": frozenset(Cut),
                "heads": range(1 << 16),
                "input_dims": range(2, 4),
                "spare_rows": range(1 << 31),
                "sharding": frozenset(Sharding),
                "streams": frozenset(Streams),
                "beside": frozenset(Beside),
                "products": frozenset(Products),
                "plans": frozenset(Plans),
                "model": frozenset(Model),
                "speculation": frozenset(
                    {Speculation.NONE, Speculation.NGRAM, Speculation.DRAFT_MODEL}
                ),
                # there are none without a GPU
                "graphs": frozenset({Graphs.NONE})
                if machine.interpreted
                else frozenset({Graphs.NONE, Graphs.FULL_DECODE}),
                "active": frozenset(Active),
                "targets": frozenset(Targets),
                "logprobs": frozenset(Logprobs),
                "requests": frozenset(Requests),
                "ends": frozenset(Ends),
                "weights": frozenset(Weights),
            },
            # in the interpreter the order in which numpy sums a row depends on the row's place
            place_invariant=not machine.interpreted,
            skips_dead_ranks=True,
            rank_per_slice=True,
            roundings=_roundings,
            # a row with another slot sits elsewhere in its tile, see place_invariant
            batch_invariant=frozenset({Others.VALUES, Others.COUNT})
            if machine.interpreted
            else frozenset(Others),
            work_follows_tiles=True,
            slot_memory=slot_memory,
            guards=frozenset(Guard),
            hot_path=frozenset(HotPath),
            allocates=_allocates,
            traceable=_is_traceable,
            streams_from=_streams_from,
            # launches, by which a step leaves out the plans and checks of an earlier one
            forgets=prepared._PREPARED.clear,
            refuses=partial(refusal, machine.device),
        )

    def engine_target(self, case: Case) -> str:
        return "loragate.subjects.lorakernels.engine:ServingEngine"

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> AnyInstance:
        has_one = case.plans is Plans.ONE
        if isinstance(base, BaseExperts):
            return (OnePlanLayer if has_one else MoELayer)(case, machine, base)
        if case.site is Site.MOE_DELTA:
            return (OnePlanMoE if has_one else MoEDelta)(case, machine)
        if base is None:
            return (OnePlanDense if has_one else DenseDelta)(case, machine)
        if case.site is Site.EMBEDDING:
            return Embedding(case, machine, base)
        if case.site is Site.GDN_IN_PROJ:
            return DeltaNetInput(case, machine, base)
        return LinearLayer(case, machine, base)


def _streams_from(module: Any) -> AbstractContextManager[object]:
    return patch.object(streams, "stream_module", lambda device: module)


def _is_traceable(case: Case) -> bool:
    """Not where ranks are simulated that exchange their parts, nor with one plan for all batches:
    that option of the process is on within calls alone, and no trace sets it."""
    return case.sharding is not Sharding.RANK and case.plans is not Plans.ONE


def _roundings(case: Case) -> frozenset[Rounding]:
    # base and delta are added in fp32 on every path
    if case.path is Path.SMALL_BATCH and case.rank <= MAX_FUSED_RANK:
        return frozenset()
    return frozenset({Rounding.SHRUNK})


def _allocates(case: Case) -> int | None:
    """A layer of one rank allocates its output, which is put together here slice by slice; that of
    a delta net has two parts as well, and an embedding works out which ids it holds.
    What beside streams, several ranks and the rounding of a quantised layer's input need is not
    promised."""
    if case.tp > 1 or case.ep > 1 or case.quantisation is not Quantisation.NONE:
        return None
    if case.placement is Placement.REPLICATED:
        # the ids of a step
        return None
    output = case.out_rows * case.out_features * torch_dtype(case.dtype).itemsize
    if case.site is Site.GDN_IN_PROJ:
        return 2 * output
    if case.site is Site.LORA_LINEAR:
        return 0 if case.parallel is Parallel.ROW else output
    if case.site is Site.EMBEDDING:
        return case.tokens * _BYTES_OF_ID
    if case.site is Site.MOE_LAYER and case.streams is Streams.DUAL:
        return None
    # a MoE layer copies an input that is not contiguous
    apart = case.site is Site.MOE_LAYER and case.layout is Layout.COLUMN_SLICE
    return case.tokens * case.in_features * torch_dtype(case.dtype).itemsize if apart else 0


def slot_memory(instance: AnyInstance, slot: int) -> list[Tensor]:
    """A, B and scales of a slot, of every simulated rank."""
    if isinstance(instance, MoELayer):
        stacks = [stack for rank in instance.ranks for stack in (rank.w13_slots, rank.w2_slots)]
        return [part for stack in stacks for part in _memory(stack, slot)]
    if isinstance(instance, (LinearLayer, DeltaNetInput, Embedding)):
        return [part for rank in instance.ranks for part in _memory(rank.slots, slot)]
    assert isinstance(instance, (DenseDelta, MoEDelta))
    return _memory(instance.weights, slot)


def _memory(weights: SlotWeights | ExpertWeights, slot: int) -> list[Tensor]:
    return [weights.a[slot], weights.b[slot], weights.scales[slot]]
