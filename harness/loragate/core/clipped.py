"""Texts that are longer than anybody reads. Pure."""

from __future__ import annotations

# of one text in a record; a log of megabytes in every event would slow down each reader
RECORD_LIMIT = 40_000


def clipped(text: str, limit: int) -> str:
    """`text`, or its beginning and its end with a note of how much is left out between them."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
