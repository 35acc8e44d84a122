"""One section of a results file, from the start of a run to its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loragate.core.checkout import Tree, commit_and_tree, project_root
from loragate.core.errors import CommandError
from loragate.core.files import check_writable
from loragate.core.verdict import ExitCode
from loragate.records.results import ResultsError, provenance, read_section, update_section


@dataclass(slots=True, kw_only=True)
class Recorder:
    """`checkout` is the commit and state of the code when the run began, because code may be
    edited during a run; `given_commit` replaces it where the tree has no history. `previous` is
    what the section held then."""

    path: Path
    section: str
    given_commit: str | None
    checkout: tuple[str, Tree]
    previous: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path, section: str, *, commit: str | None = None) -> Recorder:
        """Call this before the run: a file that cannot be read or written must not cost a finished
        one. Raises ResultsError, or CommandError where nothing can be written.
        """
        try:
            check_writable(path)
        except OSError as error:
            raise CommandError(
                f"{path}: cannot be written: {error.strerror}", ExitCode.INFRASTRUCTURE
            ) from error
        return cls(
            path=path,
            section=section,
            given_commit=commit,
            checkout=_checkout(path),
            previous=read_section(path, section) or {},
        )

    @property
    def commit(self) -> str:
        return self.checkout[0] or self.given_commit or ""

    def current(self) -> dict[str, Any]:
        """What the section holds now, empty if it was never recorded. Raises CommandError."""
        try:
            return read_section(self.path, self.section) or {}
        except ResultsError as error:
            raise CommandError(str(error), ExitCode.INFRASTRUCTURE) from error

    def note_edits(self) -> None:
        """Call the tree dirty from here on if the code is no longer what it was."""
        if _checkout(self.path) != self.checkout:
            self.checkout = (self.checkout[0], Tree.DIRTY)

    def save(self, payload: Mapping[str, Any]) -> None:
        """Replace the section by `payload` and where it comes from. Raises CommandError."""
        # imports torch, which a command may leave to its child processes until it records
        from loragate.core.machine import detect_machine

        origin = provenance(detect_machine(), commit=self.given_commit, checkout=self.checkout)
        try:
            update_section(self.path, self.section, origin | dict(payload))
        except (ResultsError, OSError) as error:
            raise CommandError(str(error), ExitCode.INFRASTRUCTURE) from error


def _checkout(record: Path) -> tuple[str, Tree]:
    return commit_and_tree(project_root(), ignoring=record)
