"""Faults of the shrink kernel: x @ A.T, per row's slot."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_plant = planting("lorakernels.dense.kernels", Group.SHRINK)
_shared = planting("lorakernels.common.jit", Group.SHRINK)

FAULTS = (
    _plant(
        "slice-uses-neighbours-a",
        "a_ptrs = a_slot + offs_n.to(tl.int64)[None, :] * K",
        "a_ptrs = a_slot + (offs_n % R).to(tl.int64)[None, :] * K",
        source="sglang #27274",
        why="Every slice of a packed layer is shrunk with the A of the first one.",
    ),
    _plant(
        "adapter-uses-neighbours-a",
        "a_slot = a_ptr + slot.to(tl.int64) * SR * K",
        "a_slot = a_ptr + tl.maximum(slot - 1, 0).to(tl.int64) * SR * K",
        source="own",
        why="Each adapter is shrunk with the A of the slot before its own.",
    ),
    _plant(
        "k-tail-dropped",
        "range(k_begin, k_end, BLOCK_K",
        "range(k_begin, k_end - BLOCK_K + 1, BLOCK_K",
        source="own",
        why="The last block of K that is not full is left out of the sum.",
    ),
    _plant(
        "k-mask-missing",
        "live_k = k + offs_k < K",
        "live_k = k + offs_k < K + BLOCK_K",
        source="own",
        why="The last block of K reads past the end of the row.",
    ),
    _plant(
        "last-rank-dropped",
        "live_n = offs_n % R < live_rank",
        "live_n = offs_n % R < live_rank - 1",
        source="own",
        why="The last live rank of every adapter is left out.",
    ),
    _plant(
        "dead-ranks-shrunk",
        "live_n = offs_n % R < live_rank",
        "live_n = offs_n < SR",
        source="own",
        why="The shrink output is computed for the rank of the buffers instead of the adapter's.",
    ),
    _plant(
        "ranks-read-ahead-kept",
        "            if ALL_RANKS:\n                acc = tl.where(live_n[None, :], acc, 0.0)\n",
        "",
        source="own",
        why="Of few ranks, those that the adapter does not have are read before that is known, and "
        "their products are kept.",
    ),
    _plant(
        "ranks-read-ahead-past-those-of-the-slices",
        "read_n = offs_n < SR if ALL_RANKS else live_n",
        "read_n = offs_n >= 0 if ALL_RANKS else live_n",
        source="own",
        why="The last block of ranks reads past the A of the last slot.",
    ),
    _plant(
        "row-stride-ignored",
        "rows.to(tl.int64)[:, None] * stride_xm + offs_x",
        "rows.to(tl.int64)[:, None] * K + offs_x",
        source="vllm #35889",
        why="An input that is a column slice of a wider tensor is read as if it were contiguous.",
    ),
    _plant(
        "column-stride-ignored",
        "offs_x = (k_begin + offs_k).to(tl.int64) * stride_xk",
        "offs_x = (k_begin + offs_k).to(tl.int64)",
        source="vllm #35889",
        why="A transposed input is read as if its columns were next to each other.",
    ),
    _plant(
        "row-offset-in-32-bits",
        "rows.to(tl.int64)[:, None] * stride_xm",
        "rows[:, None] * stride_xm",
        source="vllm #53034",
        why="Row times stride overflows from 2^31 elements on.",
    ),
    _plant(
        "column-offset-in-32-bits",
        "offs_x = (k_begin + offs_k).to(tl.int64) * stride_xk",
        "offs_x = (k_begin + offs_k) * stride_xk",
        source="vllm #53034",
        why="In a transposed input the column times its stride overflows.",
    ),
    _shared(
        "fp16-through-bf16",
        "    return tl.dot(lhs, rhs, acc)\n",
        "    return tl.dot(lhs.to(tl.bfloat16), rhs.to(tl.bfloat16), acc)\n",
        source="vllm #38686",
        why="fp16 operands are rounded to bf16 on their way into the products.",
        only=True,
    ),
    _plant(
        "tiles-beyond-grid-not-taken",
        "range(first_tile, num_tiles, tl.num_programs(0)",
        "range(first_tile, tl.minimum(num_tiles, first_tile + 1), 1",
        source="sglang #28371",
        why="A batch with more tiles than programs gets no delta in the rest of them.",
    ),
    _plant(
        "first-row-taken-for-padding",
        "live_m = rows >= 0\n",
        "live_m = rows > 0\n",
        source="own",
        why="The comparison that finds padding also finds row 0.",
        # every row has an adapter, so row 0 has one
    ),
    _plant(
        "zero-taken-for-padding",
        "                acc = dot(x, a, acc, IEEE)\n",
        "                bits = x.to(tl.float32).to(tl.int32, bitcast=True)\n"
        "                blank = tl.sum(tl.where((offs_k == 0)[None, :], bits, 0), axis=1) == 0\n"
        "                acc = dot(tl.where(blank[:, None], 0.0, x).to(x.dtype), a, acc, IEEE)\n",
        source="own",
        why="A row whose first value has no bit set is skipped; random data never has one.",
        only=True,
    ),
)
