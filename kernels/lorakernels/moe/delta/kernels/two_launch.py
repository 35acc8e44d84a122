"""Triton kernels of the MoE delta as two launches, a shrink and an expand with an fp32 shrink
output between them: out[p] += w[p] * scale * (x_row @ A.T) @ B.T for each token-expert pair p, with
A, B and scale of the pair's slot and expert.

All kernels of the delta read a live rank for every slot and slice, and none has a grid that
depends on how many adapters a batch has.

Names: x [M or P, K], A [L, E or 1, S, R, K], B [L, E or 1, N, R], shrink output [splits, P, S*R]
fp32, out [P, N]; P pairs, L slots, E experts, S slices, R rank of the buffers. The row of x of pair
p is p // ROWS_PER_X.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lorakernels.common.jit import dot, end_of_sum, load_shrunk, locate_slice, start_of_sum


@triton.jit
def moe_shrink_kernel(
    x_ptr,
    a_ptr,
    ranks_ptr,
    scales_ptr,
    tile_slots_ptr,
    tile_experts_ptr,
    tile_pairs_ptr,
    num_tiles_ptr,
    shrunk_ptr,
    stride_xm,
    stride_xk,
    stride_a_slot,
    stride_a_expert,
    stride_shrunk_split,
    last_tile,
    K: tl.constexpr,
    ROWS_PER_X: tl.constexpr,
    R: tl.constexpr,
    SR: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALED: tl.constexpr,
    IEEE: tl.constexpr,
    PDL: tl.constexpr,
):
    # grid (chunks of BLOCK_N ranks, split-K partials, tiles); see lora_shrink_kernel for the waits.
    # SCALED: ranks are stored times their scale
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    S: tl.constexpr = SR // R
    first_tile = tl.program_id(2)
    split = tl.program_id(1)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, HEIGHT)
    offs_k = tl.arange(0, BLOCK_K)
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), tl.num_programs(1))
    k_begin = split * steps * BLOCK_K
    k_end = tl.minimum(k_begin + steps * BLOCK_K, K)
    offs_x = (k_begin + offs_k).to(tl.int64) * stride_xk
    split_ptr = shrunk_ptr + split.to(tl.int64) * stride_shrunk_split

    slot = tl.load(tile_slots_ptr + first_tile)
    expert = tl.load(tile_experts_ptr + first_tile)
    pairs = tl.load(tile_pairs_ptr + first_tile * HEIGHT + offs_m)
    num_tiles = tl.load(num_tiles_ptr)
    for tile in tl.range(first_tile, num_tiles, tl.num_programs(2), num_stages=1):
        live_m = pairs >= 0
        live_rank = tl.load(ranks_ptr + slot * S + offs_n // R, mask=offs_n < SR, other=0)
        live_n = offs_n % R < live_rank
        if SCALED:
            scale = tl.load(scales_ptr + slot * S + offs_n // R, mask=offs_n < SR, other=0.0)
        x_rows = (pairs // ROWS_PER_X).to(tl.int64) * stride_xm
        x_ptrs = x_ptr + x_rows[:, None] + offs_x[None, :]
        a_tile = a_ptr + slot.to(tl.int64) * stride_a_slot + expert.to(tl.int64) * stride_a_expert
        a_ptrs = a_tile + k_begin + offs_n.to(tl.int64)[None, :] * K + offs_k[:, None]
        rows_ptr = split_ptr + pairs.to(tl.int64)[:, None] * SR
        next_tile = tl.minimum(tile + tl.num_programs(2), last_tile)
        slot = tl.load(tile_slots_ptr + next_tile)
        expert = tl.load(tile_experts_ptr + next_tile)
        pairs = tl.load(tile_pairs_ptr + next_tile * HEIGHT + offs_m)

        if tl.max(live_rank, axis=0) > 0:
            acc = tl.zeros([HEIGHT, BLOCK_N], dtype=tl.float32)
            for k in range(k_begin, k_end, BLOCK_K):
                if K % BLOCK_K == 0:
                    x = tl.load(x_ptrs, mask=live_m[:, None], other=0.0)
                    a = tl.load(a_ptrs, mask=live_n[None, :], other=0.0)
                else:
                    live_k = k + offs_k < K
                    x = tl.load(x_ptrs, mask=live_m[:, None] & live_k[None, :], other=0.0)
                    a = tl.load(a_ptrs, mask=live_n[None, :] & live_k[:, None], other=0.0)
                acc = dot(x, a, acc, IEEE)
                x_ptrs += tl.cast(stride_xk, tl.int64) * BLOCK_K
                a_ptrs += BLOCK_K
            if SCALED:
                acc *= scale[None, :]
            live_cells = live_m[:, None] & (offs_n < SR)[None, :]
            tl.store(
                rows_ptr + offs_n[None, :], acc.to(shrunk_ptr.dtype.element_ty), mask=live_cells
            )


@triton.jit
def moe_expand_kernel(
    shrunk_ptr,
    b_ptr,
    ranks_ptr,
    scales_ptr,
    weights_ptr,
    tile_slots_ptr,
    tile_experts_ptr,
    tile_pairs_ptr,
    num_tiles_ptr,
    out_ptr,
    stride_om,
    stride_on,
    stride_b_slot,
    stride_b_expert,
    stride_shrunk_split,
    last_tile,
    WIDTHS: tl.constexpr,
    R: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH_ALIGN: tl.constexpr,
    RANK_ALIGN: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ADD: tl.constexpr,
    IEEE: tl.constexpr,
    PDL: tl.constexpr,
):
    # grid (groups of GROUP column blocks, tiles)
    S: tl.constexpr = len(WIDTHS)
    slice_id, column, start, width = locate_slice(
        tl.program_id(0), WIDTHS, BLOCK_N * GROUP, WIDTH_ALIGN
    )
    first_tile = tl.program_id(1)
    offs_m = tl.arange(0, HEIGHT)
    offs_n = column + tl.arange(0, BLOCK_N)
    offs_r = tl.arange(0, BLOCK_R)
    columns = (start + offs_n).to(tl.int64)
    LATE: tl.constexpr = b_ptr.dtype.element_ty == tl.float16

    slot = tl.load(tile_slots_ptr + first_tile)
    expert = tl.load(tile_experts_ptr + first_tile)
    pairs = tl.load(tile_pairs_ptr + first_tile * HEIGHT + offs_m)
    num_tiles = tl.load(num_tiles_ptr)
    # never pipelined: the compiler would fetch the shrink output ahead of the wait
    for tile in tl.range(first_tile, num_tiles, tl.num_programs(1), num_stages=1):
        rank = tl.load(ranks_ptr + slot * S + slice_id)
        scale = tl.load(scales_ptr + slot * S + slice_id)
        live_m = (pairs >= 0) & (rank > 0)
        rows = pairs.to(tl.int64)
        if WEIGHTED:
            weight = tl.load(weights_ptr + pairs, mask=live_m, other=0.0).to(tl.float32) * scale
        else:
            weight = tl.zeros([HEIGHT], dtype=tl.float32) + scale
        early = tl.full([HEIGHT], 1.0, dtype=tl.float32) if LATE else weight
        out_ptrs = out_ptr + rows[:, None] * stride_om + columns[None, :] * stride_on
        b_tile = b_ptr + slot.to(tl.int64) * stride_b_slot + expert.to(tl.int64) * stride_b_expert
        b_ptrs = b_tile + columns[None, :] * R + offs_r[:, None]
        h_ptrs = shrunk_ptr + rows[:, None] * (S * R) + slice_id * R + offs_r[None, :]
        next_tile = tl.minimum(tile + tl.num_programs(1), last_tile)
        slot = tl.load(tile_slots_ptr + next_tile)
        expert = tl.load(tile_experts_ptr + next_tile)
        pairs = tl.load(tile_pairs_ptr + next_tile * HEIGHT + offs_m)

        # whole vectors are loaded: past the live rank the shrink output is zero and so is B
        loaded_rank = tl.cdiv(rank, RANK_ALIGN) * RANK_ALIGN
        live_r = (offs_r < loaded_rank)[:, None]
        live_h = live_m[:, None] & (offs_r < loaded_rank)[None, :]
        if GROUP == 1:
            live_n = (offs_n < width)[None, :]
            if ADD:
                previous = tl.load(out_ptrs, mask=live_m[:, None] & live_n, other=0.0)
                previous = previous.to(tl.float32)
            else:
                previous = tl.zeros([HEIGHT, BLOCK_N], dtype=tl.float32)
            b = tl.load(b_ptrs, mask=live_n & live_r, other=0.0)
            if PDL:
                gdc_wait()
            h = load_shrunk(h_ptrs, live_h, stride_shrunk_split, SPLITS) * early[:, None]
            acc = dot(h.to(b.dtype), b, start_of_sum(previous, LATE), IEEE)
            for r in tl.range(BLOCK_R, R, BLOCK_R, num_stages=1):
                more_r = r + offs_r < loaded_rank
                live_h = live_m[:, None] & more_r[None, :]
                h = load_shrunk(h_ptrs + r, live_h, stride_shrunk_split, SPLITS) * early[:, None]
                b = tl.load(b_ptrs + r, mask=live_n & more_r[:, None], other=0.0)
                acc = dot(h.to(b.dtype), b, acc, IEEE)
            total = end_of_sum(acc, previous, weight[:, None], LATE)
            tl.store(out_ptrs, total.to(b.dtype), mask=live_m[:, None] & live_n)
        else:
            if PDL:
                gdc_wait()
            h = load_shrunk(h_ptrs, live_h, stride_shrunk_split, SPLITS) * early[:, None]
            h = h.to(b_ptr.dtype.element_ty)
            # pipelined: safe from triton #9433 because h does not change in the loop and each
            # dot is complete before the next iteration
            for block in tl.range(0, GROUP, num_stages=STAGES):
                live_n = (offs_n + block * BLOCK_N < width)[None, :]
                ptrs = out_ptrs + tl.cast(stride_on, tl.int64) * (block * BLOCK_N)
                b = tl.load(b_ptrs + block * BLOCK_N * R, mask=live_n & live_r, other=0.0)
                if ADD:
                    previous = tl.load(ptrs, mask=live_m[:, None] & live_n, other=0.0)
                else:
                    previous = tl.zeros([HEIGHT, BLOCK_N], dtype=tl.float32)
                acc = dot(h, b, start_of_sum(previous, LATE), IEEE)
                total = end_of_sum(acc, previous, weight[:, None], LATE)
                tl.store(ptrs, total.to(b.dtype), mask=live_m[:, None] & live_n)
    if PDL:
        gdc_wait()
