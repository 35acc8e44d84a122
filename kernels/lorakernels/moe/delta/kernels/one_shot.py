"""Triton kernel of the MoE delta as one launch: the ranks of a tile's pairs stay on chip between
the two products. Names as in two_launch.py."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from lorakernels.common.jit import dot, end_of_sum, start_of_sum


@triton.jit
def _shrink_rows(
    x_ptrs,
    a_ptrs,
    live_m,
    live_n,
    K,
    stride_xk,
    HEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    IEEE: tl.constexpr,
):
    """[HEIGHT, BLOCK_R]: the ranks of one slice."""
    offs_k = tl.arange(0, BLOCK_K)
    h = tl.zeros([HEIGHT, BLOCK_R], dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs, mask=live_m[:, None], other=0.0)
            a = tl.load(a_ptrs, mask=live_n[None, :], other=0.0)
        else:
            live_k = k + offs_k < K
            x = tl.load(x_ptrs, mask=live_m[:, None] & live_k[None, :], other=0.0)
            a = tl.load(a_ptrs, mask=live_n[None, :] & live_k[:, None], other=0.0)
        h = dot(x, a, h, IEEE)
        x_ptrs += tl.cast(stride_xk, tl.int64) * BLOCK_K
        a_ptrs += BLOCK_K
    return h


@triton.jit
def _shrink_rows_twice(
    x_ptrs,
    a_ptrs,
    up_ptrs,
    live_m,
    live_n,
    live_up,
    K,
    stride_xk,
    HEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    IEEE: tl.constexpr,
):
    """The ranks of two slices, with x read once."""
    offs_k = tl.arange(0, BLOCK_K)
    h = tl.zeros([HEIGHT, BLOCK_R], dtype=tl.float32)
    up = tl.zeros([HEIGHT, BLOCK_R], dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs, mask=live_m[:, None], other=0.0)
            a = tl.load(a_ptrs, mask=live_n[None, :], other=0.0)
            a_up = tl.load(up_ptrs, mask=live_up[None, :], other=0.0)
        else:
            live_k = k + offs_k < K
            x = tl.load(x_ptrs, mask=live_m[:, None] & live_k[None, :], other=0.0)
            a = tl.load(a_ptrs, mask=live_n[None, :] & live_k[:, None], other=0.0)
            a_up = tl.load(up_ptrs, mask=live_up[None, :] & live_k[:, None], other=0.0)
        h = dot(x, a, h, IEEE)
        up = dot(x, a_up, up, IEEE)
        x_ptrs += tl.cast(stride_xk, tl.int64) * BLOCK_K
        a_ptrs += BLOCK_K
        up_ptrs += BLOCK_K
    return h, up


@triton.jit
def _sweep_columns(
    h,
    b_ptrs,
    out_ptrs,
    weight,
    live_m,
    live_r,
    columns,
    R: tl.constexpr,
    stride_on,
    HEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_N: tl.constexpr,
    STAGES: tl.constexpr,
    ADD: tl.constexpr,
    IEEE: tl.constexpr,
):
    """h @ B.T times the weight of each row, block by block over `columns`, added to or stored into
    the output."""
    low: tl.constexpr = b_ptrs.dtype.element_ty
    LATE: tl.constexpr = low == tl.float16
    h = (h if LATE else h * weight[:, None]).to(low)
    offs_n = tl.arange(0, BLOCK_N)
    # a block is so little work that every further instruction counts. Offsets from constant
    # pointers need the fewest, but take registers that higher ranks and tiles need for their blocks
    FROM_START: tl.constexpr = h.shape[1] <= 16 and HEIGHT <= 32
    for n in tl.range(0, columns, BLOCK_N, num_stages=STAGES):
        if EVEN_N:
            live_b = live_r[:, None]
            live_out = live_m[:, None]
        else:
            live_n = (n + offs_n < columns)[None, :]
            live_b = live_r[:, None] & live_n
            live_out = live_m[:, None] & live_n
        # in 32 bits: at most 16 ranks a column
        at = n if FROM_START else 0
        b = tl.load(b_ptrs + at * R, mask=live_b, other=0.0)
        block_ptrs = out_ptrs + at * tl.cast(stride_on, tl.int64)
        if ADD:
            previous = tl.load(block_ptrs, mask=live_out, other=0.0)
        else:
            previous = tl.zeros([HEIGHT, BLOCK_N], dtype=tl.float32)
        acc = dot(h, b, start_of_sum(previous, LATE), IEEE)
        total = end_of_sum(acc, previous, weight[:, None], LATE)
        tl.store(block_ptrs, total.to(b.dtype), mask=live_out)
        if not FROM_START:
            b_ptrs += BLOCK_N * R
            out_ptrs += tl.cast(stride_on, tl.int64) * BLOCK_N


@triton.jit
def moe_one_shot_kernel(
    x_ptr,
    a_ptr,
    b_ptr,
    ranks_ptr,
    scales_ptr,
    weights_ptr,
    tile_slots_ptr,
    tile_experts_ptr,
    tile_pairs_ptr,
    num_tiles_ptr,
    out_ptr,
    stride_xm,
    stride_xk,
    stride_a_slot,
    stride_a_expert,
    stride_b_slot,
    stride_b_expert,
    stride_om,
    stride_on,
    last_tile,
    K: tl.constexpr,
    WIDTHS: tl.constexpr,
    ROWS_PER_X: tl.constexpr,
    R: tl.constexpr,
    WIDTH_ALIGN: tl.constexpr,
    RANK_ALIGN: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    EVEN_N: tl.constexpr,
    STAGES: tl.constexpr,
    PAIRED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ADD: tl.constexpr,
    IEEE: tl.constexpr,
    PDL: tl.constexpr,
):
    # grid (parts of a slice's columns, slices, tiles). A program computes one slice of its tile's
    # pairs, or with PAIRED both of two slices of equal width. The next kernel is not started early:
    # its programs would occupy multiprocessors and spread unevenly over them
    if PDL:
        gdc_wait()
    S: tl.constexpr = len(WIDTHS)
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    slice_id = tl.program_id(1)
    start = 0
    width = 0
    first_column = 0
    for s in tl.static_range(S):
        start = tl.where(slice_id == s, first_column, start)
        width = tl.where(slice_id == s, WIDTHS[s], width)
        first_column += WIDTHS[s]
    start = tl.multiple_of(start, WIDTH_ALIGN)
    width = tl.multiple_of(width, WIDTH_ALIGN)
    blocks = tl.cdiv(tl.cdiv(width, BLOCK_N), tl.num_programs(0))
    part = tl.multiple_of(tl.program_id(0) * blocks * BLOCK_N, BLOCK_N)
    columns = tl.minimum(blocks * BLOCK_N, width - part)
    first_tile = tl.program_id(2)
    offs_m = tl.arange(0, HEIGHT)
    offs_k = tl.arange(0, BLOCK_K)
    offs_r = tl.arange(0, BLOCK_R)
    offs_n = (start + part + tl.arange(0, BLOCK_N)).to(tl.int64)
    a_rows = (slice_id * R + offs_r).to(tl.int64) * K

    slot = tl.load(tile_slots_ptr + first_tile)
    expert = tl.load(tile_experts_ptr + first_tile)
    pairs = tl.load(tile_pairs_ptr + first_tile * HEIGHT + offs_m)
    num_tiles = tl.load(num_tiles_ptr)
    for tile in tl.range(first_tile, num_tiles, tl.num_programs(2), num_stages=1):
        live_m = pairs >= 0
        table = slot * S + slice_id
        # small values are fetched ahead: after the shrink their latency would add up
        rank = tl.load(ranks_ptr + table)
        scale = tl.load(scales_ptr + table)
        if PAIRED:
            up_rank = tl.load(ranks_ptr + table + 1)
            up_scale = tl.load(scales_ptr + table + 1)
        if WEIGHTED:
            weight = tl.load(weights_ptr + pairs, mask=live_m, other=0.0).to(tl.float32)
        else:
            weight = tl.full([HEIGHT], 1.0, dtype=tl.float32)
        x_rows = (pairs // ROWS_PER_X).to(tl.int64) * stride_xm
        x_ptrs = x_ptr + x_rows[:, None] + offs_k.to(tl.int64)[None, :] * stride_xk
        a_tile = a_ptr + slot.to(tl.int64) * stride_a_slot + expert.to(tl.int64) * stride_a_expert
        a_ptrs = a_tile + a_rows[None, :] + offs_k[:, None]
        b_tile = b_ptr + slot.to(tl.int64) * stride_b_slot + expert.to(tl.int64) * stride_b_expert
        b_ptrs = b_tile + offs_n[None, :] * R + offs_r[:, None]
        out_ptrs = out_ptr + pairs.to(tl.int64)[:, None] * stride_om + offs_n[None, :] * stride_on
        next_tile = tl.minimum(tile + tl.num_programs(2), last_tile)
        slot = tl.load(tile_slots_ptr + next_tile)
        expert = tl.load(tile_experts_ptr + next_tile)
        pairs = tl.load(tile_pairs_ptr + next_tile * HEIGHT + offs_m)

        if PAIRED:
            h, up = _shrink_rows_twice(
                x_ptrs,
                a_ptrs,
                a_ptrs + R * K,
                live_m,
                offs_r < rank,
                offs_r < up_rank,
                K,
                stride_xk,
                HEIGHT,
                BLOCK_R,
                BLOCK_K,
                EVEN_K,
                IEEE,
            )
            _sweep_columns(
                up,
                b_ptrs + WIDTHS[0] * R,
                out_ptrs + tl.cast(stride_on, tl.int64) * WIDTHS[0],
                weight * up_scale,
                live_m & (up_rank > 0),
                offs_r < tl.cdiv(up_rank, RANK_ALIGN) * RANK_ALIGN,
                columns,
                R,
                stride_on,
                HEIGHT,
                BLOCK_N,
                EVEN_N,
                STAGES,
                ADD,
                IEEE,
            )
        else:
            # without an adapter the loop over K has no steps and nothing is loaded
            h = _shrink_rows(
                x_ptrs,
                a_ptrs,
                live_m,
                offs_r < rank,
                tl.where(rank > 0, K, 0),
                stride_xk,
                HEIGHT,
                BLOCK_R,
                BLOCK_K,
                EVEN_K,
                IEEE,
            )
        _sweep_columns(
            h,
            b_ptrs,
            out_ptrs,
            weight * scale,
            live_m & (rank > 0),
            offs_r < tl.cdiv(rank, RANK_ALIGN) * RANK_ALIGN,
            columns,
            R,
            stride_on,
            HEIGHT,
            BLOCK_N,
            EVEN_N,
            STAGES,
            ADD,
            IEEE,
        )
