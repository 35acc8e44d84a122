"""A copy of lorakernels with one piece of text replaced.

A copy, because Triton reads the source file of a kernel, with its interpreter and with its
compiler: what is patched in memory has no effect.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from loragate.faults.model import Edit

PACKAGE = "lorakernels"


class StaleAnchor(ValueError):
    """The text that a fault replaces is not there exactly once any more."""


def package_folder() -> Path:
    """The folder of the package that is under test; nothing of it is imported."""
    spec = importlib.util.find_spec(PACKAGE)
    origin = spec.origin if spec else None
    assert origin is not None, f"{PACKAGE} is not installed"
    return Path(origin).parent


def source_of(module: str, package: Path) -> Path:
    """The file of a dotted module. Raises StaleAnchor."""
    head, *rest = module.split(".")
    if head != PACKAGE:
        raise StaleAnchor(f"{module}: module must be one of {PACKAGE}")
    path = package.joinpath(*rest)
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.is_file():
        raise StaleAnchor(f"{module}: there is no such module any more")
    return path


def planted_text(edit: Edit, text: str) -> str:
    """The text of the module with the edit in it. Raises StaleAnchor."""
    count = text.count(edit.old)
    if count != 1:
        found = "is not there any more" if not count else f"is there {count} times"
        first = edit.old.strip().splitlines()[0].strip()
        raise StaleAnchor(f"{edit.module}: the text to replace {found} ({first!r})")
    return text.replace(edit.old, edit.new)


def check_anchor(edit: Edit, package: Path) -> None:
    """Raises StaleAnchor if the edit does not fit the package, SyntaxError if what comes out
    is not Python."""
    path = source_of(edit.module, package)
    compile(planted_text(edit, path.read_text(encoding="utf-8")), str(path), "exec")


def plant(edit: Edit | None, package: Path, target: Path) -> None:
    """Copy the package into the folder `target`, with the edit. Raises StaleAnchor."""
    copy = target / PACKAGE
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    if edit is not None:
        path = source_of(edit.module, copy)
        path.write_text(planted_text(edit, path.read_text(encoding="utf-8")), encoding="utf-8")
