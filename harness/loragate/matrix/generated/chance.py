"""Numbers that follow from a text: the same with every release of Python and on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import count
from typing import TypeVar

T = TypeVar("T")


class Chance:
    """A sequence of drawn numbers. `seed` is a text; two of the same text draw the same."""

    def __init__(self, seed: str) -> None:
        self._keys = (f"{seed}/{index}".encode() for index in count())

    def below(self, limit: int) -> int:
        """A number from 0 to `limit` - 1."""
        digest = hashlib.blake2b(next(self._keys), digest_size=8).digest()
        return int.from_bytes(digest, "big") % limit

    def one_in(self, count: int) -> bool:
        return self.below(count) == 0

    def choice(self, values: Sequence[T]) -> T:
        return values[self.below(len(values))]

    def size(self, limit: int, *, unit: int = 1, least: int = 1) -> int:
        """A multiple of `unit` from `least` to `limit`, as often small as large."""
        first = -(-least // unit)
        last = max(first, limit // unit)
        bits = first.bit_length() + self.below(last.bit_length() - first.bit_length() + 1)
        low, high = max(first, 1 << bits - 1), min(last, (1 << bits) - 1)
        return unit * (low + self.below(high - low + 1))
