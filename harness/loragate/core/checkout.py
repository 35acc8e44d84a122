"""The root of the project, its commit and the state of its working tree. Imports no torch."""

from __future__ import annotations

import subprocess
from enum import StrEnum
from pathlib import Path


class Tree(StrEnum):
    """State of the working tree that a run was started from."""

    CLEAN = "clean"
    DIRTY = "dirty"
    # not a checkout, or no git
    UNKNOWN = "unknown"


def project_root() -> Path:
    """The checkout that holds this package, else the current folder."""
    return _checkout() or Path.cwd()


def data_root() -> Path:
    """Where the cases and the recorded baselines are: the checkout, else the copy that a wheel
    brings. The tests of the project are in a checkout alone."""
    return _checkout() or Path(__file__).resolve().parents[1] / "data"


def _checkout() -> Path | None:
    folder = Path(__file__).resolve().parents[3]
    return folder if (folder / "cases").is_dir() else None


def commit_and_tree(root: Path, *, ignoring: Path | None = None) -> tuple[str, Tree]:
    """Commit and state of the checkout; ("", UNKNOWN) outside of one or without git.

    ignoring: a results file, which an earlier run may have changed and which is no code.
    """
    commit = _git(root, "rev-parse", "HEAD")
    # by default git lists an untracked folder without its files
    scope = ["--untracked-files=all", "--", "."]
    if ignoring is not None and ignoring.resolve().is_relative_to(root.resolve()):
        scope.append(f":(exclude,literal){ignoring.resolve().relative_to(root.resolve())}")
    changes = _git(root, "status", "--porcelain", *scope)
    if commit is None or changes is None:
        return "", Tree.UNKNOWN
    return commit, Tree.DIRTY if changes else Tree.CLEAN


def changed_files(root: Path, revision: str) -> frozenset[str]:
    """Files that are not the same in the working tree as in a revision, relative to the root.

    Raises subprocess.SubprocessError for a revision that git does not know, and OSError.
    """
    # what begins with a dash would be an option
    command = ["git", "-C", str(root), "diff", "--name-only", "--end-of-options", revision, "--"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return frozenset(answer.stdout.splitlines())


def branches_and_tags(root: Path) -> tuple[str, ...]:
    """By their short names; none outside of a checkout or without git."""
    found = _git(root, "for-each-ref", "--format=%(refname:short)")
    return tuple((found or "").splitlines())


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
