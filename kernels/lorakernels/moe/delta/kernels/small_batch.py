"""Triton kernel of the MoE delta for a handful of pairs: no tile, no alignment, no tensor core.
Names as in two_launch.py."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from lorakernels.common.jit import locate_slice


@triton.jit
def _rank_of(ranks_ptr, slot, expert, S: tl.constexpr, slice_id):
    """Live rank of a slice; 0 where there is no expert."""
    rank = tl.load(ranks_ptr + tl.maximum(slot, 0) * S + slice_id)
    return tl.where((slot >= 0) & (expert >= 0), rank, 0)


@triton.jit
def moe_small_batch_kernel(
    x_ptr,
    a_ptr,
    b_ptr,
    ranks_ptr,
    scales_ptr,
    weights_ptr,
    pair_slots_ptr,
    pair_experts_ptr,
    out_ptr,
    stride_xm,
    stride_xk,
    stride_a_slot,
    stride_a_expert,
    stride_b_slot,
    stride_b_expert,
    stride_om,
    stride_on,
    K: tl.constexpr,
    WIDTHS: tl.constexpr,
    ROWS_PER_X: tl.constexpr,
    R: tl.constexpr,
    WIDTH_ALIGN: tl.constexpr,
    RANK_ALIGN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    # grid (pairs, blocks of columns): no tile, no tensor core, sums in fp32 throughout. Each
    # program repeats the shrink, so that one launch is enough. As in one_shot.py the next kernel is
    # not started early
    if PDL:
        gdc_wait()
    S: tl.constexpr = len(WIDTHS)
    slice_id, column, start, width = locate_slice(tl.program_id(1), WIDTHS, BLOCK_N, WIDTH_ALIGN)
    pair = tl.program_id(0)
    slot = tl.load(pair_slots_ptr + pair)
    expert = tl.load(pair_experts_ptr + pair)
    rank = _rank_of(ranks_ptr, slot, expert, S, slice_id)
    if rank > 0:
        offs_k = tl.arange(0, BLOCK_K)
        offs_r = tl.arange(0, BLOCK_R)
        offs_n = column + tl.arange(0, BLOCK_N)
        columns = (start + offs_n).to(tl.int64)
        row = pair.to(tl.int64)
        scale = tl.load(scales_ptr + slot * S + slice_id)
        if WEIGHTED:
            scale *= tl.load(weights_ptr + pair).to(tl.float32)
        # loads that do not depend on the shrink come before it
        loaded_rank = tl.cdiv(rank, RANK_ALIGN) * RANK_ALIGN
        live_n = offs_n < width
        b_tile = b_ptr + slot.to(tl.int64) * stride_b_slot + expert.to(tl.int64) * stride_b_expert
        b_ptrs = b_tile + columns[:, None] * R + offs_r[None, :]
        b = tl.load(b_ptrs, mask=live_n[:, None] & (offs_r < loaded_rank)[None, :], other=0.0)
        out_ptrs = out_ptr + row * stride_om + columns * stride_on
        if ADD:
            previous = tl.load(out_ptrs, mask=live_n, other=0.0)

        x_row = x_ptr + (pair // ROWS_PER_X).to(tl.int64) * stride_xm
        a_tile = a_ptr + slot.to(tl.int64) * stride_a_slot + expert.to(tl.int64) * stride_a_expert
        a_ptrs = a_tile + (slice_id * R + offs_r).to(tl.int64)[:, None] * K + offs_k[None, :]
        live_r = (offs_r < rank)[:, None]
        acc = tl.zeros([BLOCK_R, BLOCK_K], dtype=tl.float32)
        # the loads of several steps are on their way at once; in fp32 they would not fit
        STEPS: tl.constexpr = 1 if x_ptr.dtype.element_ty == tl.float32 else 4
        for k in tl.range(0, K, BLOCK_K, loop_unroll_factor=STEPS):
            live_k = k + offs_k < K
            x = tl.load(x_row + (k + offs_k).to(tl.int64) * stride_xk, mask=live_k, other=0.0)
            a = tl.load(a_ptrs + k, mask=live_r & live_k[None, :], other=0.0)
            acc += a.to(tl.float32) * x.to(tl.float32)[None, :]
        h = tl.sum(acc, axis=1)
        delta = tl.sum(b.to(tl.float32) * h[None, :], axis=1) * scale
        if ADD:
            delta += previous.to(tl.float32)
        tl.store(out_ptrs, delta.to(b.dtype), mask=live_n)
