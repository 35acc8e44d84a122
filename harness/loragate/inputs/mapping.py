"""Which row of a batch uses which slot, and which ranks of a slot are live."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from loragate.inputs.draw import number
from loragate.matrix.case import Case, Layout, Mix, Ranks

BASE_ROW = -1


def make_token_slots(case: Case, seed: int, step: int) -> Tensor:
    """int32 [tokens] on the CPU.

    With PADDED_ROWS the last quarter is padding: base rows after the live ones. A batch that is
    too small for all populations has the last slot first, then a base row, then others.
    """
    rng = random.Random(number(seed, "mapping", step))
    live = case.tokens - num_padded(case)
    rows = _live_rows(case, rng, live)
    rows += [BASE_ROW] * (case.tokens - live)
    return torch.tensor(rows, dtype=torch.int32)


def num_padded(case: Case) -> int:
    """Rows of padding at the end of each batch of a case."""
    return (case.tokens + 2) // 4 if case.layout is Layout.PADDED_ROWS else 0


def _live_rows(case: Case, rng: random.Random, live: int) -> list[int]:
    last = case.slots - 1
    if case.mix is Mix.ALL_BASE:
        return [BASE_ROW] * live
    if case.mix is Mix.SINGLE:
        return [rng.randrange(case.slots)] * live
    users = [last, BASE_ROW]
    if case.mix is not Mix.LAST_SLOT:
        # one slot stays enabled without tokens; never the last one, which always must have some
        idle = rng.randrange(last) if last else None
        others = [slot for slot in range(last) if slot != idle]
        rng.shuffle(others)
        users += others
    users = users[:live]
    counts = _ragged(len(users), live, rng)
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


def live_ranks(case: Case, seed: int, *, per_slice: bool) -> tuple[tuple[int, ...], ...]:
    """[slots][slices]. The first slice of the last slot always has the rank of the buffers.

    MIXED with `per_slice` also leaves one slice of the last slot without adapter (rank 0),
    where there is more than one.
    """
    slices = len(case.slices)
    if case.ranks is Ranks.FULL:
        return ((case.rank,) * slices,) * case.slots
    choices = _rank_choices(case.rank)
    rng = random.Random(number(seed, "ranks"))
    start, last = rng.randrange(len(choices)), case.slots - 1
    table = [
        [choices[(start + slot + part * per_slice) % len(choices)] for part in range(slices)]
        for slot in range(case.slots)
    ]
    table[last][0] = case.rank
    if not per_slice:
        table[last] = [case.rank] * slices
    elif slices > 1:
        table[last][rng.randrange(1, slices)] = 0
    return tuple(tuple(row) for row in table)


def _rank_choices(rank: int) -> Sequence[int]:
    """Powers of two and their neighbours up to `rank`, each once."""
    wanted = (rank, 1, rank - 1, rank // 2, 3 * rank // 4, rank // 2 + 1)
    return list(dict.fromkeys(r for r in wanted if 1 <= r <= rank))
