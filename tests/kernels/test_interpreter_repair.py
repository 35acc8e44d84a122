from __future__ import annotations

import inspect
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from loragate.core.machine import interpreter_is_on, select_interpreter

select_interpreter()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from lorakernels.runtime import interpreter  # noqa: E402

pytestmark = pytest.mark.skipif(
    not interpreter.is_on(), reason="this process runs compiled kernels"
)

N = 16
# ties of either parity, a carry into the exponent, subnormals, overflow, and the non-finite
TIES = [1.00390625, 1.01171875, 1.998, 0.999, -1.999]
TINY = [1e-38, 1e-40, -1e-39, 9.2e-41, 7e-46]
EDGE = [3.4e38, 0.0, -0.0, float("inf"), -float("inf"), float("nan")]
HARD = torch.tensor([*TIES, *TINY, *EDGE])


@triton.jit
def _dot(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    cells = offs[:, None] * N + offs[None, :]
    tl.store(out_ptr + cells, tl.dot(tl.load(x_ptr + cells), tl.load(y_ptr + cells)))


@triton.jit
def _cast(x_ptr, out_ptr, N: tl.constexpr, VIA: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs).to(VIA).to(tl.bfloat16))


@triton.jit
def _round_to_zero(x_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + offs, x.to(tl.bfloat16, fp_downcast_rounding="rtz"))


@triton.jit
def _add(x, y):
    return x + y


@triton.jit
def _multiply(x, y):
    return x * y


@triton.jit
def _subtract_and_double(x, y):
    return (x - y) * 2.0


@triton.jit
def _negate(x, y):
    return -x


@triton.jit
def _smaller(x, y):
    return tl.where(x < y, x, y)


@triton.jit
def _maximum(x, y):
    return tl.maximum(x, y)


@triton.jit
def _clamped(x, y):
    return tl.clamp(x, y * 0.0 - 0.5, y * 0.0 + 0.75)


