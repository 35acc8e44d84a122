"""The alignment in plain torch, for more buckets than a program can count: several launches and
temporary memory, but no host synchronisation either."""

from __future__ import annotations

import torch
from torch import Tensor

from lorakernels.moe.align.tables import PairTables


def place_pairs(
    pairs: PairTables, topk_ids: Tensor, token_slots: Tensor, expert_map: Tensor | None
) -> None:
    """Fill every table of `pairs` for its prepared step."""
    slots = token_slots[: pairs.num_rows].long().repeat_interleave(pairs.top_k)
    experts = _local(topk_ids.flatten().long(), expert_map)
    experts = torch.where(_in_range(experts, pairs.num_experts), experts, -1)
    slots = torch.where(_in_range(slots, pairs.max_slots) & (experts >= 0), slots, -1)
    tables = pairs.tables
    for table, values in ((tables.pair_slots, slots), (tables.pair_experts, experts)):
        table.fill_(-1)
        table[: values.shape[0]] = values.int()
    bucket = torch.where(slots >= 0, experts * pairs.max_slots + slots, -1)
    headers = ((tables.tile_slots, slots), (tables.tile_experts, experts))
    _tile(bucket, pairs.num_buckets, pairs.height, tables.tile_pairs, tables.num_tiles, headers)
    if pairs.with_base:
        # tiles of an expert hold its pairs in the order of their slots, base rows first
        order = torch.argsort(slots, stable=True)
        _tile(
            experts[order],
            pairs.num_experts,
            pairs.base_height,
            tables.base_pairs,
            tables.num_base_tiles,
            ((tables.base_experts, experts[order]),),
            names=order,
        )


def _local(ids: Tensor, expert_map: Tensor | None) -> Tensor:
    if expert_map is None:
        return ids
    known = _in_range(ids, expert_map.shape[0])
    return torch.where(known, expert_map.long()[torch.where(known, ids, 0)], -1)


def _in_range(values: Tensor, end: int) -> Tensor:
    return (values >= 0) & (values < end)


def _tile(
    group: Tensor,
    num_groups: int,
    height: int,
    table: Tensor,
    num_tiles: Tensor,
    headers: tuple[tuple[Tensor, Tensor], ...],
    names: Tensor | None = None,
) -> None:
    """Cut the members of each group into tiles of `height`; group -1 means none. The table gets
    the index of a member, or its entry of `names`."""
    # an extra group and an extra tile at the end take the members without a group
    group = torch.where(group >= 0, group, num_groups)
    order = torch.argsort(group, stable=True)
    counts = torch.zeros(num_groups + 1, dtype=torch.int64, device=group.device)
    counts.scatter_add_(0, group, torch.ones_like(group))
    tiles = (counts + height - 1) // height
    tiles[num_groups] = 0
    first_tile = tiles.cumsum(0) - tiles
    start = counts.cumsum(0) - counts
    owner = group[order]
    rank = torch.arange(group.shape[0], device=group.device) - start[owner]
    tile = first_tile[owner] + rank // height
    nowhere = owner == num_groups
    place = torch.where(nowhere, table.shape[0], tile * height + rank % height)
    _scatter(table, place, order if names is None else names[order])
    for header, values in headers:
        leads = ~nowhere & (rank % height == 0)
        _scatter(header, torch.where(leads, tile, header.shape[0]), values[order])
    num_tiles.copy_(tiles.sum().int())


def _scatter(table: Tensor, place: Tensor, values: Tensor) -> None:
    """-1 everywhere but at `place`; what is placed past the end is dropped."""
    longer = torch.full((table.shape[0] + 1,), -1, dtype=table.dtype, device=table.device)
    longer.scatter_(0, place, values.to(table.dtype))
    table.copy_(longer[:-1])
