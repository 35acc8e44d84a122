"""Faults of reading and binding MoE adapters."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_peft = planting("lorakernels.adapters.peft_experts", Group.MOE_ADAPTERS)
_layout = planting("lorakernels.adapters.expert_layout", Group.MOE_ADAPTERS)
_binding = planting("lorakernels.adapters.binding", Group.MOE_ADAPTERS)

FAULTS = (
    _peft(
        "experts-slowest-in-b",
        "b.reshape(b.shape[0], rank, -1).permute(2, 0, 1)",
        "b.reshape(b.shape[0], -1, rank).permute(1, 0, 2)",
        source="vllm #31534",
        why="The columns of B are assigned to the experts in the order of A.",
    ),
    _peft(
        "experts-fastest-in-a",
        "a.reshape(-1, rank, a.shape[1])",
        "a.reshape(rank, -1, a.shape[1]).transpose(0, 1)",
        source="peft #3112",
        why="The rows of A are assigned to the experts in the order of B.",
    ),
    _peft(
        "orientation-taken-for-granted",
        "    if turned:\n        # releases",
        "    if False:\n        # releases",
        source="vllm #52194",
        why="Files of a PEFT release that swapped input and output are not turned.",
    ),
    _peft(
        "wrapping-order-taken-for-granted",
        "    for order, turned in product((1, -1), (False, True)):\n",
        "    for order, turned in product((-1,), (False, True)):\n",
        source="vllm #52194",
        why="The factors of gate and up are identified by their order in the file.",
    ),
    _layout(
        "layout-of-the-first-module",
        "    for module in sorted(modules):\n        fitting",
        "    for module in sorted(modules)[:1]:\n        fitting",
        source="sglang #28564",
        why="The layout of the first layer is assumed for all layers.",
    ),
    _binding(
        "experts-never-missed",
        "    if adapter.expert_layout is None or adapter.expert_layout.stacked is not stacked:\n",
        "    if adapter.expert_layout is None or adapter.expert_layout.stacked is not None:\n",
        source="vllm #47088",
        why="An adapter whose experts are missing is served as the base model.",
    ),
)
