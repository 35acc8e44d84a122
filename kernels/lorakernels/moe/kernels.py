"""Triton kernels of the MoE delta: out[p] += w[p] * scale * (x_row @ A.T) @ B.T for each pair p,
with A, B and scale of the pair's slot and expert.

Three ways to the same sums, see plan.py: shrink and expand as two launches with an fp32 bridge
between them; one launch that keeps the ranks of a tile on chip; one launch without tiles for a
handful of pairs. Each reads a live rank for every slot and slice, and none has a grid that depends
on how many adapters a batch has.

Names: x [M or P, K], A [L, E or 1, S, R, K], B [L, E or 1, N, R], bridge [planes, P, S*R] fp32,
out [P, N]; P pairs, L slots, E experts, S slices, R rank of the buffers. x row of a pair: p //
ROWS_PER_X.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lorakernels.dense.kernels import _dot, _load_bridge, _locate_slice


@triton.jit
def _rank_of(ranks_ptr, slot, expert, S: tl.constexpr, slice_id):
    """Live rank of a slice; 0 where there is no expert."""
    rank = tl.load(ranks_ptr + tl.maximum(slot, 0) * S + slice_id)
    return tl.where((slot >= 0) & (expert >= 0), rank, 0)


@triton.jit
def moe_shrink_kernel(
    x_ptr,
    a_ptr,
    ranks_ptr,
    tile_slots_ptr,
    tile_experts_ptr,
    tile_pairs_ptr,
    num_tiles_ptr,
    bridge_ptr,
    stride_xm,
    stride_xk,
    stride_a_slot,
    stride_a_expert,
    stride_bridge_plane,
    last_tile,
    K,
    ROWS_PER_X: tl.constexpr,
    R: tl.constexpr,
    SR: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    IEEE: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
):
    # grid (chunks of BLOCK_N ranks, planes, tiles); see lora_shrink_kernel for the waits
    if PDL:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    S: tl.constexpr = SR // R
    first_tile = tl.program_id(2)
    plane = tl.program_id(1)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, HEIGHT)
    offs_k = tl.arange(0, BLOCK_K)
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), tl.num_programs(1))
    k_begin = plane * steps * BLOCK_K
    k_end = tl.minimum(k_begin + steps * BLOCK_K, K)
    offs_x = (k_begin + offs_k).to(tl.int64) * stride_xk
    plane_ptr = bridge_ptr + plane.to(tl.int64) * stride_bridge_plane

    slot = tl.load(tile_slots_ptr + first_tile)
    expert = tl.load(tile_experts_ptr + first_tile)
    pairs = tl.load(tile_pairs_ptr + first_tile * HEIGHT + offs_m)
    num_tiles = tl.load(num_tiles_ptr)
    for tile in tl.range(first_tile, num_tiles, tl.num_programs(2), num_stages=1):
        live_m = pairs >= 0
        live_rank = tl.load(ranks_ptr + slot * S + offs_n // R, mask=offs_n < SR, other=0)
        live_n = offs_n % R < live_rank
        x_rows = (pairs // ROWS_PER_X).to(tl.int64) * stride_xm
        x_ptrs = x_ptr + x_rows[:, None] + offs_x[None, :]
        a_tile = a_ptr + slot.to(tl.int64) * stride_a_slot + expert.to(tl.int64) * stride_a_expert
        a_ptrs = a_tile + k_begin + offs_n.to(tl.int64)[None, :] * K + offs_k[:, None]
        rows_ptr = plane_ptr + pairs.to(tl.int64)[:, None] * SR
        next_tile = tl.minimum(tile + tl.num_programs(2), last_tile)
        slot = tl.load(tile_slots_ptr + next_tile)
        expert = tl.load(tile_experts_ptr + next_tile)
        pairs = tl.load(tile_pairs_ptr + next_tile * HEIGHT + offs_m)

        if tl.max(live_rank, axis=0) > 0:
            acc = tl.zeros([HEIGHT, BLOCK_N], dtype=tl.float32)
            for k in range(k_begin, k_end, BLOCK_K):
                if EVEN_K:
                    x = tl.load(x_ptrs, mask=live_m[:, None], other=0.0)
                    a = tl.load(a_ptrs, mask=live_n[None, :], other=0.0)
                else:
                    live_k = k + offs_k < K
                    x = tl.load(x_ptrs, mask=live_m[:, None] & live_k[None, :], other=0.0)
                    a = tl.load(a_ptrs, mask=live_n[None, :] & live_k[:, None], other=0.0)
                acc = _dot(x, a, acc, IEEE)
                x_ptrs += BLOCK_K * stride_xk
                a_ptrs += BLOCK_K
            live_cells = live_m[:, None] & (offs_n < SR)[None, :]
            tl.store(rows_ptr + offs_n[None, :], acc, mask=live_cells)
    if PDL and not EARLY:
        gdc_launch_dependents()


@triton.jit
def moe_expand_kernel(
    bridge_ptr,
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
    stride_bridge_plane,
    last_tile,
    WIDTHS: tl.constexpr,
    R: tl.constexpr,
    PLANES: tl.constexpr,
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
    slice_id, column, start, width = _locate_slice(
        tl.program_id(0), WIDTHS, BLOCK_N * GROUP, WIDTH_ALIGN
    )
    first_tile = tl.program_id(1)
    offs_m = tl.arange(0, HEIGHT)
    offs_n = column + tl.arange(0, BLOCK_N)
    offs_r = tl.arange(0, BLOCK_R)
    columns = (start + offs_n).to(tl.int64)

    slot = tl.load(tile_slots_ptr + first_tile)
    expert = tl.load(tile_experts_ptr + first_tile)
    pairs = tl.load(tile_pairs_ptr + first_tile * HEIGHT + offs_m)
    num_tiles = tl.load(num_tiles_ptr)
    # never pipelined: the compiler would fetch the bridge ahead of the wait
    for tile in tl.range(first_tile, num_tiles, tl.num_programs(1), num_stages=1):
        rank = tl.load(ranks_ptr + slot * S + slice_id)
        scale = tl.load(scales_ptr + slot * S + slice_id)
        live_m = (pairs >= 0) & (rank > 0)
        rows = pairs.to(tl.int64)
        if WEIGHTED:
            weight = tl.load(weights_ptr + pairs, mask=live_m, other=0.0).to(tl.float32) * scale
        else:
            weight = tl.zeros([HEIGHT], dtype=tl.float32) + scale
        out_ptrs = out_ptr + rows[:, None] * stride_om + columns[None, :] * stride_on
        b_tile = b_ptr + slot.to(tl.int64) * stride_b_slot + expert.to(tl.int64) * stride_b_expert
        b_ptrs = b_tile + columns[None, :] * R + offs_r[:, None]
        h_ptrs = bridge_ptr + rows[:, None] * (S * R) + slice_id * R + offs_r[None, :]
        next_tile = tl.minimum(tile + tl.num_programs(1), last_tile)
        slot = tl.load(tile_slots_ptr + next_tile)
        expert = tl.load(tile_experts_ptr + next_tile)
        pairs = tl.load(tile_pairs_ptr + next_tile * HEIGHT + offs_m)

        # whole vectors are loaded: past the live rank the bridge is zero and so is B
        loaded_rank = tl.cdiv(rank, RANK_ALIGN) * RANK_ALIGN
        live_r = (offs_r < loaded_rank)[:, None]
        live_h = live_m[:, None] & (offs_r < loaded_rank)[None, :]
        if GROUP == 1:
            live_n = (offs_n < width)[None, :]
            if ADD:
                acc = tl.load(out_ptrs, mask=live_m[:, None] & live_n, other=0.0).to(tl.float32)
            else:
                acc = tl.zeros([HEIGHT, BLOCK_N], dtype=tl.float32)
            b = tl.load(b_ptrs, mask=live_n & live_r, other=0.0)
            if PDL:
                gdc_wait()
            h = _load_bridge(h_ptrs, live_h, stride_bridge_plane, PLANES) * weight[:, None]
            acc = _dot(h.to(b.dtype), b, acc, IEEE)
            for r in tl.range(BLOCK_R, R, BLOCK_R, num_stages=1):
                more_r = r + offs_r < loaded_rank
                live_h = live_m[:, None] & more_r[None, :]
                h = _load_bridge(h_ptrs + r, live_h, stride_bridge_plane, PLANES)
                b = tl.load(b_ptrs + r, mask=live_n & more_r[:, None], other=0.0)
                acc = _dot((h * weight[:, None]).to(b.dtype), b, acc, IEEE)
            tl.store(out_ptrs, acc.to(b.dtype), mask=live_m[:, None] & live_n)
        else:
            if PDL:
                gdc_wait()
            h = _load_bridge(h_ptrs, live_h, stride_bridge_plane, PLANES) * weight[:, None]
            h = h.to(b_ptr.dtype.element_ty)
            # pipelined: safe from triton #9433 because h does not change in the loop and each
            # dot is complete before the next iteration
            for block in tl.range(0, GROUP, num_stages=STAGES):
                live_n = (offs_n + block * BLOCK_N < width)[None, :]
                ptrs = out_ptrs + tl.cast(stride_on, tl.int64) * (block * BLOCK_N)
                b = tl.load(b_ptrs + block * BLOCK_N * R, mask=live_n & live_r, other=0.0)
                if ADD:
                    acc = tl.load(ptrs, mask=live_m[:, None] & live_n, other=0.0).to(tl.float32)
                else:
                    acc = tl.zeros([HEIGHT, BLOCK_N], dtype=tl.float32)
                acc = _dot(h, b, acc, IEEE)
                tl.store(ptrs, acc.to(b.dtype), mask=live_m[:, None] & live_n)
    if PDL:
        gdc_wait()


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
        h = _dot(x, a, h, IEEE)
        x_ptrs += BLOCK_K * stride_xk
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
        h = _dot(x, a, h, IEEE)
        up = _dot(x, a_up, up, IEEE)
        x_ptrs += BLOCK_K * stride_xk
        a_ptrs += BLOCK_K
        up_ptrs += BLOCK_K
    return h, up


@triton.jit
def _sweep_columns(
    h,
    b_ptrs,
    out_ptrs,
    live_m,
    live_r,
    columns,
    R: tl.constexpr,
    stride_on,
    HEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    ADD: tl.constexpr,
    IEEE: tl.constexpr,
):
    """h @ B.T, block by block over `columns`, added to or stored into the output."""
    offs_n = tl.arange(0, BLOCK_N)
    for n in tl.range(0, columns, BLOCK_N, num_stages=STAGES):
        live_n = (n + offs_n < columns)[None, :]
        b = tl.load(b_ptrs, mask=live_n & live_r[:, None], other=0.0)
        if ADD:
            acc = tl.load(out_ptrs, mask=live_m[:, None] & live_n, other=0.0).to(tl.float32)
        else:
            acc = tl.zeros([HEIGHT, BLOCK_N], dtype=tl.float32)
        acc = _dot(h, b, acc, IEEE)
        tl.store(out_ptrs, acc.to(b.dtype), mask=live_m[:, None] & live_n)
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
    K,
    WIDTHS: tl.constexpr,
    ROWS_PER_X: tl.constexpr,
    R: tl.constexpr,
    WIDTH_ALIGN: tl.constexpr,
    RANK_ALIGN: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    PAIRED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ADD: tl.constexpr,
    IEEE: tl.constexpr,
    PDL: tl.constexpr,
):
    # grid (parts of a slice's columns, slices, tiles). A program holds one slice of its tile's
    # pairs, or PAIRED both of two slices of equal width: their ranks stay on chip between the
    # two products
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    S: tl.constexpr = len(WIDTHS)
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
        rank = tl.load(ranks_ptr + table)
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

        low: tl.constexpr = b_ptr.dtype.element_ty
        if PAIRED:
            up_rank = tl.load(ranks_ptr + table + 1)
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
            up = up * (weight * tl.load(scales_ptr + table + 1))[:, None]
            _sweep_columns(
                up.to(low),
                b_ptrs + WIDTHS[0] * R,
                out_ptrs + tl.cast(stride_on, tl.int64) * WIDTHS[0],
                live_m & (up_rank > 0),
                offs_r < tl.cdiv(up_rank, RANK_ALIGN) * RANK_ALIGN,
                columns,
                R,
                stride_on,
                HEIGHT,
                BLOCK_N,
                STAGES,
                ADD,
                IEEE,
            )
        else:
            # without an adapter nothing is loaded, and K shrinks to nothing
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
        h = h * (weight * tl.load(scales_ptr + table))[:, None]
        _sweep_columns(
            h.to(low),
            b_ptrs,
            out_ptrs,
            live_m & (rank > 0),
            offs_r < tl.cdiv(rank, RANK_ALIGN) * RANK_ALIGN,
            columns,
            R,
            stride_on,
            HEIGHT,
            BLOCK_N,
            STAGES,
            ADD,
            IEEE,
        )


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
    K,
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
    # grid (blocks of columns, pairs): no tile, no tensor core, sums in fp32 throughout. Each
    # program shrinks for itself, so that one launch does
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    S: tl.constexpr = len(WIDTHS)
    slice_id, column, start, width = _locate_slice(tl.program_id(0), WIDTHS, BLOCK_N, WIDTH_ALIGN)
    pair = tl.program_id(1)
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
        # what does not depend on the shrink is fetched ahead of it
        loaded_rank = tl.cdiv(rank, RANK_ALIGN) * RANK_ALIGN
        live_n = offs_n < width
        b_tile = b_ptr + slot.to(tl.int64) * stride_b_slot + expert.to(tl.int64) * stride_b_expert
        b_ptrs = b_tile + columns[:, None] * R + offs_r[None, :]
        b = tl.load(b_ptrs, mask=live_n[:, None] & (offs_r < loaded_rank)[None, :], other=0.0)
        out_ptrs = out_ptr + row * stride_om + columns * stride_on

        x_row = x_ptr + (pair // ROWS_PER_X).to(tl.int64) * stride_xm
        a_tile = a_ptr + slot.to(tl.int64) * stride_a_slot + expert.to(tl.int64) * stride_a_expert
        a_ptrs = a_tile + (slice_id * R + offs_r).to(tl.int64)[:, None] * K + offs_k[None, :]
        live_r = (offs_r < rank)[:, None]
        acc = tl.zeros([BLOCK_R, BLOCK_K], dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            live_k = k + offs_k < K
            x = tl.load(x_row + (k + offs_k).to(tl.int64) * stride_xk, mask=live_k, other=0.0)
            a = tl.load(a_ptrs + k, mask=live_r & live_k[None, :], other=0.0)
            acc += a.to(tl.float32) * x.to(tl.float32)[None, :]
        h = tl.sum(acc, axis=1) * scale
        delta = tl.sum(b.to(tl.float32) * h[None, :], axis=1)
        if ADD:
            delta += tl.load(out_ptrs, mask=live_n, other=0.0).to(tl.float32)
        tl.store(out_ptrs, delta.to(b.dtype), mask=live_n)
