"""Faults of reading and binding adapters of experts."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Check, Group

_peft = planting("lorakernels.adapters.peft_experts", Group.MOE_ADAPTERS)
_layout = planting("lorakernels.adapters.expert_layout", Group.MOE_ADAPTERS)
_binding = planting("lorakernels.adapters.binding", Group.MOE_ADAPTERS)

FAULTS = (
    _peft(
        "experts-slowest-in-b",
        "b.reshape(b.shape[0], rank, -1).permute(2, 0, 1)",
        "b.reshape(b.shape[0], -1, rank).permute(1, 0, 2)",
        source="vllm #31534",
        why="The columns of B are dealt to the experts in the order of A.",
        killers=(Check.EXPERT_FILES,),
        checks=(Check.EXPERT_FILES,),
    ),
    _peft(
        "experts-fastest-in-a",
        "a.reshape(-1, rank, a.shape[1])",
        "a.reshape(rank, -1, a.shape[1]).transpose(0, 1)",
        source="peft #3112",
        why="The rows of A are dealt to the experts in the order of B.",
        killers=(Check.EXPERT_FILES,),
        checks=(Check.EXPERT_FILES,),
    ),
    _peft(
        "orientation-taken-for-granted",
        "    if turned:\n        # releases",
        "    if False:\n        # releases",
        source="vllm #52194",
        why="Files of a release that read parameters the other way round are taken as they are.",
        killers=(Check.EXPERT_FILES,),
        checks=(Check.EXPERT_FILES,),
    ),
    _peft(
        "wrapping-order-taken-for-granted",
        "    for order, turned in product((1, -1), (False, True)):\n",
        "    for order, turned in product((-1,), (False, True)):\n",
        source="vllm #52194",
        why="Which factors are those of gate and up is told from their order in the file.",
        killers=(Check.EXPERT_FILES,),
        checks=(Check.EXPERT_FILES,),
    ),
    _layout(
        "layout-of-the-first-module",
        "    for module in sorted(modules):\n        fitting",
        "    for module in sorted(modules)[:1]:\n        fitting",
        source="sglang #28564",
        why="What holds for the first layer is taken to hold for all.",
        killers=(Check.EXPERT_FILES,),
        checks=(Check.EXPERT_FILES,),
    ),
    _binding(
        "experts-never-missed",
        "    if adapter.expert_layout is None or adapter.expert_layout.stacked is not stacked:\n",
        "    if adapter.expert_layout is None or adapter.expert_layout.stacked is not None:\n",
        source="vllm #47088",
        why="An adapter whose experts are missing is served as the base model.",
        killers=(Check.EXPERT_FILES,),
        checks=(Check.EXPERT_FILES,),
    ),
)
