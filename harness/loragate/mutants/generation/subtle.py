"""Mutation operators of this domain: the slips that people make in kernels and their host code.

Each keeps shapes and types, so that the mutant runs and its result is wrong only sometimes. An
operator takes a node of a module and gives replacements of pieces of its text. Pure.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from loragate.mutants.generation.syntax import (
    called,
    cast_target,
    cast_value,
    enclosing_function,
    inner,
    is_cast,
    is_index,
    is_negated,
    is_statement,
    with_comma,
)
from loragate.mutants.generation.text import Module, Span


@dataclass(frozen=True, slots=True)
class Change:
    """The text of `span` becomes `new`."""

    operator: str
    span: Span
    new: str


Found = Iterator[tuple[Span, str]]
_Operator = Callable[[Module, ast.AST], Found]

_EDGES: Mapping[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
}
_EXTREMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
# the order of their arguments does not matter
_SYMMETRIC = frozenset({*_EXTREMES, "gcd"})
_RESETS = frozenset(
    {"zero_", "fill_", "wait", "gdc_wait", "debug_barrier", "synchronize", "clear", "cache_clear"}
)
_COPIES = frozenset({"contiguous", "clone"})
_ALLOCATIONS = {"zeros": "empty", "zeros_like": "empty_like", "new_zeros": "new_empty"}
# places of one among several, in kernels
_INDICES = frozenset(
    {"slot", "expert", "slice_id", "tile", "part", "pair", "row", "rows", "bucket", "split"}
)
_SUMS = ("dot", "load_shrunk", "sum")
# casts to them keep the values of integers
_EXACT = ("int64", "int32")
_ARITHMETIC = (ast.Add, ast.Mult)


def changes(module: Module) -> Iterator[Change]:
    """Every change of every operator, in the order of the text."""
    for node in ast.walk(module.tree):
        for name, operator in OPERATORS.items():
            for span, new in operator(module, node):
                yield Change(name, span, new)


def _mask_term(module: Module, node: ast.AST) -> Found:
    """One term of a mask."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        yield module.span(node), module.source(node.left)
        yield module.span(node), module.source(node.right)


def _condition_term(module: Module, node: ast.AST) -> Found:
    """One operand of `and` or `or`."""
    if isinstance(node, ast.BoolOp):
        word = " and " if isinstance(node.op, ast.And) else " or "
        for left in node.values:
            rest = [inner(module, value) for value in node.values if value is not left]
            yield module.span(node), f"({word.join(rest)})"


def _edge(module: Module, node: ast.AST) -> Found:
    """`<` for `<=`, and the like."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _EDGES:
        sign = _EDGES[type(node.ops[0])]
        left, right = module.source(node.left), module.source(node.comparators[0])
        yield module.span(node), f"{left} {sign} {right}"


def _bound(module: Module, node: ast.AST) -> Found:
    """A bound that is one too low."""
    if isinstance(node, ast.Call) and called(node.func) in ("range", "static_range"):
        stop = node.args[0 if len(node.args) == 1 else 1] if node.args else None
        if isinstance(stop, ast.expr) and not isinstance(stop, ast.Starred):
            yield module.span(stop), f"{inner(module, stop)} - 1"
    elif isinstance(node, ast.Slice) and node.upper is not None:
        yield module.span(node.upper), f"{inner(module, node.upper)} - 1"


def _swapped_arguments(module: Module, node: ast.AST) -> Found:
    """Two neighbouring arguments of the same form."""
    if not isinstance(node, ast.Call) or called(node.func) in _SYMMETRIC:
        return
    for first, second in zip(node.args, node.args[1:], strict=False):
        alike = type(first) is type(second) and isinstance(
            first, (ast.Name, ast.Attribute, ast.Subscript)
        )
        if alike and module.source(first) != module.source(second):
            span = (module.span(first)[0], module.span(second)[1])
            between = module.text[module.span(first)[1] : module.span(second)[0]]
            yield span, module.source(second) + between + module.source(first)


def _other_stride(module: Module, node: ast.AST) -> Found:
    """Another stride of the same kernel or tensor."""
    if isinstance(node, ast.Name) and node.id.startswith("stride_"):
        function = enclosing_function(module, node)
        names = [a.arg for a in function.args.args] if function else []
        strides = [name for name in names if name.startswith("stride_")]
        if node.id in strides and len(strides) > 1 and isinstance(node.ctx, ast.Load):
            yield module.span(node), strides[(strides.index(node.id) + 1) % len(strides)]
    elif isinstance(node, ast.Call) and called(node.func) == "stride" and len(node.args) == 1:
        axis = node.args[0]
        if isinstance(axis, ast.Constant) and isinstance(axis.value, int):
            yield module.span(axis), "1" if axis.value == 0 else "0"


def _wide_cast(module: Module, node: ast.AST) -> Found:
    """A cast to 64 bits."""
    if isinstance(node, ast.Call) and is_cast(node) and cast_target(node).endswith("int64"):
        yield module.span(node), cast_value(module, node)


def _narrow_cast(module: Module, node: ast.AST) -> Found:
    """A cast that rounds."""
    if isinstance(node, ast.Call) and is_cast(node) and not cast_target(node).endswith(_EXACT):
        yield module.span(node), cast_value(module, node)


def _extra_rounding(module: Module, node: ast.AST) -> Found:
    """A sum that is rounded on its way."""
    if module.holds_kernels and isinstance(node, ast.Assign) and isinstance(node.value, ast.expr):
        calls = [n for n in ast.walk(node.value) if isinstance(n, ast.Call)]
        if any(called(call.func) in _SUMS for call in calls):
            value = module.source(node.value)
            yield module.span(node.value), f"({value}).to(tl.bfloat16).to(tl.float32)"


def _other_tail(module: Module, node: ast.AST) -> Found:
    """The value of what a mask leaves out."""
    if isinstance(node, ast.keyword) and node.arg == "other":
        text = module.source(node.value)
        new = {"0.0": "1.0", "0": "1", "-1": "0"}.get(text)
        if new is not None:
            yield module.span(node.value), new


def _dropped_reset(module: Module, node: ast.AST) -> Found:
    """A reset, a wait or a copy."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        if called(node.value.func) in _RESETS:
            yield module.span(node), "pass"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner, name = node.func.value, node.func.attr
        is_copy = name in _COPIES and not node.args
        if is_copy or (name in ("zero_", "fill_") and not is_statement(node, module)):
            yield module.span(node), module.source(owner)
        elif name in _ALLOCATIONS and not module.source(owner).endswith("tl"):
            call = module.source(node)
            yield module.span(node), call.replace(f".{name}(", f".{_ALLOCATIONS[name]}(", 1)


