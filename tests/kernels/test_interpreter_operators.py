"""Operators that skip what types decide give what the interpreter's own give."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest

from loragate.core.machine import select_interpreter

select_interpreter()

import triton.language as tl  # noqa: E402

from lorakernels.runtime import interpreter as repaired  # noqa: E402
from lorakernels.runtime.interpreter_operators import _CONSTANTS, operators_of  # noqa: E402

pytestmark = pytest.mark.skipif(not repaired.is_on(), reason="this process runs compiled kernels")

POINTERS = [tl.pointer_type(tl.float16), tl.pointer_type(tl.float32, const=True)]
SCALARS = [tl.int1, tl.int8, tl.uint32, tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32]
NUMBERS = [
    0,
    3,
    -5,
    257,
    2**31 - 1,
    -(2**31),
    2**31,
    -(2**31) - 1,
    2**40,
    True,
    0.5,
    -0.0,
    1e-40,
    1e300,
]
SHAPES = [
    ((), ()),
    ((4,), (4,)),
    ((4,), ()),
    ((), (4,)),
    ((4, 1), (1, 2)),
    ((1,), (4,)),
    ((2,), (4,)),
]
ARITHMETIC = ["__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"]
INTEGER = ["__floordiv__", "__mod__", "__and__", "__or__", "__xor__"]
NAMES = [*ARITHMETIC, *INTEGER, "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"]


@pytest.fixture(scope="module")
def operators() -> Mapping[str, Any]:
    """Of one process, as a launch has them: what one pair of types has taught is used for all."""
    return operators_of(interpreter())


def interpreter() -> Any:
    from triton.runtime import interpreter

    return interpreter


def tensor(scalar: Any, shape: tuple[int, ...], first: int) -> Any:
    """Its elements count from `first`, which no operator divides by zero."""
    size = shape or (1,)
    values = first + np.arange(np.prod(size)).reshape(size)
    handle_of = interpreter().TensorHandle
    if scalar.is_ptr():
        handle = handle_of((4096 + 64 * values).astype(np.uint64), scalar)
    elif scalar == tl.bfloat16:
        handle = handle_of(repaired.encode_bf16(values / 3), scalar)
    else:
        data = values / 3 if scalar.is_floating() else values
        handle = handle_of(data.astype(interpreter()._get_np_dtype(scalar)), scalar)
    return tl.tensor(handle, tl.block_type(scalar, list(shape)) if shape else scalar)


def outcome(operate: Any, left: Any, right: Any, **semantic: Any) -> tuple[Any, ...]:
    """What a result is in every respect, or the type of the error."""
    try:
        with np.errstate(all="ignore"):
            result = operate(left, right, **semantic)
    except Exception as error:
        return (type(error),)
    data = np.ascontiguousarray(result.handle.data)
    parts = result.type, result.type.scalar, result.dtype, result.handle.dtype
    const = getattr(result.dtype, "const", None)
    return (*map(str, parts), const, data.dtype, data.shape, data.tobytes())


def compare(operators: Mapping[str, Any], name: str, left: Any, right: Any) -> None:
    semantic = interpreter().interpreter_semantic
    expected = outcome(getattr(tl.tensor, name), left, right, _semantic=semantic)
    # the first one may be the interpreter's own
    found = [outcome(operators[name], left, right) for _ in range(2)]
    assert found == [expected] * 2, (name, left.type, getattr(right, "type", right))


@pytest.mark.parametrize("name", NAMES)
def test_two_tensors_give_what_they_give_without_shortcut(
    operators: Mapping[str, Any], name: str
) -> None:
    kinds = [*SCALARS, *POINTERS]
    for (left, right), (of_left, of_right) in product(product(kinds, kinds), SHAPES):
        compare(operators, name, tensor(left, of_left, 1), tensor(right, of_right, 2))


@pytest.mark.parametrize("name", NAMES)
def test_a_number_beside_a_tensor_gives_what_it_gives_without_shortcut(
    operators: Mapping[str, Any], name: str
) -> None:
    kinds = [*SCALARS, *POINTERS]
    # 257 is no bf16, and the one below it is the first element of the second tensor
    for scalar, shape, first, number in product(kinds, [(), (4,)], (1, 3 * 256), NUMBERS):
        for other in (number, tl.constexpr(number)):
            if number or name not in ("__floordiv__", "__mod__"):
                compare(operators, name, tensor(scalar, shape, first), other)


def test_values_of_the_same_types_that_come_later_have_results_of_their_own(
    operators: Mapping[str, Any],
) -> None:
    for first in range(5):
        left, right = tensor(tl.int32, (4,), first), tensor(tl.int32, (4,), 7 * first + 1)
        result = operators["__mul__"](left, right)
        assert result.handle.data.tolist() == (left.handle.data * right.handle.data).tolist()
    for number in (3, 4, -4):
        result = operators["__rsub__"](left, number)
        assert result.handle.data.tolist() == (number - left.handle.data).tolist()


@pytest.mark.parametrize(
    ("name", "left", "right"),
    [
        ("__add__", tl.int32, tl.int32),
        ("__add__", POINTERS[0], tl.int64),
        ("__add__", POINTERS[1], 8),
        ("__rmul__", tl.bfloat16, 0.5),
        ("__and__", tl.int1, tl.int1),
        ("__lt__", tl.int64, tl.constexpr(9)),
        ("__ge__", tl.float16, tl.float16),
    ],
)
def test_the_second_operation_on_two_types_asks_nothing_of_the_types(
    monkeypatch: pytest.MonkeyPatch, name: str, left: Any, right: Any
) -> None:
    operate = operators_of(interpreter())[name]
    other = tensor(right, (4,), 1) if isinstance(right, tl.dtype) else right
    again = operate(tensor(left, (4,), 1), other), operate(tensor(left, (4,), 1), other)
    semantic = type(interpreter().interpreter_semantic)
    monkeypatch.setattr(semantic, "binary_op_type_checking_impl", None)
    last = operate(tensor(left, (4,), 1), other)
    assert [str(result.type) for result in again] == [str(last.type)] * 2
    assert (again[1].handle.data == last.handle.data).all()


def test_numbers_of_a_long_loop_are_not_all_kept() -> None:
    operate = operators_of(interpreter())["__add__"]
    for number in range(_CONSTANTS + 2):
        result = operate(tensor(tl.int32, (), 1), number)
        assert result.handle.data.tolist() == [number + 1]
    found = [cell.cell_contents for cell in operate.__closure__ if callable(cell.cell_contents)]
    (constant,) = (one for one in found if hasattr(one, "cache_info"))
    assert constant.cache_info().currsize <= _CONSTANTS


def test_a_launch_uses_them_and_leaves_the_language_as_it_was() -> None:
    patches = interpreter()
    own = {name: getattr(tl.tensor, name) for name in NAMES}
    scope = patches._LangPatchScope()
    patches._patch_builtin(tl.tensor, patches.interpreter_builder, scope)
    within = {name: getattr(tl.tensor, name).__qualname__ for name in NAMES}
    scope.restore()
    assert set(within.values()) == {"_make.<locals>.operate"}
    assert {name: getattr(tl.tensor, name) for name in NAMES} == own
