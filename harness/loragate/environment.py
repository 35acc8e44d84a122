"""Where the project lies, and the fingerprint of what a run ran on. Imports no torch.

Invariant: asking for a fingerprint initialises no device.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from loragate.devices import usable_cores
from loragate.report.events import Tree

_PACKAGES = ("torch", "triton", "numpy", "vllm", "pytest", "pytest-xdist")


def project_root() -> Path:
    """The checkout that holds this package, else the current folder."""
    checkout = Path(__file__).resolve().parents[2]
    return checkout if (checkout / "cases").is_dir() else Path.cwd()


def new_run_name() -> str:
    """Sorts by time; two runs that start in one second differ by their process."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}"


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def commit_and_tree(root: Path, *, ignoring: Path | None = None) -> tuple[str, Tree]:
    """Commit and state of the checkout; ("", UNKNOWN) outside of one or without git.

    ignoring: the file of records, which the run before has changed and which is no code.
    """
    commit = _git(root, "rev-parse", "HEAD")
    # a folder that is new would hide the names of its files
    scope = ["--untracked-files=all", "--", "."]
    if ignoring is not None and ignoring.resolve().is_relative_to(root.resolve()):
        scope.append(f":(exclude,literal){ignoring.resolve().relative_to(root.resolve())}")
    changes = _git(root, "status", "--porcelain", *scope)
    if commit is None or changes is None:
        return "", Tree.UNKNOWN
    return commit, Tree.DIRTY if changes else Tree.CLEAN


def versions() -> Mapping[str, str]:
    """Versions of what can change a result; a package that is not there is left out."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def host() -> Mapping[str, str]:
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": platform.processor() or platform.machine(),
        "cores": str(usable_cores()),
        "executable": sys.executable,
    }


def _git(root: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
