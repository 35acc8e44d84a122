"""Which statements of lorakernels this process runs: a copy of it notes each of them.

Python's own tracing makes Triton's interpreter more than twice as slow; a call before each
statement costs a few percent. Triton's interpreter runs a kernel as Python, so that kernels are no
exception. What is noted is appended to a file at once: a process that ends without notice loses
nothing, and one that a test starts writes to the same file.

A test may also read a module, to look for what its text must not have. Such a test looks at every
statement, and runs none.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

from loragate.core.syntax import parse

_FILE, _PACKAGE = "LORAGATE_MUTANTS_TRACE", "LORAGATE_MUTANTS_PACKAGE"
# in place of a line: the text of the module was read
WHOLE_TEXT = 0
# what reads a module in order to run it, to compile its kernels or to show a line of it
_READ_CODE = frozenset(
    {"_frozen_importlib_external", "importlib._bootstrap_external", "linecache", "tokenize"}
)
_SITE = "from loragate.mutants.tracing import start_from_environment\nstart_from_environment()\n"
# names that copies find among Python's own, without an import
_NOTE, _SKIP = "__loragate_note__", "__loragate_skip__"
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def instrument(package: Path) -> None:
    """Let every module of a copy of the package note the statements of its functions."""
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text(instrumented(text, str(path.relative_to(package))), encoding="utf-8")


def instrumented(text: str, module: str) -> str:
    """The text with a note before every statement of a function, by the statement's own line."""
    lines = text.splitlines(keepends=True)
    notes: dict[int, str] = {}
    for function in ast.walk(parse(text)):
        if isinstance(function, _Function):
            for statement in _statements(function.body, docstring=True):
                first = _first_line(statement)
                if lines[first - 1].lstrip().startswith("elif"):
                    continue
                indent = " " * statement.col_offset
                noted = "".join(
                    f"{indent}{_SKIP}() or {_NOTE}({f'{module}:{line}'!r})\n"
                    for line in _headers(statement, lines)
                )
                notes[first] = noted
    return "".join(notes.get(number, "") + line for number, line in enumerate(lines, 1))


def _statements(body: list[ast.stmt], *, docstring: bool = False) -> Iterator[ast.stmt]:
    """All statements of a body, except those of functions and classes within."""
    for number, statement in enumerate(body):
        if docstring and number == 0 and _is_text(statement):
            continue
        yield statement
        if isinstance(statement, (*_Function, ast.ClassDef)):
            continue
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.stmt):
                yield from _statements([child])
            elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
                yield from _statements(child.body)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def _headers(statement: ast.stmt, lines: list[str]) -> Iterator[int]:
    """The statement's line and those of its `elif`s, before which nothing can stand."""
    yield statement.lineno
    while isinstance(statement, ast.If) and len(statement.orelse) == 1:
        statement = statement.orelse[0]
        if not lines[statement.lineno - 1].lstrip().startswith("elif"):
            return
        yield statement.lineno


def prepare_processes(folder: Path, package: Path) -> None:
    """Let every Python process that this one starts note what it runs and reads of `package`, which
    `instrument` has seen."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_SITE, encoding="utf-8")
    sys.path.insert(0, str(folder))
    os.environ[_PACKAGE] = str(package.resolve())
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def start(trace: Path) -> None:
    """From here on, this process and those that it starts append to the file `trace`."""
    os.environ[_FILE] = str(trace)
    seen: set[str] = set()
    # unbuffered appends of whole entries, so that processes do not mix them
    output = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(place: str) -> None:
        if place not in seen:
            seen.add(place)
            os.write(output, f"{place}\n".encode())

    if _PACKAGE in os.environ and not hasattr(builtins, _NOTE):
        # a process cannot get rid of it
        sys.addaudithook(_note_texts_of(Path(os.environ[_PACKAGE])))
    setattr(builtins, _NOTE, note)
    setattr(builtins, _SKIP, _is_compiling)
    inspect.getsourcelines = _for_triton(inspect.getsourcelines)


def _note_texts_of(package: Path) -> Callable[[str, tuple[Any, ...]], None]:
    """A hook of Python that notes which modules of a package are read."""
    home = f"{package}{os.sep}"

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not str(arguments[0]).endswith(".py"):
            return
        path = os.path.realpath(arguments[0])
        if not path.startswith(home):
            return
        if sys._getframe(1).f_globals.get("__name__") not in _READ_CODE:
            getattr(builtins, _NOTE)(f"{path.removeprefix(home)}:{WHOLE_TEXT}")

    return hook


def _for_triton(read: Callable[[Any], tuple[list[str], int]]) -> Any:
    """The lines of a function, without notes where Triton compiles it: there a note is no call of
    Python. The interpreter reads its kernels in the same way and runs the notes."""

    @wraps(read)
    def lines_of(function: Any) -> tuple[list[str], int]:
        lines, first = read(function)
        if os.environ.get("TRITON_INTERPRET") == "1":
            return lines, first
        return [line for line in lines if f"{_SKIP}() or {_NOTE}(" not in line], first

    return lines_of


def _is_compiling() -> bool:
    """True where TorchDynamo reads a function, which could not follow a note."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_dynamo_compiling())


def start_from_environment() -> None:
    if _FILE in os.environ:
        start(Path(os.environ[_FILE]))


def read_trace(trace: Path) -> dict[str, set[int]]:
    """Lines by module, `WHOLE_TEXT` among those of one that was read."""
    found: dict[str, set[int]] = {}
    for entry in trace.read_text(encoding="utf-8").split() if trace.exists() else ():
        module, _, line = entry.rpartition(":")
        found.setdefault(module, set()).add(int(line))
    return found
