"""Faults of MoE layers whose experts lie in any order, or in several places."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_routing = planting("lorakernels.layers.expert_routing", Group.MOE_LAYER)
_weights = planting("lorakernels.layers.moe_weights", Group.MOE_LAYER)
_packing = planting("lorakernels.layers.expert_packing", Group.MOE_LAYER)

FAULTS = (
    _routing(
        "every-replica-computes-its-pairs",
        "self.local_ids[experts, rows[:, None] % self.counts[experts]]",
        "self.local_ids[experts].amax(-1)",
        source="own",
        why="Every rank that has a replica computes a pair, and the sum holds it twice.",
    ),
    _routing(
        "experts-in-turn-mapped-as-runs",
        "local = [replica for (replica,) in placement.replicas(rank)]",
        "local = placement.place_map(rank)",
        source="vllm #38021",
        why="Ids are mapped as if the ranks held runs of experts, and the weights lie in turn.",
    ),
    _routing(
        "unknown-ids-have-replicas",
        "torch.where(known, local, -1)",
        "local",
        source="own",
        why="An id of no expert is computed by a replica of the first or of the last one.",
    ),
    _packing(
        "replica-of-another-experts-factors",
        "    return take_experts(factor, held) if factor",
        "    return factor[sorted(held.ids)] if factor",
        source="own",
        why="Places get the adapter's factors in the order of the model, and weights in their own.",
    ),
    _packing(
        "factor-of-the-only-expert-in-each-of-its-places",
        "    return take_experts(factor, held) if factor.shape[0] > 1 else factor\n",
        "    return take_experts(factor, held)\n",
        source="own",
        why="A layer that keeps a factor once for all experts is given one for each place.",
    ),
    _packing(
        "numbered-factors-in-the-order-of-the-model",
        "for expert in held.ids]",
        "for expert in sorted(held.ids)]",
        source="own",
        why="The same, for adapters with a module for each expert.",
    ),
    _weights(
        "bias-left-out-of-the-second-replica",
        "    return first, owned(take_experts(whole_bias, cut.experts), whole_bias)\n",
        "    second, ids = take_experts(whole_bias, cut.experts).clone(), cut.experts.ids\n"
        "    second[[place for place, e in enumerate(ids) if e in ids[:place]]] = 0.0\n"
        "    return first, second\n",
        source="own",
        why="Of two replicas on one rank the second one has no bias of down.",
    ),
)
