"""The kernels of `interpreter.check`, on their own: decorating needs Triton."""

import triton
import triton.language as tl


@triton.jit
def dot_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    cells = offs[:, None] * N + offs[None, :]
    tl.store(out_ptr + cells, tl.dot(tl.load(x_ptr + cells), tl.load(y_ptr + cells)))


@triton.jit
def cast_kernel(x_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs).to(tl.bfloat16))
