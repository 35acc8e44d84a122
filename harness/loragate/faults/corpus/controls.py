"""Controls, which must pass: nothing planted, or an edit that changes how a result is computed but
not the result."""

from __future__ import annotations

from loragate.core.verdict import OracleName as O
from loragate.faults.corpus.moe_points import EXPERT_CHECKS
from loragate.faults.corpus.points import SMALL, delta, linear
from loragate.faults.model import Check, Control, Edit
from loragate.matrix.case import Dtype, Mix, Parallel

_PLAN = "lorakernels.dense.plan"
_TUNING = "lorakernels.runtime.tuning"
_GUARDED = (*delta().oracles, O.GUARD)

CONTROLS = (
    Control(
        name="nothing-planted",
        why="The package as it is.",
        cases=(SMALL,),
        checks=tuple(c for c in Check if c not in (Check.COMPILES, *EXPERT_CHECKS)),
    ),
    Control(
        name="nothing-planted-in-a-layer",
        why="The package as it is, in a packed layer over two ranks.",
        cases=(linear(tokens=9, parallel=Parallel.COLUMN, tp=2, dtype=Dtype.FP16),),
        checks=(Check.COMPILES,),
    ),
    Control(
        name="adapters-without-tokens",
        why="Adapters that are enabled but have no rows.",
        cases=(delta(slots=6, mix=Mix.LAST_SLOT), delta(mix=Mix.ALL_BASE)),
    ),
    Control(
        name="narrower-column-tiles",
        why="Other tiles write the same columns.",
        cases=(delta(in_features=300, slices=(80, 24), oracles=_GUARDED),),
        edit=Edit(
            _PLAN,
            "return ExpandPlan(height, 256,",
            "return ExpandPlan(height, 16,",
        ),
    ),
    Control(
        name="shorter-k-steps",
        why="K is walked in other steps and split into more parts.",
        cases=(delta(in_features=300),),
        edit=Edit(
            _PLAN,
            "block_k = 256 if _is_deep(shape) else 128",
            "block_k = 32",
        ),
    ),
    Control(
        name="k-never-split",
        why="K is never split: other roundings, as good as before.",
        cases=(delta(in_features=300, dtype=Dtype.FP16),),
        edit=Edit(_PLAN, "splits=power_of_2_below(splits)", "splits=1"),
    ),
    Control(
        name="smaller-grid",
        why="Fewer programs than tiles: each takes more of them.",
        cases=(delta(tokens=40, slots=8, in_features=32, slices=(24,), mix=Mix.SHUFFLED),),
        edit=Edit(_TUNING, "partial_tiles=8", "partial_tiles=0"),
    ),
    Control(
        name="taller-tiles",
        why="Tiles of another height, on the host and on the device.",
        cases=(delta(),),
        checks=(Check.METADATA,),
        edit=Edit("lorakernels.batch.metadata", "        return 16\n", "        return 32\n"),
    ),
    Control(
        name="terms-swapped",
        why="Two integers are added in the other order.",
        cases=(delta(),),
        edit=Edit(
            "lorakernels.dense.kernels",
            "(slot.to(tl.int64) * OUT_FEATURES + columns)",
            "(columns + slot.to(tl.int64) * OUT_FEATURES)",
        ),
    ),
    Control(
        name="rank-of-empty-slot-kept",
        why="A slot whose weights and scales are zero adds nothing, whatever its rank.",
        cases=(delta(),),
        edit=Edit(
            "lorakernels.common.stacked_weights",
            "        self.ranks[slot].zero_()\n        self.scales[slot].zero_()\n",
            "        self.scales[slot].zero_()\n",
        ),
    ),
)
