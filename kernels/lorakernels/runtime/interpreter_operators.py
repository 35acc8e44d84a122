"""Operators of Triton's interpreter without what the types of both sides decide.

For each `a + b` the interpreter works out anew what both sides become, makes a tensor of a Python
number, and broadcasts both, before numpy does the work, the broadcast included; that takes longer
than the work. Here the first operation on two types is the interpreter's own. The next ones take
the type of its result, and hand both sides to its builder as they are.

That is for two sides of one type, for offsets of pointers, and for numbers beside a tensor whose
type they take. Whatever needs a cast, a promotion or an error stays the interpreter's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

_SIGNED = ("int32", "int64")
_FLOATS = ("fp16", "bf16", "fp32")
# a number among these is an int32, which any tensor of signed integers takes for its own type
_INT32 = range(-(2**31), 2**31)
# that are kept: a loop over columns has as many as it has steps
_CONSTANTS = 1024


@dataclass(frozen=True, slots=True)
class _Operator:
    """`methods`: that of the builder, by the scalar type of both sides. `pointer`: that for an
    offset beside a pointer. `numbers`: by the same scalar type, the Python types of numbers that
    become it; not those of comparisons with floats, which promote some of them."""

    name: str
    methods: Mapping[str, str]
    numbers: Mapping[str, tuple[type, ...]]
    pointer: str | None = None
    is_reflected: bool = False


def _arithmetic(name: str, integer: str, floating: str, **options: Any) -> _Operator:
    methods = dict.fromkeys(_SIGNED, integer) | dict.fromkeys(_FLOATS, floating)
    numbers = dict.fromkeys(_SIGNED, (int,)) | dict.fromkeys(_FLOATS, (int, float))
    return _Operator(name, methods, numbers, **options)


def _integer(name: str, method: str) -> _Operator:
    return _Operator(name, dict.fromkeys(_SIGNED, method), dict.fromkeys(_SIGNED, (int,)))


def _bitwise(name: str, method: str) -> _Operator:
    methods = dict.fromkeys(("int1", *_SIGNED), method)
    return _Operator(name, methods, dict.fromkeys(_SIGNED, (int,)))


def _comparison(name: str, integer: str, floating: str) -> _Operator:
    methods = dict.fromkeys(_SIGNED, integer) | dict.fromkeys(_FLOATS, floating)
    return _Operator(name, methods, dict.fromkeys(_SIGNED, (int,)))


_OPERATORS = (
    _arithmetic("__add__", "create_add", "create_fadd", pointer="create_addptr"),
    _arithmetic("__radd__", "create_add", "create_fadd", is_reflected=True),
    _arithmetic("__sub__", "create_sub", "create_fsub"),
    _arithmetic("__rsub__", "create_sub", "create_fsub", is_reflected=True),
    _arithmetic("__mul__", "create_mul", "create_fmul"),
    _arithmetic("__rmul__", "create_mul", "create_fmul", is_reflected=True),
    _integer("__floordiv__", "create_sdiv"),
    _integer("__mod__", "create_srem"),
    _bitwise("__and__", "create_and"),
    _bitwise("__or__", "create_or"),
    _bitwise("__xor__", "create_xor"),
    _comparison("__lt__", "create_icmpSLT", "create_fcmpOLT"),
    _comparison("__le__", "create_icmpSLE", "create_fcmpOLE"),
    _comparison("__gt__", "create_icmpSGT", "create_fcmpOGT"),
    _comparison("__ge__", "create_icmpSGE", "create_fcmpOGE"),
    _comparison("__eq__", "create_icmpEQ", "create_fcmpOEQ"),
    _comparison("__ne__", "create_icmpNE", "create_fcmpUNE"),
)


@dataclass(frozen=True, slots=True)
class _Plan:
    """`method` of the builder gives what a tensor of `type` holds. `number`: the type that a number
    on the other side becomes."""

    method: str
    type: Any
    number: Any


def operators_of(interpreter: Any) -> Mapping[str, Callable[..., Any]]:
    """By name, what takes the place of methods of `tl.tensor` within a launch."""
    semantic = interpreter.interpreter_semantic

    @lru_cache(_CONSTANTS)
    def constant(value: float, dtype: Any) -> Any:
        return semantic.scalar_constant(value, dtype=dtype).handle

    made = {operator.name: _make(operator, semantic, constant) for operator in _OPERATORS}
    return MappingProxyType(made)


def _make(operator: _Operator, semantic: Any, constant: Callable[[Any, Any], Any]) -> Any:
    import triton.language as tl

    own = getattr(tl.tensor, operator.name)
    # by the types of both sides; None where the interpreter's own operator is needed
    plans: dict[tuple[str, Any], _Plan | None] = {}

    def operate(tensor: Any, other: Any, **_: Any) -> Any:
        if type(other) is tl.constexpr:
            other = other.value
        kind = type(other)
        key = tensor.type.name, other.type.name if kind is tl.tensor else kind
        # zero equals the negative zero, which Triton 3.9 keeps
        if (kind is int and other not in _INT32) or (kind is float and other == 0):
            return own(tensor, other, _semantic=semantic)
        if key not in plans:
            result = own(tensor, other, _semantic=semantic)
            plans[key] = _plan(operator, tensor, other, result.type)
            return result
        plan = plans[key]
        if plan is None:
            return own(tensor, other, _semantic=semantic)
        handle = other.handle if kind is tl.tensor else constant(other, plan.number)
        sides = (handle, tensor.handle) if operator.is_reflected else (tensor.handle, handle)
        return tl.tensor(getattr(semantic.builder, plan.method)(*sides), plan.type)

    return operate


def _plan(operator: _Operator, tensor: Any, other: Any, result: Any) -> _Plan | None:
    """That of all operations on the types of these."""
    import triton.language as tl

    scalar = tensor.dtype
    if scalar.is_ptr():
        return None if operator.pointer is None else _Plan(operator.pointer, result, tl.int32)
    method = operator.methods.get(scalar.name)
    if type(other) is tl.tensor:
        is_taken = other.dtype.name == scalar.name
    else:
        is_taken = type(other) in operator.numbers.get(scalar.name, ())
    return _Plan(method, result, scalar) if method is not None and is_taken else None
