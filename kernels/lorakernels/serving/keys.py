"""Which captured graph a batch is replayed with. Pure; imports no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class GraphKey(NamedTuple):
    """A graph for batches of up to `num_tokens` rows. Without `has_adapters` it holds no kernel of
    the adapters, and is for batches of base rows alone. A request has `width` rows, one behind the
    other."""

    num_tokens: int
    has_adapters: bool
    width: int = 1


def plan_keys(
    sizes: Iterable[int], *, max_tokens: int, widths: Iterable[int] = (1,)
) -> tuple[GraphKey, ...]:
    """All graphs in the order of their capture: the largest first, whose memory the others use
    again. `sizes` are numbers of requests, `widths` the rows that each of them has; `max_tokens`
    rows hold the most requests of the largest width. ValueError."""
    found, rows_of_one = sorted(sizes, reverse=True), tuple(widths)
    widest = max(rows_of_one)
    most, why = max_tokens // widest, f"max_tokens / {widest}" if widest > 1 else "max_tokens"
    for size in found:
        if type(size) is not int or not 1 <= size <= most:
            raise ValueError(f"sizes must be 1 to {most}, which is {why} (got {size})")
    if len(set(found)) < len(found):
        raise ValueError(f"sizes must differ (got {found})")
    shapes = [(size * width, width) for size in found for width in rows_of_one]
    shapes.sort(reverse=True)
    return tuple(GraphKey(rows, has, width) for rows, width in shapes for has in (True, False))


def choose_key(
    sizes: Sequence[int], *, num_rows: int, has_adapters: bool, width: int = 1
) -> GraphKey | None:
    """The smallest graph that holds a batch; None where all are too small. A batch with adapters
    never gets a graph without them. `sizes` are the numbers of rows captured for `width`,
    ascending."""
    found = bisect_left(sizes, num_rows)
    return GraphKey(sizes[found], has_adapters, width) if found < len(sizes) else None


def dummy_slots(num_rows: int, num_slots: int) -> list[int]:
    """The slot of each row of a dummy run: every slot in turn, as far as the rows go, and -1, a
    base row, behind all of them and last. A single row has a slot."""
    slots = [
        -1 if row % (num_slots + 1) == num_slots else row % (num_slots + 1)
        for row in range(num_rows)
    ]
    return slots if num_rows < 2 else [*slots[:-1], -1]
