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
from loragate.records.results import (
    Change,
    ResultsError,
    change_section,
    provenance,
    read_section,
)


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

    def note_edits(self) -> None:
        """Call the tree dirty from here on if the code is no longer what it was."""
        if _checkout(self.path) != self.checkout:
            self.checkout = (self.checkout[0], Tree.DIRTY)

    def save(self, payload: Mapping[str, Any], *, origin: Mapping[str, Any] | None = None) -> None:
        """Replace the section by `payload` and where it comes from. Raises CommandError.

        origin: for a run of other processes, instead of this checkout and machine.
        """
        self.change(lambda current: payload, origin=origin)

    def change(self, change: Change, *, origin: Mapping[str, Any] | None = None) -> bool:
        """Replace the section by what `change` makes of what it holds by then, and where that comes
        from: another run may have recorded into it since this one began. `change` returns None to
        leave it. Returns whether it was replaced. Raises CommandError."""
        found = self._origin() if origin is None else origin

        def with_origin(current: dict[str, Any]) -> Mapping[str, Any] | None:
            changed = change(current)
            return None if changed is None else {**found, **changed}

        try:
            return change_section(self.path, self.section, with_origin)
        except (ResultsError, OSError) as error:
            raise CommandError(str(error), ExitCode.INFRASTRUCTURE) from error

    def _origin(self) -> Mapping[str, Any]:
        # imports torch, which a command may leave to its child processes until it records
        from loragate.core.machine import detect_machine

        return provenance(detect_machine(), commit=self.given_commit, checkout=self.checkout)


def _checkout(record: Path) -> tuple[str, Tree]:
    return commit_and_tree(project_root(), ignoring=record)
