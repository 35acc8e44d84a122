"""Triton kernel that adds up the outputs of the experts of each token."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


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
