"""Controls, which must pass: nothing planted, or an edit that changes how a result is computed but
not the result."""

from __future__ import annotations

from loragate.faults.corpus.points import control
from loragate.faults.model import Edit

_PLAN = "lorakernels.dense.plan"
_TUNING = "lorakernels.runtime.tuning"

CONTROLS = (
    control(
        name="nothing-planted",
        why="The package as it is.",
    ),
    control(
        name="nothing-planted-in-a-layer",
        why="The package as it is, in a packed layer over two ranks.",
    ),
    control(
        name="adapters-without-tokens",
        why="Adapters that are enabled but have no rows.",
    ),
    control(
        name="narrower-column-tiles",
        why="Other tiles write the same columns.",
        edit=Edit(
            "lorakernels.dense.few_rows",
            "block = 256 if work.rank <= _RANKS_OF_WIDE_BLOCKS else 128",
            "block = 16 if work.rank <= _RANKS_OF_WIDE_BLOCKS else 128",
        ),
    ),
    control(
        name="ranks-always-read-ahead",
        why="Ranks that an adapter does not have are read, and their products dropped.",
        edit=Edit(
            _PLAN,
            "reads_all_ranks=reads_all_ranks(work, registers),",
            "reads_all_ranks=True,",
        ),
    ),
    control(
        name="shorter-k-steps",
        why="K is walked in other steps and split into more parts.",
        edit=Edit(
            _PLAN,
            "_ShrinkBlock(n, 256 if shape.is_deep else 128, 4, 3)",
            "_ShrinkBlock(n, 32, 4, 3)",
        ),
    ),
    control(
        name="k-never-split",
        why="K is never split: other roundings, as good as before.",
        edit=Edit(_PLAN, "splits = _number_of_splits(min(most, steps), block)", "splits = 1"),
    ),
    control(
        name="smaller-grid",
        why="Fewer programs than tiles: each takes more of them.",
        edit=Edit(_TUNING, "partial_tiles=8", "partial_tiles=0"),
    ),
    control(
        name="taller-tiles",
        why="Tiles of another height, on the host and on the device.",
        edit=Edit("lorakernels.batch.metadata", "        return 16\n", "        return 32\n"),
    ),
    control(
        name="terms-swapped",
        why="Two integers are added in the other order.",
        edit=Edit(
            "lorakernels.dense.kernels",
            "(slot.to(tl.int64) * OUT_FEATURES + columns)",
            "(columns + slot.to(tl.int64) * OUT_FEATURES)",
        ),
    ),
    control(
        name="rank-of-empty-slot-kept",
        why="A slot whose weights and scales are zero adds nothing, whatever its rank.",
        edit=Edit(
            "lorakernels.common.stacked_weights",
            "        self.ranks[slot].zero_()\n        self.scales[slot].zero_()\n",
            "        self.scales[slot].zero_()\n",
        ),
    ),
)
