"""A copy of lorakernels with one piece of text replaced.

It has to be a copy, because Triton reads the source file of a kernel, in the interpreter as in the
compiler: patching a module in memory has no effect.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from loragate.faults.model import Edit

PACKAGE = "lorakernels"


class StaleAnchor(ValueError):
    """The text that a fault replaces no longer occurs exactly once."""


def package_folder() -> Path:
    """The folder of the package under test. Imports nothing of it."""
    spec = importlib.util.find_spec(PACKAGE)
    origin = spec.origin if spec else None
    assert origin is not None, f"{PACKAGE} is not installed"
    return Path(origin).parent


def source_of(module: str, package: Path) -> Path:
    """The file of a dotted module. Raises StaleAnchor."""
    head, *rest = module.split(".")
    if head != PACKAGE:
        raise StaleAnchor(f"{module}: must be a module of {PACKAGE}")
    path = package.joinpath(*rest)
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.is_file():
        raise StaleAnchor(f"{module}: no such module")
    return path


def planted_text(edit: Edit, text: str) -> str:
    """The text of the module with the edit in it. Raises StaleAnchor."""
    count = text.count(edit.old)
    if count != 1:
        found = "is not there" if not count else f"is there {count} times"
        first = edit.old.strip().splitlines()[0].strip()
        raise StaleAnchor(f"{edit.module}: the text to replace {found} ({first!r})")
    return text.replace(edit.old, edit.new)


def check_anchor(edit: Edit, package: Path) -> None:
    """Raises StaleAnchor if the edit does not fit the package, SyntaxError if the result is not
    Python."""
    path = source_of(edit.module, package)
    compile(planted_text(edit, path.read_text(encoding="utf-8")), str(path), "exec")


def plant(edit: Edit | None, package: Path, target: Path) -> None:
    """Copy the package into the folder `target`, with the edit. Raises StaleAnchor."""
    copy = target / PACKAGE
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    if edit is not None:
        path = source_of(edit.module, copy)
        path.write_text(planted_text(edit, path.read_text(encoding="utf-8")), encoding="utf-8")
