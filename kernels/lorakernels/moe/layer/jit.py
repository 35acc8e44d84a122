"""Activations of a MoE layer that are more than one line of its kernel; types.Formula lists all."""

import triton
import triton.language as tl

# 2 * sqrt(2 / pi), and the weight of the cube
GELU_SLOPE = tl.constexpr(1.5957691216057308)
GELU_CUBE = tl.constexpr(0.044715)


@triton.jit
def gelu_tanh(x):
    # 0.5 * (1 + tanh(y)) is sigmoid(2 * y)
    return x * tl.sigmoid((x + x * x * x * GELU_CUBE) * GELU_SLOPE)


@triton.jit
def clamped_swiglu(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """The two factors of (up + 1) * gate * sigmoid(ALPHA * gate), both clamped before. A NaN is not
    clamped: it would look like a result."""
    gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return gate * tl.sigmoid(gate * ALPHA), up + 1.0
