"""The builds of lorakernels that are compared, each a copy in a folder of its own.

Invariant: a build is a copy, so that nobody edits it while it is measured, and its kernels are
compiled into a cache of its own, because Triton knows a kernel by less than its content.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import loragate
from loragate.core.checkout import branches_and_tags
from loragate.matrix.problems import nearest

PACKAGE = "lorakernels"
_IN_A_CHECKOUT = f"kernels/{PACKAGE}"


@dataclass(frozen=True, slots=True)
class Build:
    """`name` is what reports call it; `folder` holds the package."""

    name: str
    folder: Path

    @property
    def digest(self) -> str:
        """Of all its files: equal builds share a cache."""
        found = hashlib.sha256()
        for path in sorted(self.folder.rglob("*.py")):
            found.update(f"{path.relative_to(self.folder)}\0".encode())
            found.update(path.read_bytes())
        return found.hexdigest()[:16]

    def environment(self, environ: Mapping[str, str], cache: Path) -> dict[str, str]:
        """Of a process that imports this build beside the harness of this one."""
        harness = Path(loragate.__file__).parents[1]
        paths = [str(self.folder), str(harness), environ.get("PYTHONPATH", "")]
        return {
            **environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TRITON_CACHE_DIR": str(cache / f"{PACKAGE}-{self.digest}"),
        }


def installed_build(target: Path) -> Build:
    """A copy, in the folder `target`, of the package that this process would import."""
    spec = importlib.util.find_spec(PACKAGE)
    origin = spec.origin if spec else None
    assert origin is not None, f"{PACKAGE} is not installed"
    _copy(Path(origin).parent, target)
    return Build("this build", target)


def check_against(against: str, root: Path, *, option: str = "--against") -> None:
    """Before minutes are spent on something else. Raises ValueError where `build_against` would;
    `option` is what the message names."""
    with _naming(option):
        _source_of(against, root)


def build_against(against: str, root: Path, target: Path) -> Build:
    """A copy, in the folder `target`, of what `against` names: a folder that holds the package (an
    environment, a checkout, or the package's own parent), or a revision of the checkout `root`.

    Raises ValueError.
    """
    with _naming("--against"):
        source = _source_of(against, root)
    if isinstance(source, Path):
        _copy(source, target)
    else:
        _extract(source, target)
    return Build(against, target)


@contextmanager
def _naming(option: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{option} {error}") from error


def _source_of(against: str, root: Path) -> Path | bytes:
    """The folder of the package, or a tar file that holds it."""
    if not against:
        raise ValueError("must be a folder or a revision (got '')")
    return _package_in(Path(against)) if Path(against).is_dir() else _archive(against, root)


def _package_in(folder: Path) -> Path:
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    places = ("", "kernels", f"lib/{python}/site-packages")
    for place in places:
        package = folder / place / PACKAGE
        if (package / "__init__.py").is_file():
            return package
    looked = ", ".join(str(folder / place / PACKAGE) for place in places)
    raise ValueError(f"{folder}: the folder holds no {PACKAGE} (looked for {looked})")


def _copy(package: Path, target: Path) -> None:
    shutil.copytree(package, target / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))


def _archive(revision: str, root: Path) -> bytes:
    """The package in a revision, as a tar file."""
    # what begins like an option is none
    quietly = ("--verify", "--quiet", "--end-of-options")
    commit = _git(root, "rev-parse", *quietly, f"{revision}^{{commit}}")
    if commit is None:
        near = nearest(revision, branches_and_tags(root))
        hint = f"; did you mean {near}?" if near else ""
        raise ValueError(
            f"{revision}: neither a folder nor a revision of the git checkout in {root}{hint}"
        )
    archive = _git(root, "archive", "--format=tar", commit.decode().strip(), _IN_A_CHECKOUT)
    if archive is None:
        raise ValueError(f"{revision}: the revision holds no {_IN_A_CHECKOUT}")
    return archive


def _extract(archive: bytes, target: Path) -> None:
    # filters came with Python 3.11.4; git has made the archive a moment ago
    safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar.getmembers():
            member.name = member.name.removeprefix("kernels").lstrip("/")
            if member.name:
                tar.extract(member, target, **safely)


def _git(root: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(
            ("git", "-C", str(root), *arguments), capture_output=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
