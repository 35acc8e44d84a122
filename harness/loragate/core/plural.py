"""Numbers with their nouns. Pure."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """1 case, 2 cases; `plural` for nouns that do not get an s."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"
