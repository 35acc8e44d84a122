"""Errors of adapters: one sentence with the place, what was given and what is allowed.

Names come from files that nobody has reviewed. Invariant: an error is one line of printable
characters, and a name in it is short.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

_SHOWN = 4
# characters of a long name on either side of what is left out
_HALF = 80


class AdapterError(ValueError):
    """The adapter cannot be served as it is. Raised before anything is changed."""

    def __init__(self, message: str) -> None:
        super().__init__(_escaped(message))


def printable(name: object) -> str:
    """A name from an adapter for people to read: on one line, without characters that a terminal
    obeys or that change the direction of writing, and with the middle of a long name left out."""
    text = _escaped(str(name))
    hidden = len(text) - 2 * _HALF
    if hidden <= 0:
        return text
    return f"{text[:_HALF]}... {hidden} more characters ...{text[-_HALF:]}"


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def hint(given: object, allowed: Iterable[str]) -> str:
    """'; did you mean X?' for the nearest allowed name, or nothing. What was given may be no
    text."""
    given = str(given)
    match = difflib.get_close_matches(given, sorted(allowed), n=1)
    return f"; did you mean {printable(repr(match[0]))}?" if match else ""


def listing(names: Collection[str]) -> str:
    """The first names in sorted order, and how many more there are."""
    shown = ", ".join(map(printable, sorted(names)[:_SHOWN]))
    more = len(names) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
