"""The delta of a linear layer whose adapters are sharded by rank: shrink, exchange of what it
leaves, expand into the columns of this rank.

The sum of the split-K partials is exchanged, in fp32. What is gathered is then what one rank would
have computed, and the sum of a row-parallel layer is rounded once, in the expand, as without
sharding; rounded before, it would be so on each rank. A row has so few ranks that an exchange costs
latency, and hardly bandwidth.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.batch.steps import runs_adapters
from lorakernels.common.stacked_weights import SlotTensors
from lorakernels.dense.check import check_devices, check_operands, check_rows, check_step
from lorakernels.dense.launch import TileTables, launch_expand, launch_shrink
from lorakernels.dense.ops import DenseWorkspace, branch_buffer, shape_of
from lorakernels.dense.rank_shards import RankShardedSlots, exchanged_copies
from lorakernels.dense.shape import DenseShape
from lorakernels.dense.sizes import plan_shrunk
from lorakernels.runtime.collectives import Collective, collective_of
from lorakernels.runtime.operators import register_operator
from lorakernels.runtime.options import DUAL_STREAM, dual_stream


def sharded_delta(
    x: Tensor,
    weights: RankShardedSlots,
    metadata: BatchMetadata,
    workspace: DenseWorkspace,
    out: Tensor,
    group: int,
) -> None:
    """out[row, columns] += scale * (x[row] @ A[slot].T) @ B[slot].T for each row with a slot, in
    place, with A of all ranks of the group and the columns that this rank has of B.

    x [rows, local in_features] and out [rows, columns of the base] of the weights' dtype, any
    strides. group: that of the ranks, by `number_of`. All of them have to prepare the same mapping,
    from the same device: a host that knows that a batch has base rows alone exchanges nothing.
    Raises ValueError.
    """
    check_step(x, weights, metadata)
    torch.ops.lorakernels.sharded_delta(
        x,
        weights.a,
        weights.b,
        weights.ranks,
        weights.scales,
        list(weights.slice_widths),
        metadata.tile_slots,
        metadata.tile_rows,
        metadata.num_tiles,
        workspace.buffers,
        out,
        weights.first_column,
        group,
    )


@register_operator("sharded_delta", mutates=("shrunk", "out"))
def _sharded_delta(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    slice_widths: list[int],
    tile_slots: Tensor,
    tile_rows: Tensor,
    num_tiles: Tensor,
    shrunk: list[Tensor],
    out: Tensor,
    first_column: int,
    group: int,
) -> None:
    check_rows(x, tile_rows)
    own = out.narrow(1, first_column, b.shape[1])
    check_operands(x, a, b, own)
    if x.shape[0] == 0 or not runs_adapters(tile_rows, x.device):
        return
    if dual_stream(x.device):
        warn_of_one_stream()
    collective = collective_of(group)
    shape = shape_of(x.shape[0], a, slice_widths)
    exchanging = _ExchangeBuffers.of(shrunk, shape, a.shape[0], parts=b.shape[2] // a.shape[2])
    check_devices(x, tile_rows, exchanging.shrunk)
    slots = SlotTensors(a, b, ranks, scales)
    tiles = TileTables(tile_slots, tile_rows, num_tiles)
    launch_shrink(x, slots, shape, tiles, exchanging.shrunk, pdl=False)
    exchanged = exchanging.exchange(collective, len(slice_widths))
    whole = replace(shape, rank=b.shape[2])
    # a shrink is not what comes before it
    launch_expand(exchanged, slots, whole, tiles, own, pdl=False)


@cache
def warn_of_one_stream() -> None:
    message = f"layers sharded by rank run on one stream, {DUAL_STREAM}=1 has no effect on them"
    warnings.warn(message, stacklevel=2)


@dataclass(frozen=True, slots=True)
class _ExchangeBuffers:
    """What is between shrink and expand, in the workspace of the layer. shrunk [splits, padded
    rows, slices * held ranks]; total, the same without splits; gathered [parts, padded rows,
    slices * held ranks]; and ordered [1, padded rows, slices * rank], the input of the expand."""

    shrunk: Tensor
    total: Tensor
    gathered: Tensor
    ordered: Tensor

    @classmethod
    def of(
        cls, buffers: list[Tensor], shape: DenseShape, num_slots: int, parts: int
    ) -> _ExchangeBuffers:
        """Raises ValueError where the workspace is too small."""
        splits, rows, ranks = plan_shrunk(shape, num_slots)
        size = rows * ranks
        memory = branch_buffer(buffers, (splits + exchanged_copies(parts)) * size)
        # nothing is gathered where each rank has all ranks of A
        whole = parts * size if parts > 1 else 0
        shrunk, total, gathered, ordered = torch.split(memory, [splits * size, size, whole, whole])
        return cls(
            shrunk.view(splits, rows, ranks),
            total.view(rows, ranks),
            gathered.view(whole // size, rows, ranks),
            ordered.view(min(1, whole), rows, parts * ranks),
        )

    def exchange(self, collective: Collective, slices: int) -> Tensor:
        """What the shrink has left, with the part of all ranks: [1, padded rows, slices * rank]."""
        total = self.shrunk[0]
        if self.shrunk.shape[0] > 1:
            total = torch.sum(self.shrunk, 0, out=self.total)
        if not self.gathered.numel():
            collective.all_reduce(total)
            return total[None]
        collective.all_gather(total, self.gathered)
        # the ranks of each slice, which are apart, one behind the other
        parts, rows = self.gathered.shape[:2]
        by_part = self.gathered.view(parts, rows, slices, -1)
        self.ordered.view(rows, slices, parts, -1).copy_(by_part.permute(1, 2, 0, 3))
        return self.ordered
