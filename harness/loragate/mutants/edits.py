"""Edits that somebody has written by hand, in a YAML file: mutants, or changes without effect."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from loragate.core.yaml_file import YamlFileError, read_yaml
from loragate.mutants.model import Group, Mutant, Sources
from loragate.mutants.sources import line_of, place_of


class EditError(ValueError):
    """An edit that cannot be read, or that does not fit the package any more."""


@checked(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class WrittenEdit:
    """`old` occurs once in `module`, a path below the package. `kind`: the mistake in a few words.
    `shows`: when somebody would notice. `retired`: why the mistake can no longer be made; the edit
    is then not planted and need not fit, and is kept for readers of earlier results."""

    id: str
    module: str
    old: str
    new: str
    kind: str
    shows: str = ""
    needs_gpu: bool = False
    retired: str = ""


@checked(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class WrittenEquivalent:
    """A change of `module` that no caller can observe, and the `reason`. `old` occurs once."""

    module: str
    old: str
    new: str
    reason: str


_T = TypeVar("_T")
_EDITS = TypeAdapter(list[WrittenEdit])
_EQUIVALENTS = TypeAdapter(list[WrittenEquivalent])


@dataclass(frozen=True, slots=True)
class Edits:
    """The edits of a file: those to plant, and the reasons of those that are retired by id."""

    mutants: list[Mutant]
    retired: dict[str, str]


def read_edits(path: Path, sources: Sources) -> Edits:
    """Raises EditError."""
    edits = _read(path, _EDITS)
    names = [edit.id for edit in edits]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise EditError(f"{path}: ids must be unique (given twice: {', '.join(twice)})")
    return Edits(
        mutants=[_mutant(edit, sources) for edit in edits if not edit.retired],
        retired={edit.id: edit.retired for edit in edits if edit.retired},
    )


def _mutant(edit: WrittenEdit, sources: Sources) -> Mutant:
    text = _text_of(edit.module, sources)
    start, end = span(edit.module, edit.old, sources)
    kept = _common(edit.old, edit.new)
    # the lines that differ: a unit that runs only the others does not run the edit
    first, last = line_of(text, start + kept[0]), line_of(text, max(start, end - kept[1] - 1))
    if first > last:
        # lines are added between these two
        first, last = last, first
    mutant = Mutant(
        id=edit.id,
        module=edit.module,
        start=start,
        end=end,
        new=edit.new,
        operator=edit.kind,
        group=Group.BLIND,
        line=first,
        end_line=last,
        function=place_of(text, first, last).function,
        needs_gpu=edit.needs_gpu,
        shows=edit.shows,
    )
    try:
        compile(mutant.apply(text), edit.module, "exec")
    except SyntaxError as error:
        raise EditError(f"{edit.id}: is not Python: {error}") from error
    return mutant


def _common(old: str, new: str) -> tuple[int, int]:
    """The lengths of the whole lines that both begin and end with."""
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    head = 0
    while head < min(len(before), len(after)) and before[head] == after[head]:
        head += 1
    tail = 0
    while tail < min(len(before), len(after)) - head and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    return (
        sum(map(len, before[:head])),
        sum(map(len, before[len(before) - tail :])),
    )


def span(module: str, old: str, sources: Sources) -> tuple[int, int]:
    """Where `old` stands. Raises EditError if it does not occur exactly once."""
    text = _text_of(module, sources)
    count = text.count(old)
    if count != 1 or not old.strip():
        found = "is not there" if not count else f"is there {count} times"
        first = next(iter(old.strip().splitlines()), "")
        raise EditError(f"{module}: the text to replace {found} ({first!r})")
    start = text.index(old)
    return start, start + len(old)


def _text_of(module: str, sources: Sources) -> str:
    if module not in sources:
        raise EditError(f"{module}: no such module")
    return sources[module]


@dataclass(frozen=True, slots=True)
class Equivalents:
    """Whole texts of modules that mean the same as the sound ones, with the reasons."""

    reasons: dict[tuple[str, str], str] = field(default_factory=dict)

    def reason(self, mutant: Mutant, sources: Sources) -> str | None:
        planted = mutant.apply(sources[mutant.module])
        alike = (
            reason
            for (module, text), reason in self.reasons.items()
            if module == mutant.module and (text == planted or _syntax(text) == _syntax(planted))
        )
        return next(alike, None)


@cache
def _syntax(text: str) -> str:
    """Equal for texts that differ in parentheses and spaces alone, and for what is the default of
    zip, which one operator writes and another leaves out."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "zip":
            node.keywords = [k for k in node.keywords if ast.unparse(k) != "strict=False"]
    return ast.dump(tree)


def read_equivalents(path: Path, sources: Sources) -> Equivalents:
    """Raises EditError, also for an entry whose text is gone."""
    reasons: dict[tuple[str, str], str] = {}
    for entry in _read(path, _EQUIVALENTS):
        start, end = span(entry.module, entry.old, sources)
        text = sources[entry.module]
        reasons[entry.module, text[:start] + entry.new + text[end:]] = entry.reason
    return Equivalents(reasons)


def _read(path: Path, adapter: TypeAdapter[list[_T]]) -> list[_T]:
    try:
        return adapter.validate_python(read_yaml(path) or [])
    except YamlFileError as error:
        raise EditError(str(error)) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise EditError(f"{path}: {where}: {first['msg']}") from error
