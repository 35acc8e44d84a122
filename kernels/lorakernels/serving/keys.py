"""Which captured graph a batch is replayed with. Pure; imports no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class GraphKey:
    """A graph for batches of up to `num_tokens` rows. Without `has_adapters` it holds no kernel of
    the adapters, and is for batches of base rows alone."""

    num_tokens: int
    has_adapters: bool


def plan_keys(sizes: Iterable[int], *, max_tokens: int) -> tuple[GraphKey, ...]:
    """All graphs in the order of their capture: the largest first, whose memory the others use
    again. `sizes` are numbers of rows up to `max_tokens`. ValueError."""
    found = sorted(sizes, reverse=True)
    for size in found:
        if not 1 <= size <= max_tokens:
            raise ValueError(f"sizes must be 1 to {max_tokens}, which is max_tokens (got {size})")
    if len(set(found)) < len(found):
        raise ValueError(f"sizes must differ (got {found})")
    return tuple(GraphKey(size, adapters) for size in found for adapters in (True, False))


def choose_key(sizes: Sequence[int], *, num_rows: int, has_adapters: bool) -> GraphKey | None:
    """The smallest graph that holds a batch; None where all are too small. A batch with adapters
    never gets a graph without them. `sizes` are those captured, ascending."""
    found = bisect_left(sizes, num_rows)
    return GraphKey(sizes[found], has_adapters) if found < len(sizes) else None


def dummy_slots(num_rows: int, num_slots: int) -> list[int]:
    """The slot of each row of a dummy run: every slot in turn, as far as the rows go, and -1, a
    base row, behind all of them and last. A single row has a slot."""
    slots = [
        -1 if row % (num_slots + 1) == num_slots else row % (num_slots + 1)
        for row in range(num_rows)
    ]
    return slots if num_rows < 2 else [*slots[:-1], -1]
