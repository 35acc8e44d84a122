"""Triton kernels of a whole MoE layer: the base product of each expert with the LoRA expand folded
into its last steps, and the sum over a token's choices.

The expand costs no launch and no pass over the output: after the K loop a tile adds the delta of
the slots of its pairs to the same fp32 accumulator. It waits for the shrink output only there, so
that shrink and base product run side by side. Where the shrink runs on another stream, the product
is cut there into two launches of the same kernel, with its sums between them in fp32.

Names: x [M or P, K], W [E, S*I, K], out [P, I or S*I]; the rest as in moe/delta/kernels.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lorakernels.common.jit import dot
from lorakernels.moe.layer.jit import clamped_swiglu, gelu_tanh

# above every slot
NO_SLOT = tl.constexpr(1 << 30)


@triton.jit
def _left_and_right(matrix):
    """The two halves of a matrix's columns. A thread of a multiplication has columns of both, so
    that nothing is exchanged."""
    halves = tl.reshape(matrix, [matrix.shape[0], 2, matrix.shape[1] // 2])
    return tl.split(tl.permute(halves, (0, 2, 1)))


@triton.jit
def _load_b(b_ptr, ranks_of, live_r, columns, live_n, R: tl.constexpr):
    b_ptrs = b_ptr + ranks_of[:, None] + columns.to(tl.int64) * R
    return tl.load(b_ptrs, mask=live_r[:, None] & live_n, other=0.0)


@triton.jit
def _terms(
    shrunk_ptr,
    b_ptr,
    ranks_ptr,
    pairs,
    mine,
    ranks_of,
    columns,
    live_n,
    SR: tl.constexpr,
    R: tl.constexpr,
    RANK_ALIGN: tl.constexpr,
    HALVES: tl.constexpr,
):
    """The operands of the folded expand for one slot and slice: the ranks of the slot's pairs, zero
    for other pairs, and B, twice or in two halves. Whole vectors are loaded: past the live rank the
    shrink output is 0."""
    live_r = ranks_of < tl.cdiv(tl.load(ranks_ptr), RANK_ALIGN) * RANK_ALIGN
    cells = shrunk_ptr + pairs.to(tl.int64)[:, None] * SR + ranks_of[None, :]
    h = tl.load(cells, mask=mine[:, None] & live_r[None, :], other=0.0)
    if HALVES:
        left, right = _left_and_right(columns[None, :])
        live_left, live_right = _left_and_right(live_n[None, :])
        b = _load_b(b_ptr, ranks_of, live_r, left, live_left, R)
        b_right = _load_b(b_ptr, ranks_of, live_r, right, live_right, R)
    else:
        b = _load_b(b_ptr, ranks_of, live_r, columns[None, :], live_n[None, :], R)
        b_right = b
    return h, b, b_right


@triton.jit
def _select_sum(acc, mine, h, b, scale, IEEE: tl.constexpr):
    delta = dot(h, b, tl.zeros(acc.shape, dtype=tl.float32), IEEE)
    return tl.where(mine[:, None], acc + delta * scale, acc)


@triton.jit
def _add_to(acc, mine, h, b, b_right, scale, HALVES: tl.constexpr, IEEE: tl.constexpr):
    """acc + h @ b * scale in the rows that are `mine`, b in two halves or whole. Rows are selected
    and not multiplied by zero: 0 * Inf of one adapter would be NaN in the rows of another. A second
    accumulator as large as the first would not fit into registers; halves need half of one."""
    if HALVES:
        left, right = _left_and_right(acc)
        left = _select_sum(left, mine, h, b, scale, IEEE)
        right = _select_sum(right, mine, h, b_right, scale, IEEE)
        acc = tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), acc.shape)
    else:
        acc = _select_sum(acc, mine, h, b, scale, IEEE)
    return acc


@triton.jit
def _fold(
    acc,
    up,
    shrunk_ptr,
    b_ptr,
    ranks_ptr,
    scales_ptr,
    pairs,
    slots,
    columns,
    live_n,
    up_rows,
    stride_b_slot,
    S: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    RANK_ALIGN: tl.constexpr,
    GATED: tl.constexpr,
    IEEE: tl.constexpr,
):
    """acc + h @ B.T * scale, and the same for the up half, slot by slot: the pairs of a tile are
    sorted by slot, and most tiles have one or two slots."""
    HALVES: tl.constexpr = acc.shape[0] > 64
    BLOCKS: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    offs_r = tl.arange(0, BLOCK_R)
    slot = tl.min(tl.where(slots >= 0, slots, NO_SLOT), axis=0)
    while slot < NO_SLOT:
        following = tl.min(tl.where(slots > slot, slots, NO_SLOT), axis=0)
        mine = slots == slot
        scale = tl.load(scales_ptr + slot * S)
        if GATED:
            up_scale = tl.load(scales_ptr + slot * S + 1)
        b_slot = b_ptr + tl.cast(slot, tl.int64) * stride_b_slot
        for block in tl.range(0, BLOCKS, num_stages=1):
            ranks_of = block * BLOCK_R + offs_r
            # fmt: off
            h, b, more_b = _terms(shrunk_ptr, b_slot, ranks_ptr + slot * S, pairs, mine, ranks_of,
                                  columns, live_n, S * R, R, RANK_ALIGN, HALVES)
            if GATED:
                h_up, b_up, more_up = _terms(shrunk_ptr + R, b_slot + up_rows * R,
                                             ranks_ptr + slot * S + 1, pairs, mine, ranks_of,
                                             columns, live_n, S * R, R, RANK_ALIGN, HALVES)
            # fmt: on
                up = _add_to(up, mine, h_up, b_up, more_up, up_scale, HALVES, IEEE)
            acc = _add_to(acc, mine, h, b, more_b, scale, HALVES, IEEE)
        slot = following
    return acc, up


@triton.jit
def moe_gemm_kernel(
    x_ptr,
    w_ptr,
    x_scales_ptr,
    w_scales_ptr,
    bias_ptr,
    shrunk_ptr,
    b_ptr,
    ranks_ptr,
    scales_ptr,
    weights_ptr,
    pair_slots_ptr,
    base_experts_ptr,
    base_pairs_ptr,
    num_base_tiles_ptr,
    out_ptr,
    stride_xm,
    stride_we,
    stride_om,
    stride_b_slot,
    stride_b_expert,
    K,
    WIDTH: tl.constexpr,
    ROWS_PER_X: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    S: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    RANK_ALIGN: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SCALED: tl.constexpr,
    LORA: tl.constexpr,
    STORES_SUMS: tl.constexpr,
    LOADS_SUMS: tl.constexpr,
    IEEE: tl.constexpr,
    PDL: tl.constexpr,
):
    # grid (tiles of base pairs * column blocks), one axis because the others end at 65535. GATED:
    # a program computes the same columns of both halves, gate and up. Without LORA it waits at
    # once; with LORA it relies on the shrink, which waited for everything else before it let this
    # kernel start. STORES_SUMS: it ends behind the K loop, out is fp32 and holds both halves.
    # LOADS_SUMS: it goes on from there, and x are these sums. The pointer of B has the dtype of the
    # layer in either case. bias_ptr is None without a bias
    if PDL and not LORA:
        gdc_wait()
    COLUMN_BLOCKS: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // COLUMN_BLOCKS
    if tile < tl.load(num_base_tiles_ptr):
        low: tl.constexpr = b_ptr.dtype.element_ty
        offs_n = tl.program_id(0) % COLUMN_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
        offs_k = tl.arange(0, BLOCK_K)
        expert = tl.load(base_experts_ptr + tile)
        pairs = tl.load(base_pairs_ptr + tile * HEIGHT + tl.arange(0, HEIGHT))
        live_m = pairs >= 0
        live_n = offs_n < WIDTH
        if LORA:
            slots = tl.load(pair_slots_ptr + pairs, mask=live_m, other=-1)
        x_rows = pairs // ROWS_PER_X
        x_ptrs = x_ptr + x_rows.to(tl.int64)[:, None] * stride_xm + offs_k[None, :]
        w_expert = w_ptr + expert.to(tl.int64) * stride_we
        # past the last column the first one is loaded again, and never stored
        columns = offs_n if EVEN_N else tl.where(live_n, offs_n, 0)
        w_ptrs = w_expert + columns.to(tl.int64)[None, :] * K + offs_k[:, None]
        up_ptrs = w_ptrs + WIDTH * K
        if LOADS_SUMS:
            sums = x_ptr + pairs.to(tl.int64)[:, None] * stride_xm + columns[None, :]
            acc = tl.load(sums, mask=live_m[:, None], other=0.0)
            if GATED:
                up = tl.load(sums + WIDTH, mask=live_m[:, None], other=0.0)
        else:
            acc = tl.zeros([HEIGHT, BLOCK_N], dtype=tl.float32)
            if GATED:
                up = tl.zeros([HEIGHT, BLOCK_N], dtype=tl.float32)
        for k in range(0, 0 if LOADS_SUMS else K, BLOCK_K):
            if EVEN_K:
                x = tl.load(x_ptrs, mask=live_m[:, None], other=0.0)
                w = tl.load(w_ptrs)
            else:
                live_k = k + offs_k < K
                x = tl.load(x_ptrs, mask=live_m[:, None] & live_k[None, :], other=0.0)
                w = tl.load(w_ptrs, mask=live_k[:, None], other=0.0)
            acc = dot(x.to(low), w.to(low), acc, IEEE)
            if GATED:
                if EVEN_K:
                    w = tl.load(up_ptrs)
                else:
                    w = tl.load(up_ptrs, mask=(k + offs_k < K)[:, None], other=0.0)
                up = dot(x.to(low), w.to(low), up, IEEE)
                up_ptrs += BLOCK_K
            x_ptrs += BLOCK_K
            w_ptrs += BLOCK_K
        if SCALED:
            x_scale = tl.load(x_scales_ptr + x_rows, mask=live_m, other=0.0)[:, None]
            w_scale_ptrs = w_scales_ptr + expert * ((GATED + 1) * WIDTH) + columns
            acc *= x_scale * tl.load(w_scale_ptrs)[None, :]
            if GATED:
                up *= x_scale * tl.load(w_scale_ptrs + WIDTH)[None, :]
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + expert.to(tl.int64) * ((GATED + 1) * WIDTH) + columns
            acc += tl.load(bias_ptrs).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(bias_ptrs + WIDTH).to(tl.float32)[None, :]

        if LORA:
            if PDL:
                gdc_wait()
            b_expert = b_ptr + expert.to(tl.int64) * stride_b_expert
            # fmt: off
            acc, up = _fold(acc, up if GATED else acc, shrunk_ptr, b_expert, ranks_ptr, scales_ptr,
                            pairs, slots, columns, live_n, WIDTH, stride_b_slot, S, R, BLOCK_R,
                            RANK_ALIGN, GATED, IEEE)
            # fmt: on

        if WEIGHTED:
            weight = tl.load(weights_ptr + pairs, mask=live_m, other=0.0).to(tl.float32)[:, None]
            acc *= weight
            if GATED:
                up *= weight
        if ACTIVATION == "silu":
            acc = acc * tl.sigmoid(acc)
        elif ACTIVATION == "gelu_tanh":
            acc = gelu_tanh(acc)
        elif ACTIVATION == "swiglu_oai":
            acc, up = clamped_swiglu(acc, up, ALPHA, LIMIT)
        if GATED and not STORES_SUMS:
            acc *= up
        out_ptrs = out_ptr + pairs.to(tl.int64)[:, None] * stride_om + offs_n[None, :]
        stored: tl.constexpr = out_ptr.dtype.element_ty
        tl.store(out_ptrs, acc.to(stored), mask=live_m[:, None] & live_n[None, :])
        if GATED and STORES_SUMS:
            tl.store(out_ptrs + WIDTH, up, mask=live_m[:, None] & live_n[None, :])
    if PDL:
        if LORA:
            # also without a tile: later kernels rely on the shrink being complete
            gdc_wait()
        gdc_launch_dependents()


@triton.jit
def sum_choices_kernel(
    y_ptr,
    pair_experts_ptr,
    out_ptr,
    stride_ym,
    stride_om,
    H,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # grid (tokens, column blocks): out[t] = the sum of y[p] over the choices p of t that have a
    # local expert, in their order, in fp32
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        # the row of a pair without expert was never written
        here = tl.load(pair_experts_ptr + pair) >= 0
        row = y_ptr + pair.to(tl.int64) * stride_ym
        total += tl.load(row + offs, mask=here & (offs < H), other=0.0).to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * stride_om + offs, total, mask=offs < H)
