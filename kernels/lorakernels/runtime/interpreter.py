"""Correct bf16, and NaN of extremes, in Triton's interpreter.

The interpreter of Triton 3.6 to 3.9 keeps a bf16 value as the uint16 of its bits, and some
operations ignore that: `tl.dot`, arithmetic and comparisons work on the bit patterns as if they
were integers, casts from integers and fp64 copy the number into the bits, and casts from fp32
truncate where the hardware rounds to nearest even (a bias of half a unit in the last place).
`repair` makes all of them go through fp32 with one rounding, as on the hardware.

Up to Triton 3.7 it also keeps a NaN in `tl.minimum`, `tl.maximum` and `tl.clamp`, which the
hardware does only where a kernel asks for it by `propagate_nan`. `repair` leaves out work that
changes no result, too (`interpreter_work.py`). Nothing else in Triton is changed, and a process
that does not interpret kernels is left alone.

Atomics on bf16, which the interpreter refuses, and fp8 stay unsupported.

Floating-point fusion needs no repair: numpy never contracts a multiply and an add. On a GPU a
launch uses Triton's default, which is on up to 3.9 and announced to be off from 3.10, so results
may change by an fp32 rounding; set TRITON_DEFAULT_FP_FUSION to compare versions.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lorakernels.runtime.interpreter_work import leave_out_repeated_work

_REPAIRED = "_lorakernels_bf16"


def is_on() -> bool:
    """Whether Triton interprets kernels, as it reads TRITON_INTERPRET itself. Does not import
    Triton where the variable is not set."""
    if not os.environ.get("TRITON_INTERPRET"):
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def repair() -> bool:
    """Patch the interpreter of this process; True if bf16 is now correct under the interpreter.

    Idempotent. Does nothing and returns False unless the interpreter is on. It also affects kernels
    that were imported before: the interpreter looks up its operations at launch.
    """
    if not is_on():
        return False
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if not hasattr(builder, _REPAIRED):
        _repair_casts(builder)
        _repair_extremes(builder)
        _repair_arithmetic(builder)
        _repair_dot(builder)
        _repair_reductions(interpreter)
        _repair_index(interpreter)
        leave_out_repeated_work(interpreter)
        setattr(builder, _REPAIRED, True)
    return True


def check() -> None:
    """Run small kernels under the interpreter. Raises RuntimeError if bf16 is still wrong."""
    import torch
    import triton

    from lorakernels.runtime.kernels import probe_cast, probe_dot

    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(16, 16, generator=generator, device="cpu").bfloat16() for _ in range(2))
    dot = torch.empty(16, 16, device="cpu")
    rounded = torch.empty(16, dtype=torch.bfloat16, device="cpu")
    try:
        probe_dot[(1,)](x, y, dot, 16)
        # 16 values whose last bits are a tie, above and below it, for either parity
        exact = 1 + torch.arange(16, device="cpu") * 2.0**-9
        probe_cast[(1,)](exact, rounded, 16)
    except Exception as error:
        raise RuntimeError(_complaint(triton.__version__, "cannot run a kernel")) from error
    if not torch.allclose(dot, x.float() @ y.float(), rtol=1e-5, atol=1e-5):
        raise RuntimeError(_complaint(triton.__version__, "multiplies bf16 wrongly"))
    if not torch.equal(rounded, exact.bfloat16()):
        raise RuntimeError(_complaint(triton.__version__, "rounds to bf16 wrongly"))


def _complaint(version: str, fact: str) -> str:
    return (
        f"the interpreter of Triton {version} with numpy {np.__version__} {fact}; "
        "known to work: Triton 3.6 to 3.9"
    )


def decode_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The values of bf16 bit patterns, exactly."""
    return (np.asarray(bits, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


def encode_bf16(values: NDArray[Any], *, to_nearest: bool = True) -> NDArray[np.uint16]:
    """bf16 bit patterns of `values`, rounded to nearest even, or else towards zero."""
    with np.errstate(over="ignore"):
        single = np.ascontiguousarray(values, dtype=np.float32).reshape(np.shape(values))
    bits = single.view(np.uint32)
    half = ((bits >> 16) & 1) + np.uint32(0x7FFF) if to_nearest else np.uint32(0)
    rounded = ((bits + half) >> 16).astype(np.uint16)
    # rounding up could carry a NaN's payload into infinity or zero
    quiet_nan = (bits >> 16).astype(np.uint16) | np.uint16(0x0040)
    return np.where(np.isnan(single), quiet_nan, rounded)


def _is_bf16(handle: Any) -> bool:
    import triton.language as tl

    return bool(handle.dtype.scalar == tl.bfloat16)


def _widened(handle: Any) -> Any:
    """The handle itself, or its fp32 equal if it is bf16."""
    import triton.language as tl

    if not _is_bf16(handle):
        return handle
    return type(handle)(decode_bf16(handle.data), tl.float32)


def _narrowed(handle: Any, *, to_nearest: bool = True) -> Any:
    import triton.language as tl

    return type(handle)(encode_bf16(handle.data, to_nearest=to_nearest), tl.bfloat16)


def _repair_casts(builder: Any) -> None:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle, _ir

    cast, convert = builder.cast_impl, builder.create_fp_to_fp

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if dst_type.scalar == tl.bfloat16:
            return _narrowed(_widened(src))
        return cast(self, _widened(src), dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        fp8 = min(src.dtype.scalar.primitive_bitwidth, dst_type.scalar.primitive_bitwidth) == 8
        # a rounding is chosen for fewer bits alone, so that bf16 is a source for fp8 only
        if fp8 or dst_type.scalar != tl.bfloat16:
            return convert(self, src, dst_type, rounding_mode)
        to_nearest = rounding_mode != _ir.ROUNDING_MODE.RTZ
        return _narrowed(_widened(src), to_nearest=to_nearest)

    def get_bf16(self: Any, value: float) -> Any:
        return TensorHandle(encode_bf16(np.array([value], dtype=np.float32)), tl.bfloat16)

    builder.cast_impl = cast_impl
    builder.create_fp_to_fp = create_fp_to_fp
    builder.get_bf16 = get_bf16


def _repair_extremes(builder: Any) -> None:
    """Without `propagate_nan` the other operand counts, as the bounds of a clamp do."""
    from triton.runtime.interpreter import _ir

    clamp = builder.create_clampf

    def create_minnumf(self: Any, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmin)

    def create_maxnumf(self: Any, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_clampf(self: Any, x: Any, low: Any, high: Any, propagate_nan: Any) -> Any:
        if propagate_nan == _ir.PROPAGATE_NAN.ALL:
            return clamp(self, x, low, high, propagate_nan)
        return self.create_minnumf(self.create_maxnumf(x, low), high)

    builder.create_minnumf = create_minnumf
    builder.create_maxnumf = create_maxnumf
    builder.create_clampf = create_clampf


def _repair_arithmetic(builder: Any) -> None:
    # of three operands: `tl.where` moves bits and needs no value, `tl.clamp` gets fp32 from Triton
    unary, binary, fma = builder.unary_op, builder.binary_op, builder.create_fma

    def as_operand(result: Any) -> Any:
        # comparisons give bools, which stay
        return result if result.data.dtype == np.bool_ else _narrowed(result)

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        if not _is_bf16(arg):
            return unary(self, arg, op)
        return _narrowed(unary(self, _widened(arg), op))

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if not _is_bf16(lhs):
            return binary(self, lhs, rhs, op)
        return as_operand(binary(self, _widened(lhs), _widened(rhs), op))

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if not _is_bf16(z):
            return fma(self, x, y, z)
        return _narrowed(fma(self, _widened(x), _widened(y), _widened(z)))

    builder.unary_op = unary_op
    builder.binary_op = binary_op
    builder.create_fma = create_fma


def _repair_dot(builder: Any) -> None:
    dot = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        # the product of two bf16 values is exact in fp32, so only the order of sums can differ
        product = dot(self, _widened(a), _widened(b), _widened(d), *options)
        return _narrowed(product) if _is_bf16(d) else product

    builder.create_dot = create_dot


def _repair_reductions(interpreter: Any) -> None:
    import triton.language as tl

    base = interpreter.ReduceScanOpInterface
    apply = base.apply

    def widened(value: Any) -> Any:
        if not isinstance(value, tl.core.tensor) or value.dtype != tl.bfloat16:
            return value
        return base.to_tensor(None, decode_bf16(value.handle.data), tl.float32)

    def narrowed(value: Any, like: Any) -> Any:
        if not isinstance(like, tl.core.tensor) or like.dtype != tl.bfloat16:
            return value
        return base.to_tensor(None, encode_bf16(value.handle.data), tl.bfloat16)

    def repaired(self: Any, values: Any) -> Any:
        if not isinstance(values, tuple):
            return self.apply((values,))[0]
        results = apply(self, tuple(map(widened, values)))
        return tuple(map(narrowed, results, values))

    base.apply = repaired


def _repair_index(interpreter: Any) -> None:
    """Triton 3.6 asks numpy for the int of a one-element array, which numpy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor
