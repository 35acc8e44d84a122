"""Controls of the MoE kernels, which must pass; see controls.py."""

from __future__ import annotations

from loragate.faults.corpus.moe_points import (
    EXPERT_CHECKS,
    MOE_SMALL,
    one_shot,
    pairs,
    two_kernel,
)
from loragate.faults.model import Check, Control, Edit
from loragate.matrix.case import Dtype, Mix, RouterWeights, Sharing, Source, Write

_PLAN = "lorakernels.moe.delta.plan"

CONTROLS = (
    Control(
        name="no-expert-planted",
        why="The package as it is.",
        cases=(MOE_SMALL,),
    ),
    Control(
        name="no-expert-planted-in-a-layer",
        why="The package as it is, in whole layers, files and tables.",
        cases=(),
        checks=EXPERT_CHECKS,
    ),
    Control(
        name="every-path-of-experts",
        why="The package as it is, on each path: they round differently.",
        cases=(
            two_kernel(dtype=Dtype.FP16, router=RouterWeights.OUTPUT, write=Write.STORE),
            one_shot(dtype=Dtype.FP16, sharing=Sharing.SHARED_A),
            pairs(dtype=Dtype.FP16, source=Source.PAIR, sharing=Sharing.SHARED_B),
        ),
    ),
    Control(
        name="expert-adapters-without-tokens",
        why="Adapters that are enabled but have no rows.",
        cases=(pairs(slots=6, mix=Mix.LAST_SLOT), two_kernel(mix=Mix.ALL_BASE)),
    ),
    Control(
        name="small-batches-take-another-path",
        why="The plan never takes the path for a handful of pairs.",
        cases=(pairs(),),
        edit=Edit("lorakernels.runtime.tuning", "small_reads=1 << 17", "small_reads=0"),
    ),
    Control(
        name="fused-paths-up-to-rank-8",
        why="Higher ranks take the path that supports every rank.",
        cases=(one_shot(), pairs()),
        edit=Edit(_PLAN, "MAX_FUSED_RANK = 128", "MAX_FUSED_RANK = 8"),
    ),
    Control(
        name="pairs-always-sorted",
        why="The path for many buckets, taken for few.",
        cases=(pairs(), two_kernel()),
        checks=(Check.PAIRS,),
        edit=Edit(
            "lorakernels.moe.tiles",
            "return num_bins(num_experts, max_slots, with_base) > tuning.align.most_bins",
            "return num_bins(num_experts, max_slots, with_base) > 0",
        ),
    ),
    Control(
        name="taller-tiles-of-pairs",
        why="Tiles of another height, on the host and on the device.",
        cases=(two_kernel(), one_shot()),
        checks=(Check.PAIRS,),
        edit=Edit(
            "lorakernels.moe.tiles",
            "        return MIN_TILE_ROWS\n",
            "        return 32\n",
        ),
    ),
    Control(
        name="expert-terms-swapped",
        why="Offsets are added up in another order.",
        cases=(two_kernel(),),
        edit=Edit(
            "lorakernels.moe.delta.kernels.two_launch",
            "a_tile + k_begin + offs_n.to(tl.int64)[None, :] * K + offs_k[:, None]",
            "a_tile + offs_k[:, None] + offs_n.to(tl.int64)[None, :] * K + k_begin",
        ),
    ),
    Control(
        name="neighbours-hold-other-experts",
        why="Ranks are assigned to the two axes in the other order: each part is held once.",
        cases=(pairs(tokens=3),),
        checks=(Check.EXPERT_RANKS,),
        edit=Edit(
            "lorakernels.layers.moe_partition",
            "return cls(ep_size, rank // tp_size, tp_size, rank % tp_size)",
            "return cls(ep_size, rank % ep_size, tp_size, rank // ep_size)",
        ),
    ),
)
