"""Faults of the two-kernel path of the MoE delta: a shrink, a shrink output, an expand."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_plant = planting("lorakernels.moe.delta.kernels.two_launch", Group.MOE_TWO_KERNEL)
_columns = planting("lorakernels.common.jit", Group.MOE_TWO_KERNEL)


FAULTS = (
    _plant(
        "up-half-uses-gates-a",
        "a_ptrs = a_tile + k_begin + offs_n.to(tl.int64)[None, :] * K",
        "a_ptrs = a_tile + k_begin + (offs_n % R).to(tl.int64)[None, :] * K",
        source="sglang #27274",
        why="The up half is shrunk with the A of the gate.",
    ),
    _plant(
        "expert-uses-neighbours-a",
        "expert.to(tl.int64) * stride_a_expert\n        a_ptrs = a_tile + k_begin",
        "tl.maximum(expert - 1, 0).to(tl.int64) * stride_a_expert\n"
        "        a_ptrs = a_tile + k_begin",
        source="own",
        why="Each expert is shrunk with the A of the expert before it.",
    ),
    _plant(
        "live-rank-of-the-first-slice",
        "live_rank = tl.load(ranks_ptr + slot * S + offs_n // R, mask",
        "live_rank = tl.load(ranks_ptr + slot * S + offs_n * 0, mask",
        source="sglang #32241",
        why="All slices are shrunk with the live rank of the first one.",
    ),
    _plant(
        "rest-of-split-k-lost",
        "steps = tl.cdiv(tl.cdiv(K, BLOCK_K), tl.num_programs(1))",
        "steps = tl.cdiv(K, BLOCK_K) // tl.num_programs(1)",
        source="own",
        why="K is split evenly, and the remainder belongs to no split-K partial.",
    ),
    _plant(
        "expert-k-mask-missing",
        "live_k = k + offs_k < K",
        "live_k = k + offs_k < K + BLOCK_K",
        source="own",
        why="The last block of K reads past the end of the row.",
    ),
    _plant(
        "expert-tiles-beyond-grid-lost",
        "tl.range(first_tile, num_tiles, tl.num_programs(2)",
        "tl.range(first_tile, tl.minimum(num_tiles, first_tile + 1), tl.num_programs(2)",
        source="sglang #28371",
        why="A batch with more tiles than programs gets no delta in the rest of them.",
    ),
    _plant(
        "zero-taken-for-idle-row",
        "                acc = dot(x, a, acc, IEEE)\n",
        "                bits = x.to(tl.float32).to(tl.int32, bitcast=True)\n"
        "                blank = tl.sum(tl.where((offs_k == 0)[None, :], bits, 0), axis=1) == 0\n"
        "                acc = dot(tl.where(blank[:, None], 0.0, x).to(x.dtype), a, acc, IEEE)\n",
        source="own",
        why="A row whose first value has no bit set is taken for padding.",
        only=True,
    ),
    _plant(
        "ranks-of-experts-through-bf16",
        "acc = dot(h.to(b.dtype), b, start_of_sum(previous, LATE), IEEE)",
        "acc = dot(h.to(tl.bfloat16).to(b.dtype), b, start_of_sum(previous, LATE), IEEE)",
        source="vllm #38686",
        why="The shrink output is rounded to bf16 whatever the dtype of the adapters.",
        only=True,
    ),
    _plant(
        "dead-ranks-of-experts-expanded",
        "loaded_rank = tl.cdiv(rank, RANK_ALIGN) * RANK_ALIGN",
        "loaded_rank = R",
        source="own",
        why="Ranks that the adapter does not have are read; harmless while they are zero.",
        only=True,
    ),
    _plant(
        "ranks-beyond-one-block-lost",
        "for r in tl.range(BLOCK_R, R, BLOCK_R, num_stages=1):",
        "for r in tl.range(BLOCK_R, R - BLOCK_R, BLOCK_R, num_stages=1):",
        source="vllm #55158",
        why="Of an adapter with more ranks than a block, the last ranks are left out.",
    ),
    _plant(
        "router-weight-twice",
        "mask=live_m, other=0.0).to(tl.float32) * scale\n",
        "mask=live_m, other=0.0).to(tl.float32) * scale\n"
        "            weight *= tl.load(weights_ptr + pairs, mask=live_m, other=0.0)\n",
        source="peft #3111",
        why="The router weight is applied by the kernel and once more.",
    ),
    _plant(
        "absent-slice-stored-as-zero",
        "live_m = (pairs >= 0) & (rank > 0)",
        "live_m = pairs >= 0",
        source="own",
        why="Where the kernel stores, slices without adapter lose what stood there.",
    ),
    _plant(
        "slices-written-over-each-other",
        "columns = (start + offs_n).to(tl.int64)",
        "columns = offs_n.to(tl.int64)",
        source="own",
        why="All slices are added to the columns of the first one.",
    ),
    _plant(
        "tail-of-a-group-written",
        "live_n = (offs_n + block * BLOCK_N < width)[None, :]",
        "live_n = (offs_n + block * BLOCK_N < width + BLOCK_N)[None, :]",
        source="own",
        why="The last block of a group of column blocks writes past the end of the slice.",
    ),
    _columns(
        "groups-start-at-powers-of-two",
        "(group - first_group) * COLUMNS, column)",
        "(group - first_group) * (COLUMNS & -COLUMNS), column)",
        source="own",
        why="The alignment of a group's first column is taken for the column.",
    ),
    _plant(
        "last-block-of-a-group-lost",
        "for block in tl.range(0, GROUP, num_stages=STAGES):",
        "for block in tl.range(0, GROUP - 1, num_stages=STAGES):",
        source="own",
        why="Of a group of column blocks the last one is left out.",
    ),
    _plant(
        "pair-offset-in-32-bits",
        "        rows = pairs.to(tl.int64)\n",
        "        rows = pairs\n",
        source="vllm #53034",
        why="Pair times stride overflows from 2^31 elements on.",
    ),
    _plant(
        "expert-offset-in-32-bits",
        "expert.to(tl.int64) * stride_b_expert\n",
        "expert * stride_b_expert\n",
        source="liger-kernel #1296",
        why="Expert times the stride of B overflows.",
    ),
)
