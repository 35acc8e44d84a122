"""Faults of the host code around the MoE kernels: plan, operator, launch, slots."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_ops = planting("lorakernels.moe.delta.ops", Group.MOE_HOST)
_launch = planting("lorakernels.moe.delta.launch", Group.MOE_HOST)
_plan = planting("lorakernels.moe.delta.plan", Group.MOE_HOST)
_sizes = planting("lorakernels.moe.delta.sizes", Group.MOE_HOST)
_align = planting("lorakernels.moe.align.metadata", Group.MOE_HOST)
_weights = planting("lorakernels.moe.weights", Group.MOE_HOST)
_stacked = planting("lorakernels.common.stacked_weights", Group.MOE_HOST)
_PREPARED = (
    "    launch_prepared(\n"
    "        _launch_delta,\n"
    "        (x, slots, shrunk, out, router_weights, pairs.buffers),\n"
    "        (tuple(slice_widths), num_pairs, num_experts, add_inputs, path),\n"
    "        pairs.tuning,\n"
)


FAULTS = (
    _ops(
        "add-inputs-ignored",
        "        add_inputs=add_inputs,\n",
        "        add_inputs=True,\n",
        source="vllm #45368",
        why="The delta is added to the old output although the caller wants it stored.",
    ),
    _ops(
        "pairs-read-rows-of-their-token",
        "pairs_per_x=num_pairs // x.shape[0]",
        "pairs_per_x=max(2, num_pairs // x.shape[0])",
        source="sglang #31608",
        why="The second product reads a row of x for each token where each pair has its own.",
    ),
    _ops(
        "whole-pair-buffer-added",
        f"{_PREPARED}    )\n",
        f"{_PREPARED}    )\n    if add_inputs:\n        out.add_(0.0)\n",
        source="vllm #35721",
        why="Pairs without a delta get one of zero, which turns -0 into 0.",
        only=True,
    ),
    _ops(
        "path-tried-out-while-serving",
        _PREPARED,
        "    shrunk.steps = getattr(shrunk, 'steps', 0) + 1\n"
        "    if shrunk.steps == 2 and num_pairs <= 4:\n"
        f"        path = MoEPath.SMALL_BATCH\n{_PREPARED}",
        source="vllm #50278",
        why="The second step of a few pairs takes another path to see which is faster.",
        only=True,
    ),
    _ops(
        "moe-operator-hides-its-output",
        '@register_operator("moe_delta", mutates=("shrunk", "out"))',
        '@register_operator("moe_delta", mutates=("shrunk",))',
        source="vllm #37562",
        why="The operator does not declare to torch that it changes its output.",
        only=True,
    ),
    _ops(
        "active-pairs-counted-on-the-host",
        "    _check_batch(x, weights, pairs)\n",
        "    _check_batch(x, weights, pairs)\n"
        "    if pairs.num_rows and int((pairs.pair_slots >= 0).sum()) == 0:\n"
        "        return\n",
        source="vllm #34119",
        why="An early exit asks the device, which no traced graph can.",
    ),
    _sizes(
        "shrink-output-sized-for-the-largest-batch",
        "    sizes = (*_last_sizes(shape, several), shape.num_pairs)\n",
        "    sizes = (shape.num_pairs,)\n",
        source="sglang #31525",
        why="Smaller batches split K into more partials than fit into the workspace.",
    ),
    _align(
        "routes-of-any-dtype",
        "            if tensor.dtype != torch.int32 or tensor.dim() != dims:\n",
        "            if tensor.dim() != dims:\n",
        source="own",
        why="Ids of 64 bits are read as twice as many of 32.",
        only=True,
    ),
    _ops(
        "router-weights-of-any-size",
        "router_weights.dtype != torch.float32 or router_weights.numel() != num_pairs:",
        "router_weights.dtype != torch.float32:",
        source="own",
        why="Router weights of another batch are accepted.",
    ),
    _launch(
        "router-weights-lost",
        '"WEIGHTED": delta.router_weights is not None,',
        '"WEIGHTED": False,',
        source="sglang #32241",
        why="The delta is added as if each expert had the weight 1.",
    ),
    _plan(
        "high-rank-refused",
        "    if shape.rank > MAX_FUSED_RANK:\n        return MoEPath.TWO_KERNEL\n",
        "    if shape.rank > MAX_FUSED_RANK:\n"
        '        raise ValueError(f"rank must be at most {MAX_FUSED_RANK}")\n',
        source="vllm #55158",
        why="Where one path cannot take the rank of the buffers, no other one is tried.",
    ),
    _plan(
        "expand-block-below-the-dots-minimum",
        "    block_r = min(128, max(16, power_of_2(shape.rank)))\n",
        "    block_r = min(128, power_of_2(shape.rank))\n",
        source="vllm #49327",
        why="For a low rank the expand has less to contract over than a tensor core takes.",
    ),
    _plan(
        "one-shot-tile-below-the-dots-minimum",
        "    block_r = max(16, power_of_2(shape.rank))\n",
        "    block_r = power_of_2(shape.rank)\n",
        source="vllm #32019",
        why="For a low rank the second product has less to contract over than a tensor core takes.",
    ),
    _stacked(
        "expert-slot-not-reset",
        "        self.reset(slot)\n        start = 0\n",
        "        start = 0\n",
        source="sglang #8103",
        why="A slice that the new adapter lacks keeps the old one.",
    ),
    _stacked(
        "emptied-slot-still-stores",
        "        self.ranks[slot].zero_()\n        self.scales[slot].zero_()\n",
        "        self.scales[slot].zero_()\n",
        source="own",
        why="Pairs of a slot that was emptied are overwritten with zero where the kernel stores.",
    ),
    _stacked(
        "every-expert-gets-the-first",
        "self._write_a(slot, index, a)",
        "self._write_a(slot, index, a[:1])",
        source="own",
        why="All experts of an adapter get the A of its first one.",
    ),
    _stacked(
        "shared-side-decides-for-both",
        "self.b[slot, ..., start : start + width, : part.rank].copy_(b)",
        "both = part.b[:1] if self.a.shape[1] == 1 else part.b\n"
        "                self.b[slot, ..., start : start + width, : part.rank].copy_(both)",
        source="sglang #28564",
        why="Where experts share A, the B of all of them is overwritten with that of the first.",
    ),
    _stacked(
        "absent-slice-moves-the-rest",
        "            start += width\n",
        "                start += width\n",
        source="unsloth-zoo #941",
        why="After a slice without adapter, B goes to the columns of that slice.",
    ),
    _weights(
        "experts-not-counted-at-load",
        "factor.shape in ((1, rows, columns), (experts, rows, columns))",
        "factor.shape[1:] == (rows, columns)",
        source="vllm #41754",
        why="An adapter for another number of experts is refused only when half of it is loaded.",
    ),
)
