"""Faults of linear layers whose adapters are sharded by rank: parts, their exchange and order."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_sharded = planting("lorakernels.dense.sharded", Group.LAYER)
_slots = planting("lorakernels.dense.rank_shards", Group.LAYER)
_partition = planting("lorakernels.layers.partition", Group.LAYER)
_layer = planting("lorakernels.layers.linear", Group.LAYER)
_collectives = planting("lorakernels.runtime.collectives", Group.LAYER)
_experts = planting("lorakernels.moe.layer.sharded", Group.MOE_LAYER)
_expert_slots = planting("lorakernels.moe.rank_shards", Group.MOE_LAYER)

_ORDERED = "        self.ordered.view(rows, slices, parts, -1).copy_(by_part.permute(1, 2, 0, 3))\n"

FAULTS = (
    _sharded(
        "gathered-in-another-order",
        "by_part.permute(1, 2, 0, 3)",
        "by_part.flip(0).permute(1, 2, 0, 3)",
        source="own",
        why="The ranks of A are put together from the last part to the first one.",
    ),
    _sharded(
        "gathered-parts-as-they-came",
        _ORDERED,
        "        self.ordered.view(rows, parts, slices, -1).copy_(by_part.permute(1, 0, 2, 3))\n",
        source="own",
        why="What a rank has of all slices stays together, so that ranks of slices are mixed up.",
    ),
    _sharded(
        "partial-sums-of-ranks-not-added-up",
        "            collective.all_reduce(total)\n",
        "",
        source="own",
        why="Each rank of a row-parallel layer expands what its own inputs gave.",
    ),
    _sharded(
        "sums-of-ranks-added-up-twice",
        "            collective.all_reduce(total)\n",
        "            collective.all_reduce(total)\n            collective.all_reduce(total)\n",
        source="own",
        why="The delta of a row-parallel layer grows with the number of ranks.",
    ),
    _sharded(
        "ranks-that-are-not-sharded-gathered",
        "        if not self.gathered.numel():\n",
        "        if collective.size == 1:\n",
        source="vllm #47650",
        why="A layer that holds all ranks of A gathers them as if it held a part.",
    ),
    _sharded(
        "first-partial-exchanged-alone",
        "        if self.shrunk.shape[0] > 1:\n",
        "        if self.shrunk.shape[0] > 16:\n",
        source="own",
        why="Of an input that is split, only the first part gets through the exchange.",
    ),
    _sharded(
        "stale-sum-gathered",
        "        collective.all_gather(total, self.gathered)\n",
        "        collective.all_gather(self.total, self.gathered)\n",
        source="own",
        why="Without partials, what an earlier step or another rank left is exchanged.",
    ),
    _sharded(
        "every-rank-expands-into-the-first-columns",
        "    own = out.narrow(1, first_column, b.shape[1])\n",
        "    own = out.narrow(1, 0, b.shape[1])\n",
        source="sglang #24171",
        why="All ranks of a row-parallel layer add to the columns of the first one.",
    ),
    _sharded(
        "scale-applied-once-more",
        "    slots = SlotTensors(a, b, ranks, scales)\n",
        "    slots = SlotTensors(a, b, ranks, scales.square())\n",
        source="own",
        why="What was exchanged counts as scaled already and is scaled again.",
    ),
    _sharded(
        "expand-over-the-ranks-of-one-part",
        "    whole = replace(shape, rank=b.shape[2])\n",
        "    whole = replace(shape, rank=a.shape[2])\n",
        source="own",
        why="B is contracted over as many ranks as one rank of the group holds of A.",
    ),
    _sharded(
        "parts-without-live-ranks-left-unwritten",
        "    launch_shrink(x, slots, shape, tiles, exchanging.shrunk, pdl=False)\n",
        "    live = ranks\n"
        "    if a.shape[2] < b.shape[2]:\n"
        "        live = (ranks - collective.rank * a.shape[2]).clamp(min=0)\n"
        "    own_ranks = slots._replace(ranks=live)\n"
        "    launch_shrink(x, own_ranks, shape, tiles, exchanging.shrunk, pdl=False)\n",
        source="own",
        why="A rank that has none of an adapter's ranks exchanges what was in its buffer.",
    ),
    _slots(
        "a-cut-by-the-rank-of-the-adapter",
        "a[..., self.held.start : self.held.stop, :]",
        "a.tensor_split(self.parts, -2)[self.held.start // len(self.held)]",
        source="vllm #31994",
        why="Smaller adapters than the buffers have gaps between their ranks when gathered.",
    ),
    _partition(
        "every-rank-holds-the-first-ranks",
        "    held = range(tp_rank * size, (tp_rank + 1) * size)\n",
        "    held = range(size)\n",
        source="sglang #24171",
        why="All ranks of a column-parallel layer shrink with the first part of A.",
    ),
    _partition(
        "columns-behind-equal-parts-left-out",
        "    start, stop = (width * place // tp_size for place in (tp_rank, tp_rank + 1))\n",
        "    size = width // tp_size\n    start, stop = tp_rank * size, (tp_rank + 1) * size\n",
        source="own",
        why="Where the ranks do not divide the output, its last columns get no delta.",
    ),
    _layer(
        "sharded-adapters-staged-like-the-base",
        "            self.adapter_cut = replace(self.cut, columns=part.columns)\n",
        "            self.adapter_cut = replace(self.cut, columns=self.cut.columns)\n",
        source="own",
        why="B of a row-parallel layer arrives whole where slots hold a part of its columns.",
    ),
    _collectives(
        "groups-of-one-size-taken-for-one",
        "        if known is collective:\n",
        "        if known.size == collective.size:\n",
        source="own",
        why="Layers of a second group exchange with the ranks of the first one.",
    ),
    _experts(
        "expert-ranks-gathered-in-another-order",
        "by_part.permute(1, 2, 0, 3)",
        "by_part.flip(0).permute(1, 2, 0, 3)",
        source="own",
        why="The ranks of A of gate and up are put together from the last part to the first one.",
    ),
    _experts(
        "sums-over-inputs-of-down-not-added-up",
        "    exchange.collective.all_reduce(part.shrunk[0])\n",
        "",
        source="own",
        why="Each rank expands what its own part of the activation gave.",
    ),
    _experts(
        "columns-of-down-from-the-first-one-on",
        "product.out.narrow(1, exchange.first_column, width)",
        "product.out.narrow(1, 0, width)",
        source="own",
        why="All ranks add their columns of the delta to the first ones of the output.",
    ),
    _experts(
        "sharded-delta-of-down-without-router-weights",
        "        router_weights=product.router_weights,\n",
        "        router_weights=None,\n",
        source="own",
        why="The delta of a pair is added as if its expert had been chosen with weight one.",
    ),
    _experts(
        "shrink-of-down-exchanged-as-that-of-gate",
        "    if product.activation is None:\n",
        "    if product.is_gated:\n",
        source="own",
        why="The ranks of down are gathered although each rank has all of them.",
    ),
    _expert_slots(
        "first-ranks-of-experts-held-by-every-rank",
        "a[..., self.held.start : self.held.stop, :]",
        "a[..., : len(self.held), :]",
        source="own",
        why="What is gathered has the first ranks of A several times.",
    ),
)
