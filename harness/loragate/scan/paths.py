"""Which source a step runs: the files of the subject that it enters, and the Triton kernels that it
launches. Their hash is the key of a path: where it is the same, the same inputs must give the same
bits, and earlier trials count.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeAlias
from unittest.mock import patch

import loragate
from loragate.core.checkout import project_root
from loragate.matrix.case import Case

_HARNESS = Path(loragate.__file__).resolve().parent
# of other packages the versions are recorded with each run
_FOREIGN = ("torch", "triton", "numpy")
_INSTALLED = frozenset({"site-packages", "dist-packages"})
# a function with a cache of its results
_Remembering = type(cache(lambda: None))
# what every import of a module that is not there yet runs in
_IMPORT = "<frozen importlib._bootstrap>", "_find_and_load"
_Tracer: TypeAlias = Callable[[FrameType, str, object], Any]


@dataclass(slots=True)
class TracedPath:
    """files: in the order in which they were entered. kernels: name -> hash of its source and of
    all that it calls; "" in the interpreter, where kernels are entered as other functions are."""

    files: dict[str, None] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)

    def name(self, case: Case) -> str:
        """Site, execution and kernels."""
        parts = [case.site.value, case.execution.value]
        return " ".join([*parts, "+".join(self.kernels)] if self.kernels else parts)

    def key(self) -> str:
        """16 hexadecimal digits; "" where no source was seen."""
        if not self.files and not self.kernels:
            return ""
        digest = hashlib.blake2b(digest_size=8)
        for file in sorted(self.files):
            digest.update(_content(file))
        for name, source in sorted(self.kernels.items()):
            digest.update(f"{name}\0{source}\0".encode())
        return digest.hexdigest()

    def relative_files(self) -> tuple[str, ...]:
        root = project_root().resolve()
        paths = (Path(file).resolve() for file in self.files)
        return tuple(
            sorted(str(p.relative_to(root) if p.is_relative_to(root) else p) for p in paths)
        )


def path_of_engine(target: str) -> TracedPath:
    """Of an engine, which runs in a process of its own: all source of the packages of others that
    the module of `target`, "module:function", names in an import, and of that module."""
    name = target.partition(":")[0]
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        return TracedPath()
    imported = {top for node in ast.walk(ast.parse(_content(spec.origin))) for top in _tops(node)}
    files = {spec.origin: None}
    for package in sorted(imported - set(sys.stdlib_module_names) - {loragate.__name__}):
        files |= dict.fromkeys(filter(_is_own, _sources(package)))
    return TracedPath(files=files)


def _tops(node: ast.AST) -> set[str]:
    """The packages that an import names, without what is within them."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return {node.module.partition(".")[0]}
    return set()


def _sources(package: str) -> list[str]:
    """All Python files of an installed package, or of a module that is a file."""
    spec = find_spec(package)
    if spec is None:
        return []
    folders = spec.submodule_search_locations
    if folders is None:
        return [spec.origin] if spec.origin else []
    return [str(path) for folder in folders for path in sorted(Path(folder).rglob("*.py"))]


def forget_results() -> None:
    """Let the functions of the implementation work out anew what they remember of earlier calls:
    what is remembered is not entered, so that the source of a step would be another one behind
    other trials. Installed packages keep what they have, which may be more than results: they
    change with their versions."""
    for module in [*sys.modules.values()]:
        if _is_edited(str(getattr(module, "__file__", ""))):
            for value in [*vars(module).values()]:
                if isinstance(value, _Remembering) and _is_edited(_file_of(value.__wrapped__)):
                    value.cache_clear()


def _file_of(function: object) -> str:
    code = getattr(function, "__code__", None)
    return code.co_filename if isinstance(code, CodeType) else ""


