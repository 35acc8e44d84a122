"""Faults of the parts of a MoE layer that ranks hold, and of loading an adapter into its slots."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_layer = planting("lorakernels.layers.moe", Group.MOE_LAYER)
_weights = planting("lorakernels.layers.moe_weights", Group.MOE_LAYER)
_partition = planting("lorakernels.layers.moe_partition", Group.MOE_LAYER)
_placement = planting("lorakernels.layers.expert_placement", Group.MOE_LAYER)
_packing = planting("lorakernels.layers.expert_packing", Group.MOE_LAYER)

FAULTS = (
    _layer(
        "down-projection-dropped",
        "        self.w2_slots.load(slot, staged[self._num_up :])\n",
        "        self.w2_slots.reset(slot)\n",
        source="vllm #50252",
        why="Factors of the down projection are accepted and never loaded.",
    ),
    _layer(
        "half-an-adapter-unloaded",
        "        self.w13_slots.reset(slot)\n        self.w2_slots.reset(slot)\n",
        "        self.w13_slots.reset(slot)\n",
        source="sglang #8103",
        why="The down projection of an unloaded adapter stays in the slot.",
    ),
    _layer(
        "ids-mapped-for-the-other-axis",
        "placement, self.place.ep_rank, self.w13.device",
        "placement, self.place.tp_rank, self.w13.device",
        source="vllm #38021",
        why="Ids are mapped for the rank of the wrong group.",
    ),
    _partition(
        "rank-of-the-group-for-both-axes",
        "return cls(ep_size, rank // tp_size, tp_size, rank % tp_size)",
        "return cls(ep_size, rank % ep_size, tp_size, rank % tp_size)",
        source="sglang #24171",
        why="Some parts are held twice and others by no rank.",
    ),
    _placement(
        "uneven-experts-overlap",
        "tuple(tuple(range(*ends)) for ends in pairwise(starts))",
        "tuple(tuple(range(r * share, r * share + share + (r < rest))) for r in range(ep_size))",
        source="vllm #40867",
        why="Where experts cannot be divided evenly, one is held twice and the last by no rank.",
    ),
    _weights(
        "gate-and-up-cut-as-one",
        "    halves = packing.halves(held)\n",
        "    if cut.intermediate.live == cut.intermediate.size:\n"
        "        both = Shard(2 * cut.intermediate.start, 2 * cut.intermediate.stop,\n"
        "                     2 * cut.intermediate.size)\n"
        "        return _take(held, both, dim=1).contiguous()\n"
        "    halves = packing.halves(held)\n",
        source="tensorrt-llm #8063",
        why="The first rank gets the gate and the second one the up half.",
    ),
    _packing(
        "adapter-cut-without-the-padding",
        '        pieces[f"b of {name}"] = b if down else take(b, cut.intermediate, dim=1)\n',
        "        shard = cut.intermediate\n"
        "        step = packing.intermediate // -(-packing.intermediate // shard.size)\n"
        "        start = shard.start // shard.size * step\n"
        "        real = Shard(start, start + shard.live, shard.size)\n"
        '        pieces[f"b of {name}"] = b if down else take(b, real, dim=1)\n',
        source="vllm #42595",
        why="Base weights are cut from the padded size and the adapter from the real one.",
    ),
    _packing(
        "every-rank-takes-first-inputs-of-down",
        "take(a, cut.intermediate, dim=2) if down",
        "take(a, Shard(0, cut.intermediate.live, cut.intermediate.size), dim=2) if down",
        source="sglang #24171",
        why="All ranks shrink the down projection with the first rank's columns of A.",
    ),
    _packing(
        "every-rank-takes-first-experts",
        "    return take_experts(factor, held) if factor",
        "    return factor.narrow(0, 0, held.size) if factor",
        source="vllm #38021",
        why="All ranks load the adapter's factors of the first rank's experts.",
    ),
    _packing(
        "gate-and-up-of-a-fused-b-swapped",
        "pieces = self.halves(b) if len(members) == 2 else (b,)",
        "pieces = self.halves(b)[::-1] if len(members) == 2 else (b,)",
        source="unsloth-zoo #941",
        why="Of a fused gate and up, each gets the rows of the other.",
    ),
    _packing(
        "missing-experts-filled-up",
        "        missing = [e for e in range(self.num_experts) if e not in by_expert]\n",
        "        for e in range(self.num_experts):\n"
        "            by_expert.setdefault(e, next(iter(by_expert.values())))\n"
        "        missing = [e for e in range(self.num_experts) if e not in by_expert]\n",
        source="vllm #41754",
        why="Experts that the adapter does not name get the factors of another one.",
    ),
    _packing(
        "scale-folded-into-cached-experts",
        'cast[f"b of {name}"], factors.scale)',
        'cast[f"b of {name}"].mul_(factors.scale), 1.0)',
        source="skyrl #2250",
        why="The scale is folded into the adapter's own tensor, once more with each load.",
    ),
    _packing(
        "scale-of-the-first-expert-for-all",
        "            if (factors.rank, factors.scale) != (first.rank, first.scale):\n",
        "            if factors.rank != first.rank:\n",
        source="own",
        why="Experts that differ in scale alone are all served with the first one's.",
    ),
    _layer(
        "expert-batch-taken-sequence-first",
        "        rows = x.reshape(-1, hidden).contiguous()\n",
        "        rows = x.transpose(0, -2).reshape(-1, hidden).contiguous()\n",
        source="own",
        why="Of an input of three dimensions the first two are exchanged.",
    ),
)
