"""Sets of bytes as sorted, disjoint half-open spans. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

Spans: TypeAlias = tuple[tuple[int, int], ...]


def merged(spans: Iterable[tuple[int, int]]) -> Spans:
    """The union: sorted, without empty spans, neighbours joined."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if stop <= start:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return tuple(result)


def first_common(one: Spans, other: Spans) -> tuple[int, int] | None:
    """The first bytes that both sets contain, or None."""
    if not one or not other or one[-1][1] <= other[0][0] or other[-1][1] <= one[0][0]:
        return None
    i = j = 0
    while i < len(one) and j < len(other):
        start, stop = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < stop:
            return start, stop
        if one[i][1] <= other[j][1]:
            i += 1
        else:
            j += 1
    return None


def strided(sizes: Iterable[int], strides: Iterable[int], offset: int, item: int) -> Spans:
    """The bytes of a strided view; sizes, strides and offset in elements of `item` bytes."""
    spans: list[int] = [offset * item]
    length = item
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size == 0:
            return ()
        if stride == 0 or size == 1:
            continue
        if stride * item <= length:
            # dense, or overlapping as in an unfolded view
            length += (size - 1) * stride * item
        else:
            spans = [start + step * stride * item for start in spans for step in range(size)]
    return merged((start, start + length) for start in spans)