def _first_index(module: Module, node: ast.AST) -> Found:
    """The first element in place of the one that is meant."""
    if isinstance(node, ast.Subscript) and is_index(node.slice):
        yield module.span(node.slice), "0"
    elif isinstance(node, ast.Name) and node.id in _INDICES and module.holds_kernels:
        parent = module.parents[node]
        if isinstance(node.ctx, ast.Load) and isinstance(parent, (ast.BinOp, ast.Attribute)):
            yield module.span(node), f"({node.id} * 0)"


def _dropped_keyword(module: Module, node: ast.AST) -> Found:
    """A keyword argument, for which a default exists or another value is plausible."""
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg in ("mask", "dtype", "device", "dim", "keepdim", "strict", "minlength"):
                start, end = with_comma(module, module.span(keyword))
                yield (start, end), ""


def _extreme(module: Module, node: ast.AST) -> Found:
    """`min` for `max`."""
    if isinstance(node, ast.Call) and called(node.func) in _EXTREMES:
        function = module.source(node.func)
        name = called(node.func)
        yield module.span(node.func), function.removesuffix(name) + _EXTREMES[name]


def _rounded_division(module: Module, node: ast.AST) -> Found:
    """Division rounded to the other side."""
    if isinstance(node, ast.Call) and called(node.func) == "cdiv" and len(node.args) == 2:
        dividend, divisor = (inner(module, argument) for argument in node.args)
        yield module.span(node), f"({dividend} // {divisor})"
    elif (
        isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and is_negated(node.operand)
    ):
        division = node.operand
        assert isinstance(division, ast.BinOp)
        assert isinstance(division.left, ast.UnaryOp)
        dividend = inner(module, division.left.operand)
        yield module.span(node), f"({dividend} // {inner(module, division.right)})"
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv) and not is_negated(node):
        dividend, divisor = inner(module, node.left), inner(module, node.right)
        yield module.span(node), f"(({dividend} + {divisor} - 1) // {divisor})"


def _one_branch(module: Module, node: ast.AST) -> Found:
    """One branch of a conditional expression, or both exchanged."""
    if isinstance(node, ast.IfExp):
        body, other = inner(module, node.body), inner(module, node.orelse)
        yield module.span(node), body
        yield module.span(node), other
        yield module.span(node), f"{other} if {module.source(node.test)} else {body}"


def _dropped_not(module: Module, node: ast.AST) -> Found:
    """A negation."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield module.span(node), module.source(node.operand)


def _dropped_statement(module: Module, node: ast.AST) -> Found:
    """An early exit, an update in place, or a call for its effect."""
    if isinstance(node, (ast.AugAssign, ast.Continue, ast.Break)):
        yield module.span(node), "pass"
    elif isinstance(node, ast.Return) and isinstance(module.parents[node], ast.If):
        if node.value is None or module.source(node.value) == "None":
            yield module.span(node), "pass"
    elif is_statement(node, module) and called(node.func) not in _RESETS:
        yield module.span(node), "pass"


def _dropped_guard(module: Module, node: ast.AST) -> Found:
    """A check that refuses bad input."""
    if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise) and not node.orelse:
        yield module.span(node.test), "False"


def _dropped_factor(module: Module, node: ast.AST) -> Found:
    """One term of a sum or factor of a product."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, _ARITHMETIC):
        yield module.span(node), inner(module, node.left)


OPERATORS: Mapping[str, _Operator] = {
    "mask-term": _mask_term,
    "condition-term": _condition_term,
    "edge": _edge,
    "bound": _bound,
    "swapped-arguments": _swapped_arguments,
    "other-stride": _other_stride,
    "wide-cast": _wide_cast,
    "narrow-cast": _narrow_cast,
    "extra-rounding": _extra_rounding,
    "other-tail": _other_tail,
    "dropped-reset": _dropped_reset,
    "first-index": _first_index,
    "dropped-keyword": _dropped_keyword,
    "extreme": _extreme,
    "rounded-division": _rounded_division,
    "one-branch": _one_branch,
    "dropped-not": _dropped_not,
    "dropped-statement": _dropped_statement,
    "dropped-guard": _dropped_guard,
    "dropped-factor": _dropped_factor,
}
