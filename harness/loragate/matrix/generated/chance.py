"""A sequence of draws that follows from a text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import TypeVar

from loragate.core.drawn import drawn_number

T = TypeVar("T")


class Chance:
    """A sequence of drawn numbers. `seed` is a text; two of the same text draw the same."""

    def __init__(self, seed: str) -> None:
        self._keys = (f"{seed}/{index}" for index in count())

    def below(self, limit: int) -> int:
        """A number from 0 to `limit` - 1."""
        return drawn_number(next(self._keys), limit)

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