@contextmanager
def traced_path() -> Iterator[TracedPath]:
    """Within, what this thread enters and launches is noted, but for what imports of modules run:
    the first step of a process has them, and later ones do not."""
    path = TracedPath()
    seen: set[CodeType] = set()
    importing = 0

    def entered(frame: FrameType, event: str, argument: object) -> _Tracer | None:
        nonlocal importing
        code = frame.f_code
        if (code.co_filename, code.co_name) == _IMPORT:
            importing += 1
            frame.f_trace_lines = False
            return left
        if not importing and code not in seen:
            seen.add(code)
            if _is_own(code.co_filename):
                path.files[code.co_filename] = None
        return None

    def left(frame: FrameType, event: str, argument: object) -> _Tracer:
        nonlocal importing
        importing -= event == "return"
        return left

    before = sys.gettrace()
    with ExitStack() as stack:
        stack.enter_context(_no_finalizers())
        for owner, name in _launchers():
            launch = getattr(owner, name)
            stack.enter_context(patch.object(owner, name, _noting(path, launch)))
        sys.settrace(entered)
        try:
            yield path
        finally:
            sys.settrace(before)


@contextmanager
def _no_finalizers() -> Iterator[None]:
    """Within, the garbage collector does not run: it may call finalizers of anything that the
    process has done before."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _launchers() -> tuple[tuple[type, str], ...]:
    """By what Triton launches a kernel: compiled, in a compiled form that the caller keeps, and
    interpreted."""
    if "triton" not in sys.modules:
        return ()
    from triton.compiler import CompiledKernel
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.jit import JITFunction

    return (JITFunction, "run"), (CompiledKernel, "__getitem__"), (GridExecutor, "__call__")


def _noting(path: TracedPath, launch: Callable[..., Any]) -> Callable[..., Any]:
    def launching(launcher: Any, *args: Any, **kwargs: Any) -> Any:
        _note_kernel(path, launcher)
        tracing = sys.gettrace()
        # the interpreter enters a function for each operation of each program
        sys.settrace(None)
        try:
            return launch(launcher, *args, **kwargs)
        finally:
            sys.settrace(tracing)

    return launching


def _note_kernel(path: TracedPath, launcher: Any) -> None:
    # a compiled form keeps what it was compiled from: a function, unless that was Triton's IR
    kernel = getattr(getattr(launcher, "src", None), "fn", launcher)
    function = getattr(kernel, "fn", None)
    if function is None:
        path.kernels[str(launcher.name)] = str(launcher.hash)
        return
    if function.__name__ in path.kernels:
        return
    path.kernels[function.__name__] = str(getattr(kernel, "cache_key", ""))
    for file in _files_of_kernel(function):
        path.files[file] = None


def _files_of_kernel(kernel: FunctionType) -> set[str]:
    """The files of a kernel and of the functions of Triton that it calls by their names."""
    found: dict[FunctionType, None] = {kernel: None}
    waiting = [kernel]
    while waiting:
        function = waiting.pop()
        for name in function.__code__.co_names:
            called = getattr(function.__globals__.get(name), "fn", None)
            if isinstance(called, FunctionType) and called not in found:
                found[called] = None
                waiting.append(called)
    files = {function.__code__.co_filename for function in found}
    return {file for file in files if _is_own(file)}


@cache
def _is_own(file: str) -> bool:
    """Whether a file may belong to the implementation under test."""
    if not file.endswith(".py") or not Path(file).is_file():
        return False
    path = Path(file).resolve()
    if _is_of_harness(file):
        return path.is_relative_to(_HARNESS / "subjects")
    if any(path.is_relative_to(folder) for folder in _foreign_folders()):
        return False
    installed = _INSTALLED & set(path.parts)
    return bool(installed) or not path.is_relative_to(_resolved(sysconfig.get_paths()["stdlib"]))


def _is_of_harness(file: str) -> bool:
    return Path(file).resolve().is_relative_to(_HARNESS)


@cache
def _is_edited(file: str) -> bool:
    """Whether a file belongs to the implementation under test, and to no installed package."""
    return not _INSTALLED & set(Path(file).parts) and _is_own(file) and not _is_of_harness(file)


@cache
def _foreign_folders() -> tuple[Path, ...]:
    specs = map(find_spec, _FOREIGN)
    return tuple(_resolved(spec.origin).parent for spec in specs if spec and spec.origin)


@cache
def _resolved(path: str) -> Path:
    """Without links: an environment may be reached through one."""
    return Path(path).resolve()


@cache
def _content(file: str) -> bytes:
    return Path(file).read_bytes()
