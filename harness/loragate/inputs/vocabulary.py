"""The ids of an embedding's tokens, and its step as that of a linear layer.

Ids are drawn from the whole vocabulary. The first and the last one of each rank are among them
where the batch has room, in rows that differ from step to step, and ids that do not exist if the
case asks for them.
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor

from loragate.inputs.draw import Draw, number
from loragate.matrix.case import Case, Ids, Site
from loragate.protocol import BaseLayer, Batch, Pool

# fits into int32, and no vocabulary is as large
_FAR = 1 << 30
# what int32 cuts off
_WRAP = 1 << 32


def make_ids(case: Case, seed: int, step: int, draw: Draw) -> Tensor:
    """[tokens, 1]; int32 or int64, which depends on the seed."""
    ids = draw.integers(0, case.in_features, case.tokens)
    rng = random.Random(number(seed, "ids", step))
    narrow = number(seed, "width of ids") & 1 == 1
    edges = _edges(case, narrow=narrow)
    rng.shuffle(edges)
    # half of the rows stay as they were drawn
    chosen = edges[: (case.tokens + 1) // 2]
    rows = rng.sample(range(case.tokens), len(chosen))
    places, values = torch.tensor([rows, chosen], dtype=torch.int64, device=ids.device)
    ids[places] = values
    return ids[:, None].to(torch.int32 if narrow else torch.int64)


def _edges(case: Case, *, narrow: bool) -> list[int]:
    last, size = case.in_features - 1, -(-case.in_features // case.tp)
    first_ids = range(0, case.in_features, size)
    edges = {last, *first_ids, *(first - 1 for first in first_ids if first)}
    if case.ids is Ids.UNKNOWN:
        edges |= {-1, -size, last + 1, last + size, _FAR, -_FAR}
        # some that would exist if they were cut to 32 bits
        edges |= set() if narrow else {_WRAP, _WRAP + last, last - _WRAP}
    return sorted(edges)


def padding_id(case: Case) -> int:
    """What may be in a row of padding: any id that the case has."""
    return _FAR if case.ids is Ids.UNKNOWN else case.in_features - 1


def as_linear(
    case: Case, pool: Pool, batch: Batch, base: BaseLayer | None
) -> tuple[Pool, Batch, BaseLayer | None]:
    """A step of an embedding as that of a linear layer whose inputs are the ids of the batch, and
    whose rows are one at their id and zero elsewhere, or zero for an id that does not exist. Steps
    of other sites are what they are."""
    if case.site is not Site.EMBEDDING:
        return pool, batch, base
    assert base is not None
    ids = batch.x[:, 0].long()
    is_known = (ids >= 0) & (ids < case.in_features)
    used: Tensor = torch.unique(ids[is_known])
    x = ids[:, None] == used
    return (
        replace(pool, a=pool.a[..., used]),
        replace(batch, x=x.to(batch.out.dtype)),
        BaseLayer(base.weight[used].T, None),
    )
