"""The mathematics of every site, in one place: what is right, and how far off a plain
low-precision computation may be.

golden: fp64, from the same low-precision numbers that the subject gets.
eager: the same operations in the case's dtype with the roundings that are documented for every
subject: products accumulate in fp32, the bridge between shrink and expand stays fp32, the delta
is rounded to the dtype and then added to the base in the dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from loragate.matrix.case import Case, Parallel
from loragate.subjects.protocol import BaseLayer, Batch, Pool

# elements of a chunk: bounds the fp64 temporaries of a large case to a few hundred MiB
_CHUNK = 1 << 24
# rows that are enough to tell how much the terms of a population cancel
_CONDITION_ROWS = 64


@dataclass(frozen=True, slots=True)
class Golden:
    """fp64 [rows, out_features]: the base layer's output, and what the adapters add. `terms_sq`
    is the sum over the ranks of the squares of the terms that make up the delta."""

    base: Tensor
    delta: Tensor
    terms_sq: Tensor

    @property
    def out(self) -> Tensor:
        return self.base + self.delta


def golden(pool: Pool, batch: Batch, base: BaseLayer | None = None) -> Golden:
    """What is right for a batch; `base` for lora_linear, else the base is in `batch.out`."""
    if base is None:
        start = batch.out.double()
    else:
        start = batch.x.double() @ base.weight.double().T
        if base.bias is not None:
            start += base.bias.double()
    delta = deltas(pool, batch.x, batch.token_slots, torch.float64)
    terms = deltas(pool, batch.x, batch.token_slots, torch.float64, squares=True)
    return Golden(start, delta, terms)


def eager(case: Case, pool: Pool, batch: Batch, base: BaseLayer | None = None) -> Tensor:
    """[rows, out_features] in the case's dtype, in new memory."""
    if base is None:
        out = batch.out.contiguous().clone()
        return out.add_(deltas(pool, batch.x, batch.token_slots, torch.float32).to(out.dtype))
    # a row-parallel layer adds up partial outputs that are rounded already
    shards = case.tp if case.parallel is Parallel.ROW else 1
    width = case.in_features // shards
    total: Tensor | None = None
    for shard in range(shards):
        columns = slice(shard * width, (shard + 1) * width)
        x, part = batch.x[:, columns], Pool(pool.a[..., columns], pool.b, pool.ranks, pool.scales)
        bias = base.bias if shard == 0 else None
        out = functional.linear(x, base.weight[:, columns], bias)
        out += deltas(part, x, batch.token_slots, torch.float32).to(out.dtype)
        total = out if total is None else total + out
    assert total is not None
    return total


def deltas(
    pool: Pool, x: Tensor, token_slots: Tensor, dtype: torch.dtype, *, squares: bool = False
) -> Tensor:
    """[rows, out_features] in `dtype`: scale * (x @ A.T) @ B.T, zero for base rows.
    `squares`: each term of the last product squared before it is added up."""
    widths = [b.shape[1] for b in pool.b]
    delta = torch.zeros(x.shape[0], sum(widths), dtype=dtype, device=x.device)
    for slot in range(pool.num_slots):
        rows = (token_slots == slot).nonzero().flatten().to(x.device)
        if not rows.numel():
            continue
        mine, column = x[rows].to(dtype), 0
        for part, width in enumerate(widths):
            rank, scale = pool.ranks[slot][part], pool.scales[slot][part]
            bridge = mine @ pool.a[slot, part, :rank].to(dtype).T
            b = pool.b[part][slot, :, :rank].to(dtype)
            if squares:
                bridge, b, scale = bridge.square(), b.square(), scale**2
            delta[rows, column : column + width] = scale * (bridge @ b.T)
            column += width
    return delta


def folded(pool: Pool) -> Pool:
    """The same adapters with scale * B, rounded once, in the place of B."""
    b = []
    for part, values in enumerate(pool.b):
        scales = torch.tensor([row[part] for row in pool.scales], device=values.device)
        b.append((values.float() * scales[:, None, None]).to(values.dtype))
    ones = tuple((1.0,) * len(row) for row in pool.scales)
    return Pool(pool.a, tuple(b), pool.ranks, ones)


def chunks(batch: Batch) -> Iterator[tuple[slice, Batch]]:
    """Consecutive rows, few enough for fp64; each is a batch of its own. An empty batch is one
    chunk of nothing."""
    rows, width = batch.x.shape[0], max(batch.x.shape[1], batch.out.shape[1])
    step = max(1, _CHUNK // max(1, width))
    for start in range(0, max(rows, 1), step):
        part = slice(start, min(start + step, rows))
        yield part, Batch(batch.x[part], batch.token_slots[part], batch.out[part])


def condition_number(pool: Pool, batch: Batch, rows: Tensor, part: int) -> float:
    """rms of the sum of all terms' magnitudes over the rms of the delta itself, for rows of
    one slot and one slice; how many digits a sum loses to cancellation. inf without a delta."""
    rows = rows[:_CONDITION_ROWS]
    slots = batch.token_slots[rows.cpu()]
    slice_of = Pool(pool.a[:, part : part + 1], (pool.b[part],), *_column(pool, part))
    sizes = Pool(slice_of.a.abs(), (pool.b[part].abs(),), slice_of.ranks, slice_of.scales)
    delta = deltas(slice_of, batch.x[rows], slots, torch.float64)
    terms = deltas(sizes, batch.x[rows].abs(), slots, torch.float64)
    total = delta.square().mean().sqrt().item()
    return terms.square().mean().sqrt().item() / total if total else float("inf")


def _column(
    pool: Pool, part: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[float, ...], ...]]:
    ranks = tuple((row[part],) for row in pool.ranks)
    return ranks, tuple((row[part],) for row in pool.scales)
