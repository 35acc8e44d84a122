"""Problems in case files, each with its file and line, reported all at once. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One defect of a case file; `field` is the path to it in the file's own terms.

    `line` is 0 for a file that cannot be read at all.
    """

    file: str
    line: int
    field: str
    message: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return (
            f"{where}: {self.field}: {self.message}" if self.field else f"{where}: {self.message}"
        )


class CaseFileError(ValueError):
    """Bad case files. `problems` holds all of them, sorted by file and line."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(set(problems)))
        count = len(self.problems)
        if count == 1:
            super().__init__(f"nothing was run: {self.problems[0]}")
            return
        head = f"{count} problems in the case files, nothing was run:"
        super().__init__("\n".join([head, *(f"  {problem}" for problem in self.problems)]))


def nearest(given: object, allowed: Iterable[str]) -> str | None:
    """The allowed name that was most likely meant."""
    if not isinstance(given, str):
        return None
    names = {name.lower(): name for name in allowed}
    match = difflib.get_close_matches(given.lower(), sorted(names), n=1, cutoff=0.5)
    return names[match[0]] if match else None


def describe(given: str, allowed: str, near: str | None = None, note: str | None = None) -> str:
    """The message of a problem: given, allowed, nearest match, note."""
    parts = [f"given {given}", f"allowed: {allowed}"]
    if near is not None:
        parts.append(f"nearest: {near}")
    if note is not None:
        parts.append(note)
    return "; ".join(parts)
