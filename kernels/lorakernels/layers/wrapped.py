"""Adapters for a linear layer that exists: sharded, quantised, or of another library.

Invariant: the base layer is called and nothing else is done with it. Its weights are neither read
nor copied, so they may be of any format and may change at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.dense.check import check_like
from lorakernels.dense.ops import DenseWorkspace, dense_delta
from lorakernels.dense.rank_shards import RankShardedSlots
from lorakernels.dense.weights import SlotWeights
from lorakernels.layers.linear import LinearAdapters
from lorakernels.layers.packing import Packing
from lorakernels.layers.partition import LoRASharding, Parallel, Slice, cut_layer, cut_rank
from lorakernels.layers.sharding import check_part, check_sharding
from lorakernels.runtime.collectives import Collective


class WrappedLoRALinear(LinearAdapters):
    """y = base(x) + scale * (x @ A.T) @ B.T, with A, B and scale of each row's slot.

    base: [rows, local in_features] -> [rows, local out_features] in the dtype of the slots, in
        memory that is its caller's: the delta is added in place. That of a row-parallel layer
        returns this rank's part of the sum, before it is added up over the ranks. If it is a
        module, it becomes a child of this one.
    slots: sized for this rank's part, by SlotWeights or around tensors of a server. With those of
        `sharded_slots` adapters are sharded by rank, over the ranks of `collective`.
    slices, in_features, fused: those of the whole layer, as adapters have them.
    Raises ValueError.
    """

    def __init__(
        self,
        base: Callable[[Tensor], Tensor],
        slots: SlotWeights,
        *,
        slices: Sequence[Slice],
        in_features: int,
        fused: Mapping[str, Sequence[str]] | None = None,
        parallel: Parallel = Parallel.REPLICATED,
        tp_size: int = 1,
        tp_rank: int = 0,
        padded_in_features: int | None = None,
        collective: Collective | None = None,
    ) -> None:
        super().__init__()
        groups = {name: tuple(members) for name, members in (fused or {}).items()}
        self.packing = Packing(tuple(slices), in_features, groups)
        self.cut = cut_layer(
            self.packing.slices,
            in_features,
            parallel=parallel,
            tp_size=tp_size,
            tp_rank=tp_rank,
            padded_in_features=padded_in_features,
        )
        is_sharded = isinstance(slots, RankShardedSlots)
        sharding = LoRASharding.RANK if is_sharded else LoRASharding.BASE
        check_sharding(sharding, collective, tp_size=tp_size, tp_rank=tp_rank)
        self.adapter_cut = self.cut
        self.join(collective)
        if isinstance(slots, RankShardedSlots):
            part = cut_rank(
                self.packing.slices,
                self.cut,
                slots.rank,
                parallel=parallel,
                tp_size=tp_size,
                tp_rank=tp_rank,
            )
            check_part(slots, part)
            self.adapter_cut = replace(self.cut, columns=part.columns)
        widths = tuple(shard.size for shard in self.adapter_cut.columns)
        if (slots.slice_widths, slots.in_features) != (widths, self.cut.inputs.size):
            raise ValueError(
                f"slots must have slices of {list(widths)} and {self.cut.inputs.size} input "
                f"features, as this rank holds them (got {list(slots.slice_widths)} and "
                f"{slots.in_features})"
            )
        self.base, self.slots = base, slots

    @torch.no_grad()
    def forward(self, x: Tensor, metadata: BatchMetadata, workspace: DenseWorkspace) -> Tensor:
        """x [.., local in_features] -> [.., local out_features], with as many rows as `metadata`
        was prepared for. `workspace` is made for `slots`, and may be shared by layers that run one
        after the other. The result has no gradient. Raises ValueError.
        """
        if x.shape[-1] != self.cut.inputs.size:
            raise ValueError(f"x must have {self.cut.inputs.size} columns (got {x.shape[-1]})")
        # before the base layer, which would raise what it raises
        check_like("x", x, self.slots.a)
        rows = x.reshape(-1, x.shape[-1])
        out = self.base(rows)
        if not isinstance(out, Tensor):
            # linear layers of servers return their bias beside the output
            raise ValueError(f"base must return a tensor (got a {type(out).__name__})")
        if self.collective is not None:
            self._check_output(out)
            self.add_sharded(rows, metadata, workspace, out)
        else:
            dense_delta(rows, self.slots, metadata, workspace, out)
        return out.view(*x.shape[:-1], out.shape[1])

    def _check_output(self, out: Tensor) -> None:
        """The base returns this rank's columns and no others: of more of them, as where it gathers
        those of all ranks, the delta would be added to the first ones. ValueError."""
        columns = sum(shard.size for shard in self.cut.columns)
        if out.dim() != 2 or out.shape[1] != columns:
            raise ValueError(f"out must be [rows, {columns}] (got {list(out.shape)})")
