"""Faults of plans that must be the same for batches of any size: something follows from the batch
again. The results are right; their bits depend on the rows beside them."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_metadata = planting("lorakernels.batch.metadata", Group.METADATA)
_dense = planting("lorakernels.dense.plan", Group.HOST)
_pairs = planting("lorakernels.moe.tiles", Group.MOE_HOST)
_moe = planting("lorakernels.moe.delta.plan", Group.MOE_HOST)
_tables = planting("lorakernels.moe.align.tables", Group.ALIGN)
_check = planting("lorakernels.dense.check", Group.HOST)
_option = planting("lorakernels.runtime.tuning", Group.HOST)

FAULTS = (
    _tables(
        "pairs-of-another-option-taken",
        "        check_batch_invariant(bool(is_invariant), tuning.is_invariant)\n",
        "",
        source="own",
        why="An operator that is called without the option of its tables looks for tiles of "
        "another height, behind their end.",
    ),
    _check(
        "mapping-of-another-option-taken",
        "    check_option(tile_rows)\n",
        "",
        source="own",
        why="A linear layer reads a mapping in tiles of another height than it was written in.",
    ),
    _option(
        "promise-of-equal-bits-unread",
        "    return with_one_plan(tuning) if batch_invariant() else tuning\n",
        "    return tuning\n",
        source="own",
        why="The option is documented and checked, and no plan follows from it.",
    ),
    _metadata(
        "height-of-one-plan-from-rows",
        "    num_rows = tuning.dense.planned_rows or num_rows\n",
        "",
        source="own",
        why="Tiles of small batches are lower than those of large ones, as without the promise.",
    ),
    _dense(
        "splits-of-one-plan-from-rows",
        "    shape = shape.planned\n    if shape.is_one_wave",
        "    if shape.is_one_wave",
        source="own",
        why="A batch that fills the device splits K less often than one that does not.",
    ),
    _pairs(
        "height-of-one-plan-from-pairs",
        "    num_pairs = tuning.moe.planned_pairs or num_pairs\n    pairs_of_a_bucket",
        "    pairs_of_a_bucket",
        source="own",
        why="Tiles of an expert's adapters are as high as the pairs of the batch fill them.",
    ),
    _pairs(
        "base-height-of-one-plan-from-pairs",
        "    num_pairs = tuning.moe.planned_pairs or num_pairs\n    # tiles that",
        "    # tiles that",
        source="own",
        why="Only the adapters keep their tiles: those of the base product follow from the batch.",
    ),
    _moe(
        "path-of-one-plan-from-pairs",
        "    shape = shape.planned\n    tuning = shape.tuning.moe\n    reads",
        "    tuning = shape.tuning.moe\n    reads",
        source="own",
        why="A small batch takes the kernel of small batches, which keeps in fp32 what the others "
        "round.",
    ),
    _moe(
        "splits-of-one-plan-from-pairs",
        "    shape = shape.planned\n    tuning = shape.tuning.moe\n    ranks",
        "    tuning = shape.tuning.moe\n    ranks",
        source="own",
        why="The shrink of a decode batch splits K less often than that of a longer one.",
    ),
)
