"""Faults of the shrink kernel: x @ A.T, per row's slot."""

from __future__ import annotations

from dataclasses import replace

from loragate.core.verdict import OracleName as O
from loragate.faults.corpus.points import SMALL, delta, planting
from loragate.faults.model import Check, Group
from loragate.matrix.case import Dtype, Layout, Mix, Ranks

_plant = planting("lorakernels.dense.kernels", Group.SHRINK)
_shared = planting("lorakernels.common.jit", Group.SHRINK)

FAULTS = (
    _plant(
        "slice-uses-neighbours-a",
        "a_ptrs = a_slot + offs_n.to(tl.int64)[None, :] * K",
        "a_ptrs = a_slot + (offs_n % R).to(tl.int64)[None, :] * K",
        source="sglang #27274",
        why="Every slice of a packed layer is shrunk with the A of the first one.",
        killers=(O.REFERENCE, O.EXACT),
        cases=(delta(ranks=Ranks.FULL),),
    ),
    _plant(
        "adapter-uses-neighbours-a",
        "a_slot = a_ptr + slot.to(tl.int64) * SR * K",
        "a_slot = a_ptr + tl.maximum(slot - 1, 0).to(tl.int64) * SR * K",
        source="own",
        why="Each adapter is shrunk with the A of the slot before its own.",
        killers=(O.REFERENCE, O.EXACT, O.PERMUTE),
        cases=(delta(ranks=Ranks.FULL),),
    ),
    _plant(
        "k-tail-dropped",
        "range(k_begin, k_end, BLOCK_K",
        "range(k_begin, k_end - BLOCK_K + 1, BLOCK_K",
        source="own",
        why="The last block of K that is not full is left out of the sum.",
        killers=(O.REFERENCE, O.EXACT),
        cases=(delta(in_features=300),),
    ),
    _plant(
        "k-mask-missing",
        "live_k = k + offs_k < K",
        "live_k = k + offs_k < K + BLOCK_K",
        source="own",
        why="The last block of K reads past the end of the row.",
        killers=(O.REFERENCE,),
        cases=(delta(layout=Layout.COLUMN_SLICE),),
    ),
    _plant(
        "last-rank-dropped",
        "live_n = offs_n % R < live_rank",
        "live_n = offs_n % R < live_rank - 1",
        source="own",
        why="The last live rank of every adapter is left out.",
        killers=(O.REFERENCE, O.EXACT),
        cases=(delta(tokens=30, rank=64, slots=4, slices=(40,)),),
    ),
    _plant(
        "dead-ranks-shrunk",
        "live_n = offs_n % R < live_rank",
        "live_n = offs_n < SR",
        source="own",
        why="The shrink output is computed for the rank of the buffers instead of the adapter's.",
        killers=(O.CANARY,),
        cases=(delta(),),
    ),
    _plant(
        "row-stride-ignored",
        "rows.to(tl.int64)[:, None] * stride_xm + offs_x",
        "rows.to(tl.int64)[:, None] * K + offs_x",
        source="vllm #35889",
        why="An input that is a column slice of a wider tensor is read as if it were contiguous.",
        killers=(O.REFERENCE, O.EXACT),
        cases=(delta(layout=Layout.COLUMN_SLICE),),
    ),
    _plant(
        "column-stride-ignored",
        "offs_x = (k_begin + offs_k).to(tl.int64) * stride_xk",
        "offs_x = (k_begin + offs_k).to(tl.int64)",
        source="vllm #35889",
        why="A transposed input is read as if its columns were next to each other.",
        killers=(O.REFERENCE, O.EXACT),
        cases=(delta(layout=Layout.TRANSPOSED),),
    ),
    _plant(
        "row-offset-in-32-bits",
        "rows.to(tl.int64)[:, None] * stride_xm",
        "rows[:, None] * stride_xm",
        source="vllm #53034",
        why="Row times stride overflows from 2^31 elements on.",
        killers=(Check.FAR_ROWS,),
        checks=(Check.FAR_ROWS,),
    ),
    _plant(
        "column-offset-in-32-bits",
        "offs_x = (k_begin + offs_k).to(tl.int64) * stride_xk",
        "offs_x = (k_begin + offs_k) * stride_xk",
        source="vllm #53034",
        why="In a transposed input the column times its stride overflows.",
        killers=(Check.FAR_ROWS,),
        checks=(Check.FAR_ROWS,),
    ),
    _shared(
        "fp16-through-bf16",
        "    return tl.dot(lhs, rhs, acc)\n",
        "    return tl.dot(lhs.to(tl.bfloat16), rhs.to(tl.bfloat16), acc)\n",
        source="vllm #38686",
        why="fp16 operands are rounded to bf16 on their way into the products.",
        killers=(O.REFERENCE,),
        cases=(replace(SMALL, dtype=Dtype.FP16),),
        only=True,
    ),
    _plant(
        "tiles-beyond-grid-not-taken",
        "range(first_tile, num_tiles, tl.num_programs(0)",
        "range(first_tile, tl.minimum(num_tiles, first_tile + 1), 1",
        source="sglang #28371",
        why="A batch with more tiles than programs gets no delta in the rest of them.",
        killers=(O.REFERENCE, O.EXACT),
        cases=(delta(tokens=40, slots=24, rank=4, in_features=32, slices=(24,), mix=Mix.SHUFFLED),),
    ),
    _plant(
        "first-row-taken-for-padding",
        "live_m = rows >= 0\n",
        "live_m = rows > 0\n",
        source="own",
        why="The comparison that finds padding also finds row 0.",
        killers=(O.REFERENCE, O.EXACT),
        # every row has an adapter, so row 0 has one
        cases=(delta(tokens=3, mix=Mix.SINGLE),),
    ),
    _plant(
        "zero-taken-for-padding",
        "                acc = dot(x, a, acc, IEEE)\n",
        "                first = tl.where((offs_k == 0)[None, :], x.to(tl.float32), 0.0)\n"
        "                blank = tl.sum(first, axis=1) == 0.0\n"
        "                acc = dot(tl.where(blank[:, None], 0.0, x).to(x.dtype), a, acc, IEEE)\n",
        source="own",
        why="A row whose first value is zero is skipped; random data never has one.",
        killers=(O.EXACT,),
        cases=(SMALL,),
        only=True,
    ),
)
