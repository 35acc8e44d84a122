"""Which source a step runs: the files of the subject that it enters, and the Triton kernels that it
launches. Their hash is the key of a path: where it is the same, the same inputs must give the same
bits, and earlier trials count.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import loragate
from loragate.core.checkout import project_root
from loragate.matrix.case import Case

_HARNESS = str(Path(loragate.__file__).parent)
# of other packages the versions are recorded with each run
_FOREIGN = ("torch", "triton", "numpy")


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


@contextmanager
def traced_path() -> Iterator[TracedPath]:
    """Within, what this thread enters and launches is noted."""
    path = TracedPath()
    seen: set[CodeType] = set()
    launchers = _launchers()

    def entered(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call":
            return
        if code in launchers:
            _note_kernel(path, frame.f_locals.get("self"))
        elif code not in seen:
            seen.add(code)
            if _is_own(code.co_filename):
                path.files[code.co_filename] = None

    before = sys.getprofile()
    sys.setprofile(entered)
    try:
        yield path
    finally:
        sys.setprofile(before)


def _launchers() -> frozenset[CodeType]:
    """The functions of Triton by which a kernel is launched: compiled, and interpreted."""
    if "triton" not in sys.modules:
        return frozenset()
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.jit import JITFunction

    return frozenset({JITFunction.run.__code__, GridExecutor.__call__.__code__})


def _note_kernel(path: TracedPath, launcher: Any) -> None:
    name = launcher.fn.__name__
    if name not in path.kernels:
        path.kernels[name] = str(getattr(launcher, "cache_key", ""))
        file = launcher.fn.__code__.co_filename
        if _is_own(file):
            path.files[file] = None


@cache
def _is_own(file: str) -> bool:
    """Whether a file may belong to the implementation under test."""
    if not file.endswith(".py") or not Path(file).is_file():
        return False
    path = str(Path(file).resolve())
    if path.startswith(_HARNESS):
        return path.startswith(f"{_HARNESS}/subjects/")
    if any(path.startswith(folder) for folder in _foreign_folders()):
        return False
    installed = "site-packages" in path or "dist-packages" in path
    return installed or not path.startswith(sysconfig.get_paths()["stdlib"])


@cache
def _foreign_folders() -> tuple[str, ...]:
    specs = map(find_spec, _FOREIGN)
    return tuple(str(Path(spec.origin).parent) for spec in specs if spec and spec.origin)


@cache
def _content(file: str) -> bytes:
    return Path(file).read_bytes()