@triton.jit
def _minimum_of_nan(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _maximum_of_nan(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _minimum(x, y):
    return tl.minimum(x, y)


@triton.jit
def _clamped_nan(x, y):
    return tl.clamp(x, y * 0.0 - 0.5, y * 0.0 + 0.75, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _multiply_and_add(x, y):
    return tl.fma(x, y, x)


@triton.jit
def _multiply_and_add_second(x, y):
    return tl.fma(x, y, y)


@triton.jit
def _absolute(x, y):
    return tl.abs(x)


@triton.jit
def _total(x, y):
    return x * 0.0 + tl.sum(x, axis=0)


@triton.jit
def _running_total(x, y):
    return tl.cumsum(x, axis=0)


@triton.jit
def _larger(x, place, y, other_place):
    is_first = (x > y) | ((x == y) & (place < other_place))
    return tl.where(is_first, x, y), tl.where(is_first, place, other_place)


@triton.jit
def _reduce(x_ptr, total_ptr, totals_ptr, largest_ptr, place_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    cells = offs[:, None] * N + offs[None, :]
    x = tl.load(x_ptr + cells)
    # Triton takes bf16 for fp32 in `tl.sum` and its like, but not in these
    tl.store(total_ptr + offs, tl.reduce(x, 1, _add).to(tl.float32))
    tl.store(totals_ptr + cells, tl.associative_scan(x, 1, _add).to(tl.float32))
    largest, place = tl.reduce((x, offs[None, :] + 0 * cells), 1, _larger)
    tl.store(largest_ptr + offs, largest.to(tl.float32))
    tl.store(place_ptr + offs, place)


@triton.jit
def _map(x_ptr, y_ptr, out_ptr, N: tl.constexpr, OP: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out_ptr + offs, OP(tl.load(x_ptr + offs), tl.load(y_ptr + offs)))


@triton.jit
def _count(limit_ptr, out_ptr):
    total = 0
    for step in range(tl.program_id(0), tl.load(limit_ptr), tl.num_programs(0)):
        total += step
    tl.store(out_ptr, total)


def _draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _equal_bits(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    same = got.view(torch.int16) == wanted.view(torch.int16)
    return bool((same | (got.isnan() & wanted.isnan())).all())


def test_a_dot_of_bf16_operands_multiplies_values_instead_of_bit_patterns() -> None:
    x, y, out = _draw(N, N, seed=0), _draw(N, N, seed=1), torch.empty(N, N)
    _dot[(1,)](x, y, out, N)
    torch.testing.assert_close(out, x.float() @ y.float(), rtol=1e-6, atol=1e-6)


def test_a_dot_of_fp16_operands_is_unchanged() -> None:
    x, y, out = _draw(N, N, seed=0).half(), _draw(N, N, seed=1).half(), torch.empty(N, N)
    _dot[(1,)](x, y, out, N)
    torch.testing.assert_close(out, x.float() @ y.float(), rtol=1e-6, atol=1e-6)


def test_a_cast_from_fp32_rounds_to_nearest_even_like_the_hardware() -> None:
    out = torch.empty(N, dtype=torch.bfloat16)
    for values in (HARD, torch.linspace(-3, 3, N)):
        _cast[(1,)](values, out, N, tl.float32)
        assert _equal_bits(out, values.bfloat16())


@triton.jit
def _truncate_to_fp16(x_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + offs, x.to(tl.float16, fp_downcast_rounding="rtz"))


def test_a_cast_to_another_type_that_asks_for_a_rounding_is_one_to_that_type() -> None:
    values, out = torch.linspace(-3, 3, N), torch.empty(N, dtype=torch.float16)
    _truncate_to_fp16[(1,)](values, out, N)
    # the bits of fp16 count up from zero
    is_beyond = values.half().float().abs() > values.abs()
    bits = values.half().view(torch.int16) - is_beyond.to(torch.int16)
    assert torch.equal(out, bits.view(torch.float16))


def test_a_cast_that_asks_for_rounding_to_zero_gets_it() -> None:
    out = torch.empty(N, dtype=torch.bfloat16)
    _round_to_zero[(1,)](torch.full((N,), 1.999), out, N)
    assert out.tolist() == [1.9921875] * N


@pytest.mark.parametrize("source", [torch.int32, torch.float64, torch.float16])
def test_a_cast_from_another_type_converts_the_number(source: torch.dtype) -> None:
    values, out = torch.arange(-3, N - 3).to(source), torch.empty(N, dtype=torch.bfloat16)
    via = {torch.int32: tl.int32, torch.float64: tl.float64, torch.float16: tl.float16}[source]
    _cast[(1,)](values, out, N, via)
    assert torch.equal(out, values.bfloat16())


@pytest.mark.parametrize(
    ("kernel", "wanted"),
    [
        (_add, lambda x, y: x + y),
        (_multiply, lambda x, y: x * y),
        (_subtract_and_double, lambda x, y: (x - y) * 2),
        (_negate, lambda x, y: -x),
        (_absolute, lambda x, y: x.abs()),
        (_smaller, torch.minimum),
        (_maximum, torch.maximum),
        (_clamped, lambda x, y: x.clamp(-0.5, 0.75)),
        (_multiply_and_add, lambda x, y: (x.float() * y.float() + x.float()).bfloat16()),
        (_total, lambda x, y: x.float().sum().bfloat16().expand(N)),
        (_running_total, lambda x, y: x.float().cumsum(0).bfloat16()),
    ],
    ids=lambda value: getattr(value, "__name__", "").strip("_"),
)
def test_arithmetic_on_bf16_equals_torch_bit_for_bit(kernel: object, wanted: object) -> None:
    x, y, out = _draw(N, seed=0), _draw(N, seed=1), torch.empty(N, dtype=torch.bfloat16)
    _map[(1,)](x, y, out, N, kernel)
    assert torch.equal(out, wanted(x, y))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("kernel", "wanted"),
    [
        (_add, lambda x, y: x + y),
        (_absolute, lambda x, y: x.abs()),
        (_multiply_and_add, lambda x, y: x * y + x),
        (_multiply_and_add_second, lambda x, y: x * y + y),
    ],
    ids=lambda value: getattr(value, "__name__", "").strip("_"),
)
def test_arithmetic_on_fp32_is_unchanged(kernel: object, wanted: Any) -> None:
    x, y, out = _draw(N, seed=0).float(), _draw(N, seed=1).float(), torch.empty(N)
    # beyond what bf16 can hold
    x, y = x * 1.0001, y * 1.0001
    _map[(1,)](x, y, out, N, kernel)
    assert torch.equal(out, wanted(x, y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kernel", "wanted"),
    [
        (_minimum, torch.fmin),
        (_maximum, torch.fmax),
        (_clamped, lambda x, y: torch.fmax(x, torch.tensor(-0.5)).clamp(max=0.75)),
        (_minimum_of_nan, torch.minimum),
        (_maximum_of_nan, torch.maximum),
        (_clamped_nan, lambda x, y: x.clamp(-0.5, 0.75)),
    ],
    ids=lambda value: getattr(value, "__name__", "").strip("_"),
)
def test_an_extreme_keeps_a_nan_where_the_kernel_asks_for_it_alone(
    kernel: object, wanted: Any, dtype: torch.dtype
) -> None:
    x, y, out = _draw(N, seed=0).to(dtype), _draw(N, seed=1).to(dtype), torch.empty(N, dtype=dtype)
    x[3], x[5] = float("nan"), float("inf")
    _map[(1,)](x, y, out, N, kernel)
    torch.testing.assert_close(out, wanted(x, y).to(dtype), rtol=0, atol=0, equal_nan=True)
    if kernel in (_minimum, _maximum):
        # of either operand
        _map[(1,)](y, x, out, N, kernel)
        assert not out.isnan().any()


def test_a_reduction_by_a_function_of_its_own_gives_bf16_and_leaves_other_types() -> None:
    x, total, totals = _draw(N, N, seed=0), torch.zeros(N), torch.zeros(N, N)
    largest, place = torch.zeros(N), torch.zeros(N, dtype=torch.int32)
    _reduce[(1,)](x, total, totals, largest, place, N)
    for found, wanted in ((total, x.float().sum(1)), (totals, x.float().cumsum(1))):
        # a value of bf16, though what holds it has room for more
        assert torch.equal(found, found.bfloat16().float())
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
    assert torch.equal(largest, x.float().amax(1))
    assert torch.equal(place.long(), x.float().argmax(1))


def test_a_loop_over_device_values_runs_with_every_numpy() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    _count[(1,)](torch.tensor([5], dtype=torch.int32), out)
    assert out.item() == 10


def test_every_bf16_value_survives_decoding_and_encoding() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = interpreter.decode_bf16(bits)
    back = interpreter.encode_bf16(values)
    finite = ~np.isnan(values)
    assert np.array_equal(back[finite], bits[finite])
    assert np.isnan(interpreter.decode_bf16(back[~finite])).all()


def test_a_nan_stays_a_nan_whatever_its_payload() -> None:
    payloads = [1, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x3FFFFF, 0x400000, 0x7FFF8000 & 0x7FFFFF]
    payloads += [0x7F8000, 0x7FFFFF]
    bits = np.array([sign | 0x7F800000 | p for p in payloads for sign in (0, 1 << 31)])
    values = bits.astype(np.uint32).view(np.float32)
    for to_nearest in (True, False):
        encoded = interpreter.encode_bf16(values, to_nearest=to_nearest)
        assert np.isnan(interpreter.decode_bf16(encoded)).all()
        # the sign is kept
        assert np.array_equal(encoded >> 15, bits >> 31)


def test_a_second_repair_changes_nothing() -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    before = dict(vars(InterpreterBuilder))
    assert interpreter.repair()
    assert dict(vars(InterpreterBuilder)) == before


@pytest.mark.parametrize("owner", [tl, tl.tensor, tl.math], ids=lambda owner: owner.__name__)
def test_a_launch_replaces_every_builtin_once_and_puts_it_back(owner: Any) -> None:
    def builtins() -> dict[str, object]:
        return {name: it for name, it in inspect.getmembers(owner) if tl.core.is_builtin(it)}

    triton_interpreter = triton.runtime.interpreter
    scopes = [triton_interpreter._LangPatchScope() for _ in range(2)]
    before = builtins()
    for scope in scopes:
        triton_interpreter._patch_builtin(owner, triton_interpreter.interpreter_builder, scope)
    launch, device_function = (scope._changes for scope in scopes)
    assert before
    assert {name for _, name, _ in launch} == before.keys()
    assert not builtins()
    assert device_function == []
    for scope in reversed(scopes):
        scope.restore()
    assert builtins() == before


@pytest.mark.parametrize(
    ("scalar", "found"),
    [
        *((tl.float32, np.float32), (tl.bfloat16, np.uint16), (tl.int1, np.bool_)),
        *((tl.int64, np.int64), (tl.pointer_type(tl.float16), np.uint64)),
    ],
    ids=str,
)
def test_a_block_has_the_dtype_of_its_values(scalar: Any, found: Any) -> None:
    for dtype in (scalar, tl.block_type(scalar, [4, 4])) * 2:
        assert triton.runtime.interpreter._get_np_dtype(dtype) == np.dtype(found)


def test_check_accepts_the_repaired_interpreter() -> None:
    interpreter.check()


def test_check_says_which_release_cannot_run_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(values: Any, **_: Any) -> Any:
        raise AttributeError("changed")

    monkeypatch.setattr(interpreter, "encode_bf16", fails)
    with pytest.raises(RuntimeError, match=r"Triton 3.* cannot run a kernel"):
        interpreter.check()


def test_check_refuses_an_interpreter_that_multiplies_bit_patterns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interpreter, "decode_bf16", lambda bits: bits.astype(np.float32))
    with pytest.raises(RuntimeError, match=r"Triton 3.* multiplies bf16 wrongly"):
        interpreter.check()


def test_check_refuses_an_interpreter_that_truncates_instead_of_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode = interpreter.encode_bf16
    monkeypatch.setattr(
        interpreter, "encode_bf16", lambda values, **_: encode(values, to_nearest=False)
    )
    with pytest.raises(RuntimeError, match=r"Triton 3.* rounds to bf16 wrongly"):
        interpreter.check()


def test_check_refuses_an_interpreter_that_rounds_by_the_first_bit_that_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode = interpreter.encode_bf16

    def without_the_other_bits(values: Any, **options: Any) -> Any:
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        return encode((bits & np.uint32(0xFFFF8000)).view(np.float32), **options)

    monkeypatch.setattr(interpreter, "encode_bf16", without_the_other_bits)
    with pytest.raises(RuntimeError, match=r"Triton 3.* rounds to bf16 wrongly"):
        interpreter.check()


def test_without_the_switch_nothing_is_imported_and_nothing_repaired() -> None:
    script = (
        "import sys, lorakernels; assert 'triton' not in sys.modules\n"
        "from lorakernels.runtime import interpreter; assert not interpreter.repair()\n"
        "assert 'triton' not in sys.modules"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=60)


@pytest.mark.parametrize("value", ["1", "true", "YES", "on", "y", "0", "false", "off", "maybe", ""])
def test_the_switch_is_read_as_triton_reads_it(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", value)
    # what Triton 3.6 to 3.9 take for on
    on = value.lower() in ("1", "true", "yes", "on", "y")
    assert (interpreter.is_on(), interpreter_is_on(), triton.knobs.runtime.interpret) == (on,) * 3


def test_any_spelling_of_the_switch_repairs_the_interpreter_at_import() -> None:
    script = (
        "import lorakernels; from triton.runtime.interpreter import InterpreterBuilder\n"
        "assert hasattr(InterpreterBuilder, '_lorakernels_bf16')"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "True"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=60)


def test_fusion_is_set_unless_the_user_has_set_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION", raising=False)
    select_interpreter()
    assert os.environ["TRITON_DEFAULT_FP_FUSION"] == "1"
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    select_interpreter()
    assert os.environ["TRITON_DEFAULT_FP_FUSION"] == "0"
