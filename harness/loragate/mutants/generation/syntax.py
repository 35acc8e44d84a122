"""What operators ask of a node: what it is, what it is called, and its text. Pure."""

from __future__ import annotations

import ast
from typing import TypeGuard

from loragate.mutants.generation.text import Module, Span


def inner(module: Module, node: ast.expr) -> str:
    """The text of a node that may stand within an expression of any kind."""
    simple = isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Constant, ast.Subscript))
    return module.source(node) if simple else f"({module.source(node)})"


def called(function: ast.expr) -> str:
    """The last part of what is called."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def is_statement(node: ast.AST, module: Module) -> TypeGuard[ast.Call]:
    """Whether this is a call that stands alone, for its effect."""
    return isinstance(node, ast.Call) and isinstance(module.parents[node], ast.Expr)


def is_cast(node: ast.Call) -> bool:
    name = called(node.func)
    method = name == "to" and isinstance(node.func, ast.Attribute) and len(node.args) == 1
    return (method or (name == "cast" and len(node.args) == 2)) and not node.keywords


def cast_target(cast: ast.Call) -> str:
    return ast.unparse(cast.args[-1])


def cast_value(module: Module, node: ast.Call) -> str:
    if called(node.func) == "cast":
        return inner(module, node.args[0])
    assert isinstance(node.func, ast.Attribute)
    return module.source(node.func.value)


def is_index(node: ast.expr) -> bool:
    """Whether this picks one element: a name or a calculation, no slice and no constant."""
    return isinstance(node, (ast.Name, ast.Attribute, ast.BinOp))


def is_negated(node: ast.expr) -> bool:
    """Whether this is the inner part of `-(-a // b)`."""
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.FloorDiv)
        and isinstance(node.left, ast.UnaryOp)
        and isinstance(node.left.op, ast.USub)
    )


def with_comma(module: Module, span: Span) -> Span:
    """A span of an argument with the comma and the space before it, or after it."""
    start, end = span
    before = module.text[:start].rstrip()
    if before.endswith(","):
        return len(before) - 1, end
    after = module.text[end:]
    rest = after.lstrip().removeprefix(",").lstrip()
    return start, end + len(after) - len(rest)


def enclosing_function(module: Module, node: ast.AST) -> ast.FunctionDef | None:
    while node in module.parents:
        node = module.parents[node]
        if isinstance(node, ast.FunctionDef):
            return node
    return None
