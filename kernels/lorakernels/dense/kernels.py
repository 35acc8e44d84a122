"""Triton kernels of the dense delta: out += scale * (x @ A.T) @ B.T, per row's slot.

Both kernels walk the compact tile list of BatchMetadata with a stride of their grid, so the
grid depends on the batch size alone. The shrink holds all slices of its rows at once, so x is
read once; K may be split into planes that the expand adds up in a fixed order: no atomics,
no memset, the same bits every time.

Names: x [M, K], A [L, S*R, K], B [L, N, R], bridge [P, M, S*R] fp32 in the row order of the
metadata, out [M, N]; L slots, S slices, R rank of the buffers, P planes.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _dot(lhs, rhs, acc, IEEE: tl.constexpr):
    # tf32 would cost an fp32 adapter 13 of its 23 mantissa bits
    if IEEE:
        return tl.dot(lhs, rhs, acc, input_precision="ieee")
    return tl.dot(lhs, rhs, acc)


@triton.jit
def lora_shrink_kernel(
    x_ptr,
    a_ptr,
    ranks_ptr,
    tiles_ptr,
    num_tiles_ptr,
    rows_ptr,
    bridge_ptr,
    stride_xm,
    stride_xk,
    stride_bridge_plane,
    K,
    R: tl.constexpr,
    SR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IEEE: tl.constexpr,
    PDL: tl.constexpr,
):
    # grid (tiles, planes, chunks of BLOCK_N ranks). The wait comes before any exit: the expand
    # trusts that whatever ran before the shrink is complete once every program got past it
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    plane = tl.program_id(1)
    offs_n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    S: tl.constexpr = SR // R
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), tl.num_programs(1))
    k_begin = plane * steps * BLOCK_K
    k_end = tl.minimum(k_begin + steps * BLOCK_K, K)
    inside_n = offs_n < SR

    num_tiles = tl.load(num_tiles_ptr)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        slot = tl.load(tiles_ptr + tile * 3)
        first = tl.load(tiles_ptr + tile * 3 + 1)
        live_m = offs_m < tl.load(tiles_ptr + tile * 3 + 2)
        rows = tl.load(rows_ptr + first + offs_m, mask=live_m, other=0).to(tl.int64)
        live_rank = tl.load(ranks_ptr + slot * S + offs_n // R, mask=inside_n, other=0)
        live_n = offs_n % R < live_rank

        if tl.max(live_n.to(tl.int32), axis=0) > 0:
            # [BLOCK_M, BLOCK_K] and [BLOCK_K, BLOCK_N]
            # a transposed x has its rows' stride here: 64 bits (vllm #53034)
            offs_x = (k_begin + offs_k).to(tl.int64) * stride_xk
            x_ptrs = x_ptr + rows[:, None] * stride_xm + offs_x[None, :]
            a_rows = a_ptr + (slot.to(tl.int64) * SR + offs_n) * K
            a_ptrs = a_rows[None, :] + (k_begin + offs_k)[:, None]
            acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            for k in range(k_begin, k_end, BLOCK_K):
                live_k = k + offs_k < K
                x = tl.load(x_ptrs, mask=live_m[:, None] & live_k[None, :], other=0.0)
                a = tl.load(a_ptrs, mask=live_n[None, :] & live_k[:, None], other=0.0)
                acc = _dot(x, a, acc, IEEE)
                x_ptrs += BLOCK_K * stride_xk
                a_ptrs += BLOCK_K
            plane_ptr = bridge_ptr + plane.to(tl.int64) * stride_bridge_plane
            cells = plane_ptr + (first + offs_m).to(tl.int64)[:, None] * SR + offs_n[None, :]
            # zeros for the dead ranks between live ones
            tl.store(cells, acc, mask=live_m[:, None] & inside_n[None, :])


@triton.jit
def _locate_slice(block, WIDTHS: tl.constexpr, BLOCK_N: tl.constexpr, ALIGN: tl.constexpr):
    """The slice that column block `block` belongs to, its first column there, the column where
    the slice starts in the output, and its width. Blocks never straddle slices."""
    slice_id = block * 0
    column = block * 0
    start = block * 0
    width = block * 0
    first_block = 0
    first_column = 0
    for s in tl.static_range(len(WIDTHS)):
        here = block >= first_block
        slice_id = tl.where(here, s, slice_id)
        column = tl.where(here, (block - first_block) * BLOCK_N, column)
        start = tl.where(here, first_column, start)
        width = tl.where(here, WIDTHS[s], width)
        first_block += (WIDTHS[s] + BLOCK_N - 1) // BLOCK_N
        first_column += WIDTHS[s]
    # the compiler cannot see through the selection, and would access two bytes at a time
    column = tl.multiple_of(column, BLOCK_N)
    return slice_id, column, tl.multiple_of(start, ALIGN), tl.multiple_of(width, ALIGN)


@triton.jit
def lora_expand_kernel(
    bridge_ptr,
    b_ptr,
    ranks_ptr,
    scales_ptr,
    tiles_ptr,
    num_tiles_ptr,
    rows_ptr,
    out_ptr,
    stride_om,
    stride_on,
    stride_bridge_plane,
    WIDTHS: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    R: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH_ALIGN: tl.constexpr,
    RANK_ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    IEEE: tl.constexpr,
    PDL: tl.constexpr,
):
    # grid (column blocks, tiles): neighbours write neighbouring columns of the same rows.
    # *_ALIGN: powers of two that divide every slice width and the rank of the buffers
    S: tl.constexpr = len(WIDTHS)
    slice_id, column, start, width = _locate_slice(
        tl.program_id(0), WIDTHS, BLOCK_N, WIDTH_ALIGN
    )
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = column + tl.arange(0, BLOCK_N)
    offs_r = tl.arange(0, BLOCK_R)
    live_n = offs_n < width
    columns = (start + offs_n).to(tl.int64)

    num_tiles = tl.load(num_tiles_ptr)
    for tile in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
        slot = tl.load(tiles_ptr + tile * 3)
        first = tl.load(tiles_ptr + tile * 3 + 1)
        live_m = offs_m < tl.load(tiles_ptr + tile * 3 + 2)
        rows = tl.load(rows_ptr + first + offs_m, mask=live_m, other=0).to(tl.int64)
        rank = tl.load(ranks_ptr + slot * S + slice_id)
        scale = tl.load(scales_ptr + slot * S + slice_id)
        # whole vectors are loaded; what lies past the live rank is cleared before it is used
        loaded_rank = tl.cdiv(rank, RANK_ALIGN) * RANK_ALIGN
        # what does not depend on the shrink is fetched before the wait
        out_ptrs = out_ptr + rows[:, None] * stride_om + columns[None, :] * stride_on
        live_out = live_m[:, None] & live_n[None, :] & (rank > 0)
        previous = tl.load(out_ptrs, mask=live_out, other=0.0)
        b_rows = b_ptr + (slot.to(tl.int64) * OUT_FEATURES + columns) * R
        b_ptrs = b_rows[None, :] + offs_r[:, None]
        b = tl.load(b_ptrs, mask=live_n[None, :] & (offs_r < loaded_rank)[:, None], other=0.0)
        if PDL:
            gdc_wait()

        cells = (first + offs_m).to(tl.int64)[:, None] * (S * R) + slice_id * R + offs_r[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for r in range(0, rank, BLOCK_R):
            loaded_r = r + offs_r < loaded_rank
            live_cells = live_m[:, None] & loaded_r[None, :]
            h = tl.load(bridge_ptr + cells + r, mask=live_cells, other=0.0)
            for plane in tl.static_range(1, PLANES):
                part = bridge_ptr + cells + r + tl.cast(stride_bridge_plane, tl.int64) * plane
                h += tl.load(part, mask=live_cells, other=0.0)
            if r > 0:
                b = tl.load(b_ptrs + r, mask=live_n[None, :] & loaded_r[:, None], other=0.0)
            b = tl.where((r + offs_r < rank)[:, None], b, 0.0)
            acc = _dot(h.to(b.dtype), b, acc, IEEE)
        # one rounding: base and delta are added in fp32
        tl.store(out_ptrs, (previous.to(tl.float32) + acc * scale).to(b.dtype), mask=live_out)
    # also without any tile: what follows trusts that the shrink is complete
    if PDL:
        gdc_wait()
