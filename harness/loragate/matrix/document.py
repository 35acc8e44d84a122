"""YAML text to plain data, with the line of every place in it.

The result has only mappings with text keys, sequences and plain scalars. What YAML 1.1 silently
turns into something else (`on`, `010`, `1:30`, a repeated key, a merge) is reported as a problem.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from loragate.core.yaml_file import compose
from loragate.matrix.problems import Problem

Loc = tuple[str | int, ...]

# far above what a case file needs; an alias inside its own anchor nests without end
_MAX_DEPTH = 16
_STRING = "tag:yaml.org,2002:str"
_SCALARS = frozenset(
    f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null")
)
# YAML 1.1 reads 010 as eight and 1:30 as ninety
_SURPRISING_INT = re.compile(r"[-+]?(0[0-7_]+|[0-9_]+(:[0-5]?[0-9])+)")


# what an alias stands for counts each time: a few lines of aliases of aliases make billions of them
_MAX_VALUES = 200_000


class _TooMuch(Exception):
    """Raised with the line in question, and what there is too much of."""


@dataclass(slots=True)
class Document:
    """One parsed file. `data` is None when the text is not YAML at all."""

    file: str
    data: Any = None
    root: yaml.Node | None = None
    problems: list[Problem] = field(default_factory=list)
    # those of `data`, as far as it is built
    num_values: int = 0

    def problem(self, loc: Loc, message: str) -> Problem:
        """A problem at the deepest place of `loc` that exists in the file."""
        node, path = self.find(loc)
        return Problem(self.file, _line(node) if node else 1, render_loc(path), message)

    def line(self, loc: Loc) -> int:
        node, _ = self.find(loc)
        return _line(node) if node else 1

    def find(self, loc: Loc) -> tuple[yaml.Node | None, Loc]:
        """The node at `loc`, and `loc` without the indices into what is a single scalar.

        A name that the file lacks ends the path, as the last of its steps: it is what is missing.
        """
        node, path = self.root, list[str | int]()
        for step in loc:
            child = _child(node, step)
            if child is None and isinstance(step, int):
                continue
            path.append(step)
            if child is None:
                break
            node = child
        return node, tuple(path)

    def scalar_note(self, loc: Loc) -> str | None:
        """Why a scalar is not what it looks like, if YAML 1.1 is to blame."""
        node, _ = self.find(loc)
        if not isinstance(node, yaml.ScalarNode) or node.style:
            return None
        if node.tag.endswith(":bool"):
            return f"YAML reads {node.value} as a boolean, quote it"
        if node.tag == _STRING and re.fullmatch(
            r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+", node.value
        ):
            return f"YAML reads {node.value} as text, write it with a point and a signed exponent"
        return None


def parse(text: str, file: str) -> Document:
    """Parse one file. Never raises: all problems are listed in the document."""
    document = Document(file)
    try:
        document.root = compose(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        document.problems.append(Problem(file, line, "", f"not YAML: {error.problem}"))
        return document
    except yaml.YAMLError as error:
        document.problems.append(Problem(file, 1, "", f"not YAML: {str(error).splitlines()[0]}"))
        return document
    except RecursionError:
        document.problems.append(Problem(file, 1, "", f"nested deeper than {_MAX_DEPTH} levels"))
        return document
    try:
        document.data = _construct(document.root, (), document) if document.root else None
    except _TooMuch as error:
        document.problems.append(Problem(file, error.args[0], "", error.args[1]))
    return document


def render_loc(loc: Sequence[str | int]) -> str:
    """("groups", "gqa", "rows", 0) as groups.gqa.rows[0]."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in loc)
    return text.removeprefix(".")


def _construct(node: yaml.Node, loc: Loc, document: Document) -> Any:
    if len(loc) > _MAX_DEPTH:
        raise _TooMuch(_line(node), f"nested deeper than {_MAX_DEPTH} levels")
    document.num_values += 1
    if document.num_values > _MAX_VALUES:
        raise _TooMuch(_line(node), f"more than {_MAX_VALUES} values, with each alias written out")
    if isinstance(node, yaml.MappingNode):
        return {
            key: _construct(value, (*loc, key), document)
            for key, value in _entries(node, loc, document)
        }
    if isinstance(node, yaml.SequenceNode):
        return [_construct(child, (*loc, i), document) for i, child in enumerate(node.value)]
    return _scalar(node, loc, document)


def _entries(
    node: yaml.MappingNode, loc: Loc, document: Document
) -> Iterator[tuple[str, yaml.Node]]:
    first: dict[str, int] = {}

    def report(key: yaml.Node, message: str) -> None:
        document.problems.append(Problem(document.file, _line(key), render_loc(loc), message))

    for key, value in node.value:
        if key.value == "<<":
            report(key, "merge keys are not allowed; write the keys out, or use `defaults`")
        elif not isinstance(key, yaml.ScalarNode) or key.tag != _STRING:
            shown = key.value if isinstance(key, yaml.ScalarNode) else "a collection"
            report(key, f"given key {shown}, read as {_kind(key)}; allowed: text, quote it")
        elif key.value in first:
            report(key, f"key {key.value!r} is repeated, first in line {first[key.value]}")
        else:
            first[key.value] = _line(key)
            yield key.value, value


def _scalar(node: yaml.Node, loc: Loc, document: Document) -> Any:
    if node.tag not in _SCALARS:
        message = f"given {node.value!r}, read as {_kind(node)}; allowed: plain values, quote it"
        document.problems.append(document.problem(loc, message))
        return str(node.value)
    try:
        value = SafeConstructor().construct_object(node)
    except ValueError:
        # only an explicit tag such as !!int can contradict the text
        value = str(node.value)
    if node.tag.endswith(":int") and _SURPRISING_INT.fullmatch(node.value):
        message = f"given {node.value}, which YAML reads as {value}; write it as a plain decimal"
        document.problems.append(document.problem(loc, message))
    return value


def _child(node: yaml.Node | None, step: str | int) -> yaml.Node | None:
    if isinstance(node, yaml.MappingNode):
        return next((value for key, value in node.value if key.value == step), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        child: yaml.Node = node.value[step]
        return child
    return None


def _kind(node: yaml.Node) -> str:
    return str(node.tag.removeprefix("tag:yaml.org,2002:"))


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
