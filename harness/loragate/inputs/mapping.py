"""Which row of a batch uses which slot, and which ranks of a slot are live."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from loragate.inputs.draw import number
from loragate.matrix.case import Case, Layout, Mix, Ranks

BASE_ROW = -1
# rows of the last slot, at least, where a batch is large enough
_LAST_SLOT_ROWS = 3


def make_token_slots(case: Case, seed: int, step: int) -> Tensor:
    """int32 [tokens] on the CPU.

    With PADDED_ROWS the last quarter is padding: base rows after the live ones. A batch that is
    too small for all populations has the last slot first, then a base row, then others.
    """
    rng = random.Random(number(seed, "mapping", step))
    live = case.tokens - num_padded(case)
    # of two slots one is idle in every other step only: the first batch mixes adapters
    has_idle = case.slots > 2 or (case.slots == 2 and step % 2 == 1)
    rows = _live_rows(case, rng, live, has_idle=has_idle)
    rows += [BASE_ROW] * (case.tokens - live)
    return torch.tensor(rows, dtype=torch.int32)


def num_padded(case: Case) -> int:
    """Rows of padding at the end of each batch of a case."""
    return (case.tokens + 2) // 4 if case.layout is Layout.PADDED_ROWS else 0


def _live_rows(case: Case, rng: random.Random, live: int, *, has_idle: bool) -> list[int]:
    last = case.slots - 1
    if case.mix is Mix.ALL_BASE:
        return [BASE_ROW] * live
    if case.mix is Mix.SINGLE:
        return [rng.randrange(case.slots)] * live
    users = [last, BASE_ROW]
    if case.mix is not Mix.LAST_SLOT:
        # one slot stays enabled without tokens; never the last one, which always must have some
        idle = rng.randrange(last) if has_idle else None
        others = [slot for slot in range(last) if slot != idle]
        rng.shuffle(others)
        users += others
    users = users[:live]
    counts = _ragged(len(users), live, rng)
    _give_first(counts, min(_LAST_SLOT_ROWS, live // max(1, len(users))))
    order = list(zip(users, counts, strict=True))
    rng.shuffle(order)
    rows = [user for user, count in order for _ in range(count)]
    if case.mix is Mix.SHUFFLED:
        rng.shuffle(rows)
    return rows


def _ragged(parts: int, total: int, rng: random.Random) -> list[int]:
    """`parts` positive lengths of very different sizes that add up to `total`."""
    if not parts:
        return []
    weights = [rng.random() ** 2 for _ in range(parts)]
    spare, scale = total - parts, sum(weights)
    counts = [1 + int(spare * weight / scale) for weight in weights]
    counts[rng.randrange(parts)] += total - sum(counts)
    return counts


def _give_first(counts: list[int], least: int) -> None:
    """Move rows from the longest run to the first one, which is that of the last slot: on exact
    data the terms of a single row may cancel."""
    if counts and counts[0] < least:
        counts[counts.index(max(counts))] -= least - counts[0]
        counts[0] = least


def live_ranks(case: Case, seed: int, *, per_slice: bool) -> tuple[tuple[int, ...], ...]:
    """[slots][slices]. One slice of the last slot always has the rank of the buffers; without
    `per_slice` all of them have it.

    MIXED with `per_slice` also leaves slices without adapter (rank 0), where there is more than
    one slice: one of one slot, the last slot in half of all draws, and from three slots on another
    one of another slot. Of two slots or more, each slice thus has a live adapter.
    """
    slices = len(case.slices)
    if case.ranks is Ranks.FULL:
        return ((case.rank,) * slices,) * case.slots
    rng = random.Random(number(seed, "ranks"))
    lower = _lower_ranks(case.rank)
    rng.shuffle(lower)
    choices = [case.rank, *lower]
    last = case.slots - 1
    absent = _absent(rng, case.slots, slices) if per_slice and slices > 1 else {}
    full = rng.choice([part for part in range(slices) if part != absent.get(last)])
    # neighbours differ, both slots and slices
    return tuple(
        tuple(
            0
            if absent.get(slot) == part
            else choices[(slot - last + (part - full) * per_slice) % len(choices)]
            for part in range(slices)
        )
        for slot in range(case.slots)
    )


def _absent(rng: random.Random, slots: int, slices: int) -> dict[int, int]:
    """Slot -> the slice that its adapter lacks; different slices of different slots."""
    last = slots - 1
    first = last if rng.random() < 0.5 else rng.randrange(slots)
    users = [first, *rng.sample([slot for slot in range(slots) if slot != first], int(slots > 2))]
    return dict(zip(users, rng.sample(range(slices), len(users)), strict=True))


def _lower_ranks(rank: int) -> list[int]:
    """Powers of two and their neighbours below `rank`, each once."""
    wanted = (1, rank - 1, rank // 2, 3 * rank // 4, rank // 2 + 1)
    return list(dict.fromkeys(r for r in wanted if 1 <= r < rank))
