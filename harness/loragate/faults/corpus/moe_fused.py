"""Faults of the paths of the MoE delta that shrink and expand in one launch."""

from __future__ import annotations

from loragate.faults.corpus.points import planting
from loragate.faults.model import Group

_one_shot = planting("lorakernels.moe.delta.kernels.one_shot", Group.MOE_FUSED)
_small = planting("lorakernels.moe.delta.kernels.small_batch", Group.MOE_FUSED)
_launch = planting("lorakernels.moe.delta.launch", Group.MOE_FUSED)


FAULTS = (
    _one_shot(
        "one-shot-reads-gates-a",
        "a_rows = (slice_id * R + offs_r).to(tl.int64) * K",
        "a_rows = offs_r.to(tl.int64) * K",
        source="sglang #27274",
        why="Every slice is shrunk with the A of the first one.",
    ),
    _one_shot(
        "pair-of-slices-shares-a",
        "                a_ptrs + R * K,\n",
        "                a_ptrs,\n",
        source="sglang #32241",
        why="A program that holds gate and up shrinks both with the A of the gate.",
    ),
    _one_shot(
        "pair-of-slices-shares-live-rank",
        "                offs_r < up_rank,\n",
        "                offs_r < rank,\n",
        source="sglang #32241",
        why="The up half is shrunk with the live rank of the gate.",
    ),
    _one_shot(
        "pair-of-slices-shares-scale",
        "tl.load(scales_ptr + table + 1)",
        "tl.load(scales_ptr + table)",
        source="unsloth-zoo #941",
        why="The scale of the gate is applied to both halves.",
    ),
    _one_shot(
        "one-shot-writes-behind-the-slice",
        "columns = tl.minimum(blocks * BLOCK_N, width - part)",
        "columns = blocks * BLOCK_N",
        source="own",
        why="The last block of columns writes past the end of its slice.",
    ),
    _one_shot(
        "one-shot-repeats-its-first-columns",
        "at = n if FROM_START else 0",
        "at = 0",
        source="own",
        why="With few ranks every block of columns is that of the first.",
    ),
    _one_shot(
        "one-shot-high-tiles-never-step",
        "if not FROM_START:",
        "if h.shape[1] > 16:",
        source="own",
        why="The two ways to reach the next columns leave out high tiles of few ranks.",
    ),
    _one_shot(
        "last-columns-of-a-part-lost",
        "blocks = tl.cdiv(tl.cdiv(width, BLOCK_N), tl.num_programs(0))",
        "blocks = tl.cdiv(width, BLOCK_N) // tl.num_programs(0)",
        source="own",
        why="Blocks of columns are divided evenly, and no program gets the remainder.",
    ),
    _one_shot(
        "router-weight-of-another-pair",
        "weight = tl.load(weights_ptr + pairs, mask=live_m",
        "weight = tl.load(weights_ptr + pairs // ROWS_PER_X, mask=live_m",
        source="own",
        why="Router weights are read by token, as if each had one expert.",
    ),
    _one_shot(
        "one-shot-slot-offset-in-32-bits",
        "a_tile = a_ptr + slot.to(tl.int64) * stride_a_slot",
        "a_tile = a_ptr + slot * stride_a_slot",
        source="liger-kernel #1296",
        why="Slot times the stride of A overflows where all experts of an adapter are large.",
    ),
    _one_shot(
        "one-shot-k-taken-for-even",
        "EVEN_K: tl.constexpr = K % BLOCK_K == 0",
        "EVEN_K: tl.constexpr = True",
        source="own",
        why="The last block of K reads past the end of the row.",
    ),
    _launch(
        "one-shot-columns-taken-for-even",
        "EVEN_N=all(width % plan.block_n == 0 for width in shape.slice_widths)",
        "EVEN_N=True",
        source="own",
        why="The last block of columns is not cut where its slice ends.",
    ),
    _launch(
        "one-shot-evenness-of-the-first-slice",
        "EVEN_N=all(width % plan.block_n == 0 for width in shape.slice_widths)",
        "EVEN_N=shape.slice_widths[0] % plan.block_n == 0",
        source="own",
        why="The second slice is assumed to be even because the first one is.",
    ),
    _launch(
        "stride-of-a-shared-factor",
        "a.stride(1) if a.shape[1] > 1 else 0",
        "a.stride(1)",
        source="sglang #28564",
        why="A factor that all experts share is indexed as if each had its own.",
    ),
    _small(
        "base-row-takes-adapter-0",
        "    slot = tl.load(pair_slots_ptr + pair)\n",
        "    slot = tl.maximum(tl.load(pair_slots_ptr + pair), 0)\n",
        source="vllm #49058",
        why="A row without adapter gets that of slot 0, as where a table starts with zeros.",
    ),
    _small(
        "small-batch-masks-rank-by-power-of-two",
        "live_r = (offs_r < rank)[:, None]",
        "live_r = (offs_r < BLOCK_R)[:, None]",
        source="own",
        why="Ranks up to the next power of two are read: those of another slice or expert.",
    ),
    _small(
        "small-batch-scale-of-the-first-slot",
        "scale = tl.load(scales_ptr + slot * S + slice_id)",
        "scale = tl.load(scales_ptr + slice_id)",
        source="own",
        why="All adapters get the scale of the first one.",
    ),
    _small(
        "small-batch-drops-k-tail",
        "for k in tl.range(0, K, BLOCK_K, ",
        "for k in tl.range(0, K - BLOCK_K + 1, BLOCK_K, ",
        source="own",
        why="The last block of K that is not full is left out of the sum.",
    ),
    _small(
        "small-batch-forgets-router-weight",
        "            scale *= tl.load(weights_ptr + pair).to(tl.float32)\n",
        "            scale *= 1.0\n",
        source="sglang #32241",
        why="The router weight is lost where a batch is small.",
    ),
)
