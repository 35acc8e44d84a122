"""Controls of the MoE kernels, which must pass; see controls.py."""

from __future__ import annotations

from loragate.faults.corpus.points import control
from loragate.faults.model import Edit

_PLAN = "lorakernels.moe.delta.plan"

CONTROLS = (
    control(
        name="no-expert-planted",
        why="The package as it is.",
    ),
    control(
        name="no-expert-planted-in-a-layer",
        why="The package as it is, in whole layers, files and tables.",
    ),
    control(
        name="every-path-of-experts",
        why="The package as it is, on each path: they round differently.",
    ),
    control(
        name="expert-adapters-without-tokens",
        why="Adapters that are enabled but have no rows.",
    ),
    control(
        name="small-batches-take-another-path",
        why="The plan never takes the path for a handful of pairs.",
        edit=Edit("lorakernels.runtime.tuning", "small_reads=1 << 17", "small_reads=0"),
    ),
    control(
        name="fused-paths-up-to-rank-8",
        why="Higher ranks take the path that supports every rank.",
        edit=Edit(_PLAN, "MAX_FUSED_RANK = 128", "MAX_FUSED_RANK = 8"),
    ),
    control(
        name="pairs-always-sorted",
        why="Large batches of few buckets are sorted as those of many are.",
        edit=Edit("lorakernels.runtime.tuning", "most_bins=8192", "most_bins=0"),
    ),
    control(
        name="pairs-always-compared",
        why="Pairs of small batches are ordered by the two launches that larger ones take.",
        edit=Edit("lorakernels.runtime.tuning", "pairs_at_once=256", "pairs_at_once=0"),
    ),
    control(
        name="taller-tiles-of-pairs",
        why="Tiles of another height, on the host and on the device.",
        edit=Edit(
            "lorakernels.moe.tiles",
            "        return MIN_TILE_ROWS\n",
            "        return 32\n",
        ),
    ),
    control(
        name="expert-terms-swapped",
        why="Offsets are added up in another order.",
        edit=Edit(
            "lorakernels.moe.delta.kernels.two_launch",
            "a_tile + k_begin + offs_n.to(tl.int64)[None, :] * K + offs_k[:, None]",
            "a_tile + offs_k[:, None] + offs_n.to(tl.int64)[None, :] * K + k_begin",
        ),
    ),
    control(
        name="neighbours-hold-other-experts",
        why="Ranks are assigned to the two axes in the other order: each part is held once.",
        edit=Edit(
            "lorakernels.layers.moe_partition",
            "return cls(ep_size, rank // tp_size, tp_size, rank % tp_size)",
            "return cls(ep_size, rank % ep_size, tp_size, rank // ep_size)",
        ),
    ),
)
