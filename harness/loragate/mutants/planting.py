"""A planted checkout: what the cases and the host tests of a gate need, with one module changed.

Invariant: nothing in it leads back to the checkout, so that a test which looks for the package by
its own path finds the planted one, and no process writes into the checkout.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from loragate.core.checkout import project_root
from loragate.faults.planting import PACKAGE, package_folder
from loragate.mutants.model import Mutant
from loragate.subjects.registry import SUBJECTS

SUBJECT = "lorakernels"
HOST_TESTS = SUBJECTS[SUBJECT].host_tests
# what host tests use besides the package; no other page, since some change with each record
SHARED = (
    *("conftest.py", "pyproject.toml", "tests/conftest.py"),
    *("examples", "cases", "docs/lorakernels.md"),
)
_NO_SOURCES = shutil.ignore_patterns("__pycache__")


def plant(mutant: Mutant | None, target: Path, package: Path | None = None) -> None:
    """Copy the checkout into the new folder `target`; `mutant` None leaves it as it is."""
    root = project_root()
    for name in (*SHARED, *HOST_TESTS):
        _copy(root / name, target / name)
    _copy(package or package_folder(), planted_package(target))
    if mutant is not None:
        path = planted_package(target) / mutant.module
        path.write_text(mutant.apply(path.read_text(encoding="utf-8")), encoding="utf-8")


def planted_package(root: Path) -> Path:
    return root / "kernels" / PACKAGE


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=_NO_SOURCES)
    elif source.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
