"""Selects rows of a table by id, and spreads the rows of a batch over the slots. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar

from loragate.matrix.problems import nearest


class Row(Protocol):
    @property
    def id(self) -> str:
        """Unique among the rows of all tables of a run."""


_Row = TypeVar("_Row", bound=Row)


def select_rows(rows: Sequence[_Row], patterns: Sequence[str]) -> tuple[_Row, ...]:
    """Rows whose id matches any shell pattern; all of them without a pattern.

    Raises ValueError for a pattern that matches nothing.
    """
    for pattern in patterns:
        if not any(fnmatchcase(row.id, pattern) for row in rows):
            near = nearest(pattern, [row.id for row in rows])
            raise ValueError(
                f"--rows {pattern!r} matches none of the {len(rows)} rows; "
                f"they are named like {rows[0].id!r} and {rows[-1].id!r}"
                + (f"; did you mean {near!r}?" if near else "")
            )
    if not patterns:
        return tuple(rows)
    return tuple(row for row in rows if any(fnmatchcase(row.id, p) for p in patterns))


def equal_runs(tokens: int, slots: int) -> tuple[int, ...]:
    """The slot of each row: equal runs; fewer rows than slots use fewer slots."""
    return tuple(row * slots // tokens for row in range(tokens))
