"""Faults that show only where a captured step is replayed: what was left out, frozen or moved."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_dense = planting("lorakernels.dense.ops", Group.HOST)
_moe = planting("lorakernels.moe.delta.ops", Group.MOE_HOST)

FAULTS = (
    _dense(
        "delta-left-out-of-a-capture-of-base-rows",
        "from lorakernels.batch.steps import runs_adapters\n",
        "from lorakernels.batch.steps import base_rows\n"
        "runs_adapters = lambda tensor, device: base_rows(tensor) is None\n",
        source="vllm #43139",
        why="A graph that is captured while no row has an adapter never adds a delta.",
        only=True,
    ),
    _moe(
        "delta-of-experts-left-out-of-a-capture-of-base-rows",
        "from lorakernels.batch.steps import prepared_rows, runs_adapters\n",
        "from lorakernels.batch.steps import base_rows, prepared_rows\n"
        "runs_adapters = lambda tensor, device: base_rows(tensor) is None\n",
        source="vllm #43139",
        why="A graph that is captured while no row has an adapter adds no delta of experts.",
        only=True,
    ),
)
