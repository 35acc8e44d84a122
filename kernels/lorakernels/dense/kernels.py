"""Triton kernels of the dense delta: out += scale * (x @ A.T) @ B.T, per row's slot.

All kernels walk the compact tile list of BatchMetadata with a stride of their grid, so the
grid depends on the batch size alone. A program of the shrink computes as many ranks, over several
slices, as its plan says. K may be split; the expand then adds up the split-K partials in a fixed
order: no atomics, no memset, the same bits every time.

Names: x [M, K], A [L, S*R, K], B [L, N, R], shrink output [P, tiles * HEIGHT, S*R] fp32 in the row
order of the tiles, out [M, N]; L slots, S slices, R rank of the buffers, P split-K partials.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lorakernels.common.jit import (
    dot,
    end_of_sum,
    load_output,
    load_shrunk,
    locate_slice,
    start_of_sum,
)


@triton.jit
def lora_shrink_kernel(
    x_ptr,
    a_ptr,
    ranks_ptr,
    tile_slots_ptr,
    tile_rows_ptr,
    num_tiles_ptr,
    shrunk_ptr,
    stride_xm,
    stride_xk,
    stride_shrunk_split,
    last_tile,
    K,
    R: tl.constexpr,
    SR: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALL_RANKS: tl.constexpr,
    IEEE: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
):
    # grid (tiles, split-K partials, chunks of BLOCK_N ranks). The wait comes before any exit: the
    # expand relies on everything before the shrink being complete once all programs have passed it
    if PDL:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    first_tile = tl.program_id(0)
    split = tl.program_id(1)
    offs_n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, HEIGHT)
    offs_k = tl.arange(0, BLOCK_K)
    S: tl.constexpr = SR // R
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), tl.num_programs(1))
    k_begin = split * steps * BLOCK_K
    k_end = tl.minimum(k_begin + steps * BLOCK_K, K)
    # in a transposed x this is the stride of rows, so offsets need 64 bits (vllm #53034)
    offs_x = (k_begin + offs_k).to(tl.int64) * stride_xk
    split_ptr = shrunk_ptr + split.to(tl.int64) * stride_shrunk_split

    # the entries of the next tile are fetched ahead, those of the first one along with the count
    slot = tl.load(tile_slots_ptr + first_tile)
    rows = tl.load(tile_rows_ptr + first_tile * HEIGHT + offs_m)
    num_tiles = tl.load(num_tiles_ptr)
    for tile in range(first_tile, num_tiles, tl.num_programs(0)):
        live_m = rows >= 0
        live_rank = tl.load(ranks_ptr + slot * S + offs_n // R, mask=offs_n < SR, other=0)
        live_n = offs_n % R < live_rank
        read_n = offs_n < SR if ALL_RANKS else live_n
        # [HEIGHT, BLOCK_K] and [BLOCK_K, BLOCK_N]
        x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * stride_xm + offs_x[None, :]
        a_slot = a_ptr + slot.to(tl.int64) * SR * K + k_begin
        a_ptrs = a_slot + offs_n.to(tl.int64)[None, :] * K + offs_k[:, None]
        next_tile = tl.minimum(tile + tl.num_programs(0), last_tile)
        slot = tl.load(tile_slots_ptr + next_tile)
        rows = tl.load(tile_rows_ptr + next_tile * HEIGHT + offs_m)

        if ALL_RANKS or tl.max(live_rank, axis=0) > 0:
            acc = tl.zeros([HEIGHT, BLOCK_N], dtype=tl.float32)
            for k in range(k_begin, k_end, BLOCK_K):
                live_k = k + offs_k < K
                x = tl.load(x_ptrs, mask=live_m[:, None] & live_k[None, :], other=0.0)
                a = tl.load(a_ptrs, mask=read_n[None, :] & live_k[:, None], other=0.0)
                acc = dot(x, a, acc, IEEE)
                x_ptrs += tl.cast(stride_xk, tl.int64) * BLOCK_K
                a_ptrs += BLOCK_K
            # rows without a token stay unwritten; ranks that the adapter does not have become 0
            row_ptrs = split_ptr + (tile * HEIGHT + offs_m).to(tl.int64)[:, None] * SR
            if ALL_RANKS:
                acc = tl.where(live_n[None, :], acc, 0.0)
            live_cells = live_m[:, None] & (offs_n < SR)[None, :]
            tl.store(row_ptrs + offs_n[None, :], acc, mask=live_cells)
    if PDL and not EARLY:
        gdc_launch_dependents()


@triton.jit
def lora_lookup_kernel(
    ids_ptr,
    a_ptr,
    ranks_ptr,
    tile_slots_ptr,
    tile_rows_ptr,
    num_tiles_ptr,
    shrunk_ptr,
    stride_ids,
    first_id,
    V,
    R: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    # the shrink of one-hot rows, which is a look-up of columns of A [L, 1, R, V] by id: V ids that
    # this tensor-parallel rank holds. Grid (tiles, chunks of BLOCK_R ranks). As in the shrink, the
    # wait comes before any exit
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    offs_m = tl.arange(0, HEIGHT)
    offs_r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    num_tiles = tl.load(num_tiles_ptr)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        slot = tl.load(tile_slots_ptr + tile)
        rows = tl.load(tile_rows_ptr + tile * HEIGHT + offs_m)
        rank = tl.load(ranks_ptr + slot)
        if rank > 0:
            live = rows >= 0
            ids = tl.load(ids_ptr + rows.to(tl.int64) * stride_ids, mask=live, other=-1)
            column = ids.to(tl.int64) - first_id
            # ids of other ranks, and those of no token, have no delta here
            known = live & (column >= 0) & (column < V)
            cells = (slot.to(tl.int64) * R + offs_r)[None, :] * V + column[:, None]
            a = tl.load(a_ptr + cells, mask=known[:, None] & (offs_r < rank)[None, :], other=0.0)
            places = (tile * HEIGHT + offs_m).to(tl.int64)[:, None] * R + offs_r[None, :]
            here = live[:, None] & (offs_r < R)[None, :]
            tl.store(shrunk_ptr + places, a.to(tl.float32), mask=here)


@triton.jit
def lora_expand_kernel(
    shrunk_ptr,
    b_ptr,
    ranks_ptr,
    scales_ptr,
    tile_slots_ptr,
    tile_rows_ptr,
    num_tiles_ptr,
    out_ptr,
    stride_om,
    stride_on,
    stride_shrunk_split,
    last_part,
    WIDTHS: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    R: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH_ALIGN: tl.constexpr,
    RANK_ALIGN: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    IEEE: tl.constexpr,
    PDL: tl.constexpr,
    BEHIND_BASE: tl.constexpr,
    STORE: tl.constexpr,
):
    # grid (groups of GROUP column blocks, parts of tiles): neighbouring programs write
    # neighbouring columns of the same rows. *_ALIGN: powers of two that divide every slice width
    # and R. BEHIND_BASE: before the wait, not only the shrink but also the base product may run.
    # STORE: out is the delta itself in fp32, also of adapters without ranks
    S: tl.constexpr = len(WIDTHS)
    PARTS: tl.constexpr = HEIGHT // BLOCK_M
    slice_id, column, start, width = locate_slice(
        tl.program_id(0), WIDTHS, BLOCK_N * GROUP, WIDTH_ALIGN
    )
    first_part = tl.program_id(1)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = column + tl.arange(0, BLOCK_N)
    offs_r = tl.arange(0, BLOCK_R)
    columns = (start + offs_n).to(tl.int64)
    LATE: tl.constexpr = b_ptr.dtype.element_ty == tl.float16

    slot = tl.load(tile_slots_ptr + first_part // PARTS)
    rows = tl.load(tile_rows_ptr + first_part * BLOCK_M + offs_m)
    num_parts = tl.load(num_tiles_ptr) * PARTS
    # never pipelined: the compiler would fetch the shrink output ahead of the wait
    for part in tl.range(first_part, num_parts, tl.num_programs(1), num_stages=1):
        rank = tl.load(ranks_ptr + slot * S + slice_id)
        scale = tl.load(scales_ptr + slot * S + slice_id)
        early = 1.0 if LATE else scale
        in_batch = rows >= 0
        live_m = in_batch if STORE else in_batch & (rank > 0)
        out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_om + columns[None, :] * stride_on
        b_rows = b_ptr + (slot.to(tl.int64) * OUT_FEATURES + columns) * R
        b_ptrs = b_rows[None, :] + offs_r[:, None]
        next_part = tl.minimum(part + tl.num_programs(1), last_part)
        slot = tl.load(tile_slots_ptr + next_part // PARTS)
        rows = tl.load(tile_rows_ptr + next_part * BLOCK_M + offs_m)

        # whole vectors are loaded: past the live rank the shrink output is zero and so is B
        loaded_rank = tl.cdiv(rank, RANK_ALIGN) * RANK_ALIGN
        live_r = (offs_r < loaded_rank)[:, None]
        live_h = live_m[:, None] & (offs_r < loaded_rank)[None, :]
        cells = (part * BLOCK_M + offs_m).to(tl.int64)[:, None] * (S * R) + slice_id * R
        h_ptrs = shrunk_ptr + cells + offs_r[None, :]

        # base and delta are added in fp32 and rounded once
        if GROUP == 1:
            # what does not depend on the kernel before is fetched before the wait
            live_n = (offs_n < width)[None, :]
            if BEHIND_BASE:
                b = tl.load(b_ptrs, mask=live_n & live_r, other=0.0)
                if PDL:
                    gdc_wait()
                previous = load_output(out_ptrs, live_m[:, None] & live_n, STORE)
            else:
                previous = load_output(out_ptrs, live_m[:, None] & live_n, STORE)
                b = tl.load(b_ptrs, mask=live_n & live_r, other=0.0)
                if PDL:
                    gdc_wait()
            h = load_shrunk(h_ptrs, live_h, stride_shrunk_split, SPLITS) * early
            acc = dot(h.to(b.dtype), b, start_of_sum(previous, LATE), IEEE)
            for r in tl.range(BLOCK_R, R, BLOCK_R, num_stages=1):
                more_r = r + offs_r < loaded_rank
                live_h = live_m[:, None] & more_r[None, :]
                h = load_shrunk(h_ptrs + r, live_h, stride_shrunk_split, SPLITS) * early
                b = tl.load(b_ptrs + r, mask=live_n & more_r[:, None], other=0.0)
                acc = dot(h.to(b.dtype), b, acc, IEEE)
            total = end_of_sum(acc, previous, scale, LATE)
            tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=live_m[:, None] & live_n)
        else:
            if PDL:
                gdc_wait()
            h = load_shrunk(h_ptrs, live_h, stride_shrunk_split, SPLITS) * early
            h = h.to(b_ptr.dtype.element_ty)
            # pipelined: safe from triton #9433 because h does not change in the loop and each
            # dot is complete before the next iteration
            for block in tl.range(0, GROUP, num_stages=STAGES):
                live_n = (offs_n + block * BLOCK_N < width)[None, :]
                ptrs = out_ptrs + tl.cast(stride_on, tl.int64) * (block * BLOCK_N)
                previous = load_output(ptrs, live_m[:, None] & live_n, STORE)
                b = tl.load(b_ptrs + block * BLOCK_N * R, mask=live_n & live_r, other=0.0)
                acc = dot(h, b, start_of_sum(previous, LATE), IEEE)
                total = end_of_sum(acc, previous, scale, LATE)
                tl.store(ptrs, total.to(out_ptr.dtype.element_ty), mask=live_m[:, None] & live_n)
    # also without any tile: later kernels rely on the shrink being complete
    if PDL:
        gdc_wait()


@triton.jit
def lora_add_kernel(
    stored_ptr,
    tile_rows_ptr,
    num_tiles_ptr,
    out_ptr,
    stride_om,
    stride_on,
    last_part,
    OUT_FEATURES: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    # out += stored, the delta [M, N] of an expand with STORE, in the rows of the tiles alone. Grid
    # (column blocks, parts of tiles). The base product may run until the wait, and what is stored
    # comes from another stream: before the wait only the tables are read
    PARTS: tl.constexpr = HEIGHT // BLOCK_M
    offs_m = tl.arange(0, BLOCK_M)
    columns = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    live_n = (columns < OUT_FEATURES)[None, :]
    first_part = tl.program_id(1)
    rows = tl.load(tile_rows_ptr + first_part * BLOCK_M + offs_m)
    num_parts = tl.load(num_tiles_ptr) * PARTS
    for part in tl.range(first_part, num_parts, tl.num_programs(1), num_stages=1):
        live = (rows >= 0)[:, None] & live_n
        row = rows.to(tl.int64)[:, None]
        stored_ptrs = stored_ptr + row * OUT_FEATURES + columns[None, :]
        out_ptrs = out_ptr + row * stride_om + columns[None, :] * stride_on
        next_part = tl.minimum(part + tl.num_programs(1), last_part)
        rows = tl.load(tile_rows_ptr + next_part * BLOCK_M + offs_m)
        if PDL:
            gdc_wait()
        stored = tl.load(stored_ptrs, mask=live, other=0.0)
        previous = tl.load(out_ptrs, mask=live, other=0.0)
        total = previous.to(tl.float32) + stored
        tl.store(out_ptrs, total.to(previous.dtype), mask=live)
    # also without any tile: later kernels rely on what comes before this one
    if PDL:
        gdc_wait()
