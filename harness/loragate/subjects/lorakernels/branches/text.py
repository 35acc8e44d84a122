"""Lines of text that name branches."""

from __future__ import annotations


def several(what: str, count: int) -> str:
    return f"{what}: {'one' if count == 1 else 'several'}"
