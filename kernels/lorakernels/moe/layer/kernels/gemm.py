"""Triton kernel of a product of a MoE layer: the base product of each expert with the LoRA expand
folded into its last step.

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
from lorakernels.moe.layer.kernels.fold import fold_one_by_one, fold_together


@triton.jit
def _base_sums(
    x_ptr,
    w_ptr,
    x_scales_ptr,
    w_scales_ptr,
    bias_ptr,
    pairs,
    expert,
    columns,
    stride_xm,
    stride_we,
    K,
    low: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS_PER_X: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    LOADS_SUMS: tl.constexpr,
    IEEE: tl.constexpr,
):
    """The sums of a tile without adapters: of gate, or of the only matrix, and of up."""
    live_m = pairs >= 0
    x_rows = pairs // ROWS_PER_X
    if LOADS_SUMS:
        sums = x_ptr + pairs.to(tl.int64)[:, None] * stride_xm + columns[None, :]
        acc = tl.load(sums, mask=live_m[:, None], other=0.0)
        up = acc
        if GATED:
            up = tl.load(sums + WIDTH, mask=live_m[:, None], other=0.0)
    else:
        offs_k = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + x_rows.to(tl.int64)[:, None] * stride_xm + offs_k[None, :]
        w_expert = w_ptr + expert.to(tl.int64) * stride_we
        w_ptrs = w_expert + columns.to(tl.int64)[None, :] * K + offs_k[:, None]
        up_ptrs = w_ptrs + WIDTH * K
        acc = tl.zeros([pairs.shape[0], columns.shape[0]], dtype=tl.float32)
        up = acc
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
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
    return acc, up


@triton.jit
def _store_tile(
    acc,
    up,
    weights_ptr,
    out_ptr,
    pairs,
    offs_n,
    stride_om,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    STORES_SUMS: tl.constexpr,
):
    """Router weights and activation of the sums of a tile, and what is stored of them."""
    live_m = pairs >= 0
    live_n = offs_n < WIDTH
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


@triton.jit(do_not_specialize=["num_slots"])
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
    num_slots,
    minus_K,
    WIDTH: tl.constexpr,
    ROWS_PER_X: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    S: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP_R: tl.constexpr,
    RANK_ALIGN: tl.constexpr,
    TOGETHER: tl.constexpr,
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
    # Triton makes a constant of an argument that is 1, and without its K loop ptxas 12.8 translates
    # the kernel wrongly: the descriptor of an HGMMA is taken from a register without a value
    K = -minus_K
    COLUMN_BLOCKS: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // COLUMN_BLOCKS
    if tile < tl.load(num_base_tiles_ptr):
        low: tl.constexpr = b_ptr.dtype.element_ty
        offs_n = tl.program_id(0) % COLUMN_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
        live_n = offs_n < WIDTH
        # past the last column the first one is loaded again, and never stored
        columns = offs_n if EVEN_N else tl.where(live_n, offs_n, 0)
        expert = tl.load(base_experts_ptr + tile)
        pairs = tl.load(base_pairs_ptr + tile * HEIGHT + tl.arange(0, HEIGHT))
        if LORA:
            slots = tl.load(pair_slots_ptr + pairs, mask=pairs >= 0, other=-1)
            b_expert = b_ptr + expert.to(tl.int64) * stride_b_expert
        # fmt: off
        acc, up = _base_sums(x_ptr, w_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, pairs, expert,
                             columns, stride_xm, stride_we, K, low, WIDTH, ROWS_PER_X, BLOCK_K,
                             STAGES, EVEN_K, GATED, SCALED, LOADS_SUMS, IEEE)
        if LORA:
            if PDL:
                gdc_wait()
            if TOGETHER:
                acc, up, is_right = fold_together(acc, up, shrunk_ptr, b_expert, ranks_ptr, pairs,
                                                  slots, columns, live_n, WIDTH, stride_b_slot,
                                                  num_slots, S, R, BLOCK_R, GROUP_R, RANK_ALIGN,
                                                  GATED, IEEE)
            else:
                acc, up = fold_one_by_one(acc, up, shrunk_ptr, b_expert, ranks_ptr, scales_ptr,
                                          pairs, slots, columns, live_n, WIDTH, stride_b_slot,
                                          num_slots, S, R, BLOCK_R, RANK_ALIGN, GATED, False, IEEE)
        _store_tile(acc, up, weights_ptr, out_ptr, pairs, offs_n, stride_om, WIDTH, GATED,
                    ACTIVATION, ALPHA, LIMIT, WEIGHTED, STORES_SUMS)
        # two conditions, because `is_right` has no meaning in other variants
        if LORA and TOGETHER:  # noqa: SIM102
            if not is_right:
                # once more from the start, tables included, because no register is left to keep
                # anything. Other threads may have stored these places
                tl.debug_barrier()
                expert = tl.load(base_experts_ptr + tile)
                pairs = tl.load(base_pairs_ptr + tile * HEIGHT + tl.arange(0, HEIGHT))
                slots = tl.load(pair_slots_ptr + pairs, mask=pairs >= 0, other=-1)
                acc, up = _base_sums(x_ptr, w_ptr, x_scales_ptr, w_scales_ptr, bias_ptr, pairs,
                                     expert, columns, stride_xm, stride_we, K, low, WIDTH,
                                     ROWS_PER_X, BLOCK_K, 1, EVEN_K, GATED, SCALED, LOADS_SUMS,
                                     IEEE)
                acc, up = fold_one_by_one(acc, up, shrunk_ptr, b_expert, ranks_ptr, scales_ptr,
                                          pairs, slots, columns, live_n, WIDTH, stride_b_slot,
                                          num_slots, S, R, BLOCK_R, RANK_ALIGN, GATED, True, IEEE)
                _store_tile(acc, up, weights_ptr, out_ptr, pairs, offs_n, stride_om, WIDTH, GATED,
                            ACTIVATION, ALPHA, LIMIT, WEIGHTED, STORES_SUMS)
        # fmt: on
    if PDL:
        if LORA:
            # also without a tile: later kernels rely on the shrink being complete
            gdc_wait()
        gdc_launch_dependents()
