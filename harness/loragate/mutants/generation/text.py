"""A module as text and syntax tree, and where its nodes stand in the text. Pure."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from loragate.core.syntax import parse

Span = tuple[int, int]


@dataclass(frozen=True)
class Module:
    """`path`: below the package. Offsets count characters of `text`."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return parse(self.text)

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @cached_property
    def _lines(self) -> list[str]:
        return self.text.splitlines(keepends=True)

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(len(line) for line in self._lines)]

    def offset(self, line: int, column: int) -> int:
        """Of a line from 1 and a column in characters."""
        return self._starts[line - 1] + column

    def span(self, node: ast.expr | ast.stmt | ast.keyword | ast.arg) -> Span:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._at(node.lineno, node.col_offset),
            self._at(node.end_lineno, node.end_col_offset),
        )

    def source(self, node: ast.expr | ast.stmt | ast.keyword) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def _at(self, line: int, byte: int) -> int:
        # the tree counts bytes
        characters = len(self._lines[line - 1].encode()[:byte].decode())
        return self.offset(line, characters)

    @property
    def holds_kernels(self) -> bool:
        return "@triton.jit" in self.text


def within(span: Span, spans: list[Span]) -> bool:
    return any(start <= span[0] and span[1] <= end for start, end in spans)
