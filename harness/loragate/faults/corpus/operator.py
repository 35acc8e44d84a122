"""Faults of the launch code and of the custom operator around the kernels."""

from __future__ import annotations

from loragate.core.verdict import OracleName as O
from loragate.faults.corpus.points import EVERY, SMALL, delta, planting
from loragate.faults.model import Check, Group
from loragate.matrix.case import Dtype

_ops = planting("lorakernels.dense.ops", Group.HOST)
_check = planting("lorakernels.dense.check", Group.HOST)
_launch = planting("lorakernels.dense.launch", Group.HOST)
_plan = planting("lorakernels.dense.plan", Group.HOST)

_ENTRY = """    check_step(x, weights, metadata)
    torch.ops.lorakernels.dense_delta(
"""
# K is split into several parts
_SPLIT = delta(tokens=18, in_features=160, slices=(16,), slots=2, dtype=Dtype.FP32, oracles=EVERY)


FAULTS = (
    _ops(
        "whole-buffer-added",
        "        workspace.shrunk,\n        out,\n    )\n",
        "        workspace.shrunk,\n        out,\n    )\n    out.add_(torch.zeros_like(out))\n",
        source="vllm #35721",
        why="A delta of zero is added to base rows, too, which turns -0 into 0.",
        killers=(O.BASE_ROWS,),
        cases=(SMALL,),
        only=True,
    ),
    _ops(
        "second-step-tries-other-order",
        "    launch_expand(view, slots, shape, tiles, out, pdl=pdl)\n",
        "    shrunk.steps = getattr(shrunk, 'steps', 0) + 1\n"
        "    if shrunk.steps == 2 and x.shape[0] > 16:\n"
        "        view = view.flip(0).contiguous()\n"
        "    launch_expand(view, slots, shape, tiles, out, pdl=pdl)\n",
        source="vllm #50278",
        why="The second step adds partial sums in another order, like an autotuner or an atomic.",
        killers=(O.REPEAT,),
        cases=(_SPLIT,),
        only=True,
    ),
    _ops(
        "operator-hides-what-it-writes",
        'mutates_args=("shrunk", "out")',
        'mutates_args=("shrunk",)',
        source="vllm #37562",
        why="The operator does not declare to torch that it changes its output.",
        killers=(O.COMPILE,),
        cases=(SMALL,),
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
        killers=(O.COMPILE,),
        cases=(SMALL,),
    ),
    _check(
        "rows-unchecked",
        "    if num_rows is not None and x.shape[0] != num_rows:\n",
        "    if num_rows is not None and x.shape[0] < num_rows:\n",
        source="own",
        why="A batch with more rows than were prepared is accepted; the rest gets no delta.",
        killers=(O.GUARD,),
        cases=(delta(tokens=5, oracles=(O.EXACT, O.GUARD)),),
    ),
    _check(
        "output-above-input-accepted",
        "    if x.shape[0] and overlap(x, out):\n",
        "    if out is x:\n",
        source="own",
        why="An output that overlaps the input in memory is accepted.",
        killers=(O.GUARD,),
        cases=(delta(tokens=5, oracles=(O.EXACT, O.GUARD)),),
    ),
    _launch(
        "last-column-group-not-launched",
        "groups = sum(-(-width // columns) for width in shape.slice_widths)",
        "groups = sum(width // columns for width in shape.slice_widths)",
        source="punica #11",
        why="The grid is rounded down: columns after the last full group get no delta.",
        killers=(O.REFERENCE, O.EXACT),
        cases=(delta(slices=(300,), in_features=32, tokens=9),),
    ),
    _launch(
        "k-split-without-its-last-part",
        "grid = (tile_programs(shape, capacity), plan.splits, ",
        "grid = (tile_programs(shape, capacity), max(1, plan.splits - 1), ",
        source="own",
        why="One split-K partial of the shrink output is never written, and read all the same.",
        killers=(O.CANARY,),
        cases=(delta(in_features=300),),
    ),
    _plan(
        "workspace-sized-for-largest-batch",
        "    sizes += [size - 1 for size in sizes if size > 1]\n",
        "    sizes = [max_rows]\n",
        source="sglang #7844",
        why="A smaller batch splits K further and needs a larger workspace than the largest one.",
        killers=(Check.WORKSPACE,),
        checks=(Check.WORKSPACE,),
    ),
    _plan(
        "tile-below-dot-minimum",
        "block_r = min(128, max(16, power_of_2(shape.rank)))",
        "block_r = min(128, power_of_2(shape.rank))",
        source="vllm #32019",
        why="A rank below 16 gives a tile that tl.dot does not take; an interpreter does.",
        killers=(Check.COMPILES,),
        checks=(Check.COMPILES,),
    ),
)
