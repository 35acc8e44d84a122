"""Kernels that probe the Triton of this process: what `interpreter.check` and `device` run or
inspect. They have a module of their own because decorating a function needs Triton."""

import triton
import triton.language as tl


@triton.jit
def probe_dot(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    cells = offs[:, None] * N + offs[None, :]
    tl.store(out_ptr + cells, tl.dot(tl.load(x_ptr + cells), tl.load(y_ptr + cells)))


@triton.jit
def probe_cast(x_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs).to(tl.bfloat16))
