"""Faults of the launch code and of the custom operator around the kernels."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_ops = planting("lorakernels.dense.ops", Group.HOST)
_check = planting("lorakernels.dense.check", Group.HOST)
_launch = planting("lorakernels.dense.launch", Group.HOST)
_plan = planting("lorakernels.dense.plan", Group.HOST)
_expand_plan = planting("lorakernels.dense.expand_plan", Group.HOST)
_sizes = planting("lorakernels.dense.sizes", Group.HOST)

_PREPARED = (
    "    launch_prepared(launch_delta, operands, (tuple(slice_widths),), tuning_of(x.device))\n"
)
_ENTRY = """    check_step(x, weights, metadata)
    torch.ops.lorakernels.dense_delta(
"""


FAULTS = (
    _ops(
        "whole-buffer-added",
        "        workspace.buffers,\n        out,\n    )\n",
        "        workspace.buffers,\n        out,\n    )\n    out.add_(0.0)\n",
        source="vllm #35721",
        why="A delta of zero is added to base rows, too, which turns -0 into 0.",
        only=True,
    ),
    _ops(
        "second-step-tries-other-order",
        _PREPARED,
        "    shrunk[0].steps = getattr(shrunk[0], 'steps', 0) + 1\n"
        "    if shrunk[0].steps == 2 and x.shape[0] > 16:\n"
        "        shape = shape_of(len(x), a, slice_widths)\n"
        "        slots = SlotTensors(a, b, ranks, scales)\n"
        "        view, tiles = view_shrunk(shrunk, shape, len(a)), TileTables(*tables)\n"
        "        launch_shrink(x, slots, shape, tiles, view, pdl=False)\n"
        "        view = view.flip(0).contiguous()\n"
        "        launch_expand(view, slots, shape, tiles, out, pdl=False)\n"
        f"        return\n{_PREPARED}",
        source="vllm #50278",
        why="The second step adds partial sums in another order, like an autotuner or an atomic.",
        only=True,
    ),
    _ops(
        "operator-hides-what-it-writes",
        'mutates=("shrunk", "out")',
        'mutates=("shrunk",)',
        source="vllm #37562",
        why="The operator does not declare to torch that it changes its output.",
        only=True,
    ),
    _ops(
        "early-exit-reads-the-device",
        _ENTRY,
        "    check_step(x, weights, metadata)\n"
        "    if int(metadata.num_tiles) == 0:\n"
        "        return\n"
        "    torch.ops.lorakernels.dense_delta(\n",
        source="vllm #34119",
        why="The number of active adapters decides on the host what a traced graph does.",
    ),
    _check(
        "rows-unchecked",
        "    if num_rows is not None and x.shape[0] != num_rows:\n",
        "    if num_rows is not None and x.shape[0] < num_rows:\n",
        source="own",
        why="A batch with more rows than were prepared is accepted; the rest gets no delta.",
    ),
    _check(
        "output-above-input-accepted",
        "    if x.dim() == out.dim() == 2 and x.shape[0] and overlap(x, out):\n",
        "    if out is x:\n",
        source="own",
        why="An output that overlaps the input in memory is accepted.",
    ),
    _launch(
        "last-column-group-not-launched",
        "groups = sum(-(-width // columns) for width in shape.slice_widths)",
        "groups = sum(width // columns for width in shape.slice_widths)",
        source="punica #11",
        why="The grid is rounded down: columns after the last full group get no delta.",
    ),
    _launch(
        "k-split-without-its-last-part",
        "grid = (tile_programs(shape, capacity), plan.splits, ",
        "grid = (tile_programs(shape, capacity), max(1, plan.splits - 1), ",
        source="own",
        why="One split-K partial of the shrink output is never written, and read all the same.",
    ),
    _sizes(
        "workspace-sized-for-largest-batch",
        "num_slots) for size in sizes)",
        "num_slots) for size in [max_rows])",
        source="sglang #7844",
        why="A smaller batch splits K further and needs a larger workspace than the largest one.",
    ),
    _expand_plan(
        "tile-below-dot-minimum",
        "block_r = max(16, power_of_2(rank))",
        "block_r = power_of_2(rank)",
        source="vllm #32019",
        why="A rank below 16 gives a tile that tl.dot does not take; an interpreter does.",
    ),
    _expand_plan(
        "columns-stream-by-half-of-the-ranks",
        "sizes = blocks.rows, blocks.columns, block_r, blocks.group",
        "sizes = blocks.rows, blocks.columns, min(128, block_r), blocks.group",
        source="own",
        why="A block of ranks that is kept on chip while columns stream by is too short for them.",
    ),
    _expand_plan(
        "columns-of-few-rows-stream-by-half-of-the-ranks",
        "min(128, block_r) if columns.group == 1 and shape.height == 16 else block_r",
        "min(128, block_r)",
        source="own",
        why="The same for batches of up to some hundred rows.",
    ),
    _expand_plan(
        "columns-of-a-wave-stream-by-half-of-the-ranks",
        "return ExpandPlan(64, block_n, block_r, best_group",
        "return ExpandPlan(64, block_n, min(128, block_r), best_group",
        source="own",
        why="The same between decode and prefill, whose expand is planned elsewhere.",
    ),
    _plan(
        "plan-of-no-rows",
        "plan_expand(shape), max(1, shape.num_rows) / ",
        "plan_expand(shape), shape.num_rows / ",
        source="own",
        why="A step without rows divides by them where a rank is above 64.",
    ),
    _plan(
        "hidden-shrink-splits-further",
        "        most = plan_shrink(replace(shape, beside=False)).splits\n",
        "        most = _most_splits(shape, block, chunks)\n",
        source="own",
        why="A shrink beside the base product has more partials than the one behind it, whose "
        "workspace it takes.",
    ),
)
