"""Layers whose adapters are sharded by rank: what each rank of the group holds, and its slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lorakernels.common.choices import check_choice
from lorakernels.dense.rank_shards import RankShardedSlots
from lorakernels.layers.partition import (
    LayerCut,
    LoRASharding,
    Parallel,
    RankCut,
    Slice,
    cut_layer,
    cut_rank,
)
from lorakernels.runtime.collectives import Collective


def sharded_slots(
    *,
    num_slots: int,
    slices: Sequence[Slice],
    in_features: int,
    rank: int,
    dtype: torch.dtype,
    device: torch.device | str,
    parallel: Parallel,
    tp_size: int,
    tp_rank: int,
    padded_in_features: int | None = None,
) -> RankShardedSlots:
    """The slots of one rank of a layer that is sharded by rank, for WrappedLoRALinear. `slices`,
    `in_features` and `rank` are those of the whole layer and its adapters. Raises ValueError."""
    cut = cut_layer(
        slices,
        in_features,
        parallel=parallel,
        tp_size=tp_size,
        tp_rank=tp_rank,
        padded_in_features=padded_in_features,
    )
    part = cut_rank(slices, cut, rank, parallel=parallel, tp_size=tp_size, tp_rank=tp_rank)
    like = torch.empty(0, dtype=dtype, device=device)
    return slots_of(part, cut, num_slots=num_slots, like=like)


def slots_of(part: RankCut, cut: LayerCut, *, num_slots: int, like: Tensor) -> RankShardedSlots:
    """Empty slots for a rank's part of the adapters, in the dtype and on the device of `like`.
    ValueError."""
    return RankShardedSlots(
        num_slots=num_slots,
        slice_widths=[shard.size for shard in part.columns],
        in_features=cut.inputs.size,
        rank=part.rank,
        held=part.held,
        first_column=part.first_column,
        dtype=like.dtype,
        device=like.device,
    )


def check_part(slots: RankShardedSlots, part: RankCut) -> None:
    """Slots hold the part of the adapters that a rank has to hold. ValueError."""
    held = (slots.held, slots.first_column)
    if held != (part.held, part.first_column):
        raise ValueError(
            f"slots must hold ranks {part.held.start} to {part.held.stop} of A and columns from "
            f"{part.first_column} on (got {held[0].start} to {held[0].stop} and {held[1]})"
        )


def check_sharding(
    sharding: LoRASharding, collective: Collective | None, *, tp_size: int, tp_rank: int
) -> None:
    """A layer that is sharded by rank has the group that it is cut over, another one has none.
    ValueError."""
    check_choice("sharding", sharding, LoRASharding)
    if (sharding is LoRASharding.RANK) != (collective is not None):
        wanted = "a group" if sharding is LoRASharding.RANK else "None"
        raise ValueError(f"collective must be {wanted} with sharding {sharding} (got {collective})")
    if collective and (collective.size, collective.rank) != (tp_size, tp_rank):
        raise ValueError(
            f"collective must be rank {tp_rank} of {tp_size} like the layer "
            f"(got {collective.rank} of {collective.size})"
        )
