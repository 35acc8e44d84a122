"""The files of the package under test, and where a text stands in them. Imports no torch."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from loragate.core.syntax import parse
from loragate.faults.planting import package_folder
from loragate.mutants.model import Mutant, Sources

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def read_sources(package: Path | None = None) -> Sources:
    """The text of every module, by its path below the package."""
    folder = package or package_folder()
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*.py"))
    }


def diff_of(mutant: Mutant, sources: Sources) -> str:
    """The mutant as a unified diff."""
    old = sources[mutant.module]
    lines = difflib.unified_diff(
        old.splitlines(keepends=True),
        mutant.apply(old).splitlines(keepends=True),
        f"a/{mutant.module}",
        f"b/{mutant.module}",
        n=2,
    )
    return "".join(lines).rstrip("\n")


def line_of(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


@dataclass(frozen=True, slots=True)
class Place:
    """`function`: the qualified name of the innermost function around some lines, "" outside of
    all. `lines`: those of the statements that they are in; None for code that runs at import,
    which everything depends on."""

    function: str
    lines: frozenset[int] | None


@cache
def _parsed(text: str) -> ast.Module:
    return parse(text)


def place_of(text: str, first: int, last: int) -> Place:
    """Where the lines from `first` to `last` stand."""
    name, function = _function_around(_parsed(text), first, last)
    if function is None or first < function.lineno:
        # a decorator runs at import
        return Place("", None)
    if first < function.body[0].lineno:
        # defaults of arguments: whoever calls the function depends on them
        return Place(name, _lines(function.body[0].lineno, function))
    found = _statements(function.body, first, last) or _lines(function.body[0].lineno, function)
    return Place(name, found)


def _function_around(tree: ast.Module, first: int, last: int) -> tuple[str, _Function | None]:
    name, found = "", None
    scope: ast.AST = tree
    path: list[str] = []
    while True:
        inner = next(
            (child for child in _definitions(scope) if _begin(child) <= first <= _end(child)), None
        )
        if inner is None or last > _end(inner):
            return name, found
        path.append(inner.name)
        if not isinstance(inner, ast.ClassDef):
            name, found = ".".join(path), inner
        scope = inner


def _definitions(scope: ast.AST) -> list[_Function | ast.ClassDef]:
    """Functions and classes directly within `scope`, whatever blocks they are in."""
    found: list[_Function | ast.ClassDef] = []
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.append(child)
        elif isinstance(child, ast.stmt):
            found += _definitions(child)
    return found


def _begin(node: _Function | ast.ClassDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _end(node: ast.AST) -> int:
    end = getattr(node, "end_lineno", None)
    assert end is not None
    return int(end)


def _lines(first: int, node: ast.AST) -> frozenset[int]:
    return frozenset(range(first, _end(node) + 1))


def _statements(body: list[ast.stmt], first: int, last: int) -> frozenset[int]:
    """The lines of the smallest statements that the lines are in. The header of a block counts as
    a statement; a line between two parts of a block stands for the whole block."""
    found: frozenset[int] = frozenset()
    for statement in body:
        if statement.lineno > last or _end(statement) < first:
            continue
        inner = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]
        handlers = [h for h in ast.iter_child_nodes(statement) if isinstance(h, ast.ExceptHandler)]
        inner += [child for handler in handlers for child in handler.body]
        if not inner:
            found |= _lines(statement.lineno, statement)
        elif first < inner[0].lineno:
            header = range(statement.lineno, max(statement.lineno + 1, inner[0].lineno))
            found |= frozenset(header) | _statements(inner, first, last)
        else:
            found |= _statements(inner, first, last) or _lines(statement.lineno, statement)
    return found
