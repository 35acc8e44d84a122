"""Errors of adapters: one sentence with the place, what was given and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

_SHOWN = 4


class AdapterError(ValueError):
    """The adapter cannot be served as it is. Raised before anything is changed."""


def hint(given: str, allowed: Iterable[str]) -> str:
    """'; did you mean X?' for the nearest allowed name, or nothing."""
    match = difflib.get_close_matches(given, sorted(allowed), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def listing(names: Collection[str]) -> str:
    """The first names in sorted order, and how many more there are."""
    shown = ", ".join(sorted(names)[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
