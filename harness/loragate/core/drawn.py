"""Numbers that follow from a text: the same with every release of Python and on every machine."""

from __future__ import annotations

import hashlib


def drawn_number(text: str, limit: int) -> int:
    """A number from 0 to `limit` - 1 that follows from the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % limit
