"""The mathematics of every site, in one place: the right result, and that of a plain
low-precision computation.

golden: fp64, from the same low-precision numbers that the subject gets.
eager: the same operations in the case's dtype with the roundings that are documented for every
subject: products accumulate in fp32, the shrink output stays fp32, the delta is rounded to the
dtype and then added to the base in the dtype.

At an MoE site only the factors of a row are different ones: see inputs/pairs.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from loragate.inputs.pairs import OutRows, out_rows, out_rows_of, part_of
from loragate.matrix.case import Case, Parallel, Site, Write
from loragate.oracles.numeric.deltas import deltas, widths_of
from loragate.protocol import BaseLayer, Batch, Pool

# elements of a chunk: bounds the fp64 temporaries of a large case to a few hundred MiB
_CHUNK = 1 << 24
# so many rows show how much the terms of a population cancel
_CONDITION_ROWS = 64


@dataclass(frozen=True, slots=True)
class Golden:
    """fp64 [rows, out_features]: the base layer's output, and what the adapters add; where they
    store, the base is zero. `terms_sq` is the sum over the ranks of the squares of the terms that
    make up the delta. `jump_sq` is the square of the error of a value that is quantised to the
    other of its two neighbours: rare, and far above the mean of `terms_sq`. `addends_sq` is the sum
    of the squares of all that the products add up, the base included where the site computes it:
    what they round is as large as these, also where they cancel. None in 16 bits, where the output
    is rounded by far more, and of a MoE layer, where `terms_sq` has a part of it."""

    base: Tensor
    delta: Tensor
    terms_sq: Tensor
    jump_sq: Tensor | None = None
    addends_sq: Tensor | None = None

    @property
    def out(self) -> Tensor:
        return self.base + self.delta


def golden(
    pool: Pool, batch: Batch, base: BaseLayer | None = None, write: Write = Write.ADD
) -> Golden:
    """The right result of a batch; `base` for lora_linear and
    gdn_in_proj, else the base is in `batch.out`."""
    rows = out_rows(batch)
    if base is None:
        start = batch.out.double()
        if write is Write.STORE:
            start = torch.where(touched(pool, rows), 0.0, start)
    else:
        start = batch.x.double() @ base.weight.double().T
        if base.bias is not None:
            start += base.bias.double()
    delta = deltas(pool, batch.x, rows, torch.float64)
    terms = deltas(pool, batch.x, rows, torch.float64, squares=True)
    addends = None
    if batch.x.dtype is torch.float32:
        addends = terms + _first_addends(pool, batch, rows, base)
    return Golden(start, delta, terms, addends_sq=addends)


def _first_addends(pool: Pool, batch: Batch, rows: OutRows, base: BaseLayer | None) -> Tensor:
    """The squares of what the products over in_features add up, as they reach the output."""
    x = batch.x.double().square()
    weights = None if rows.weights is None else rows.weights.square()
    total = deltas(squared(pool), x, replace(rows, weights=weights), torch.float64)
    if base is not None:
        # a copy of its own, which may be changed in place
        total += x @ base.weight.to(torch.float64, copy=True).square_().T
        if base.bias is not None:
            total += base.bias.double().square()
    return total


def eager(case: Case, pool: Pool, batch: Batch, base: BaseLayer | None = None) -> Tensor:
    """[rows, out_features] in the case's dtype, in new memory."""
    rows = out_rows(batch)
    if base is None:
        delta = deltas(pool, batch.x, rows, torch.float32).to(batch.out.dtype)
        if case.write is Write.STORE:
            return torch.where(touched(pool, rows), delta, batch.out)
        return batch.out + delta
    # a row-parallel layer adds up partial outputs that have been rounded
    shards = case.tp if case.parallel is Parallel.ROW else 1
    width = -(-case.in_features // shards)
    total: Tensor | None = None
    for shard in range(shards):
        columns = slice(shard * width, (shard + 1) * width)
        x, part = batch.x[:, columns], Pool(pool.a[..., columns], pool.b, pool.ranks, pool.scales)
        bias = base.bias if shard == 0 else None
        out = functional.linear(x, base.weight[:, columns], bias)
        out += deltas(part, x, rows, torch.float32).to(out.dtype)
        total = out if total is None else total + out
    assert total is not None
    return total


def plain_bases(case: Case, batch: Batch, base: BaseLayer | None) -> tuple[Tensor, ...]:
    """The output of the base layer alone in the case's dtype, in each of the ways that a subject
    may compute it; none without one, and for a layer that is cut by rows, of which there is only
    the sum of rounded parts."""
    if base is None or (case.parallel is Parallel.ROW and case.tp > 1):
        return ()
    whole = functional.linear(batch.x, base.weight, base.bias)
    if case.site is not Site.GDN_IN_PROJ:
        return (whole,)
    assert base.bias is None, "projections of a delta net have no bias"
    # qkvz and ba, each of one or of two slices
    first = sum(case.slices[: len(case.slices) // 2])
    halves = slice(first), slice(first, None)
    apart = [functional.linear(batch.x, base.weight[own]) for own in halves]
    # cuBLAS takes another algorithm for an output whose rows are further apart
    within = torch.empty_like(whole)
    for own in halves:
        torch.mm(batch.x, base.weight[own].T, out=within[:, own])
    return whole, torch.cat(apart, 1), within


def touched(pool: Pool, rows: OutRows) -> Tensor:
    """bool [rows, out_features]: where a row has a delta."""
    live = torch.tensor([[rank > 0 for rank in row] for row in pool.ranks])
    # -1 is the row after the last slot
    live = torch.cat([live, torch.zeros(1, live.shape[1], dtype=torch.bool)])
    mask = live[rows.slots.long()].to(rows.x_rows.device)
    return mask.repeat_interleave(torch.tensor(widths_of(pool), device=mask.device), 1)


def folded(pool: Pool) -> Pool:
    """The same adapters with scale * B, rounded once, in the place of B."""
    b = []
    for part, values in enumerate(pool.b):
        scales = torch.tensor([row[part] for row in pool.scales], device=values.device)
        scales = scales.view(-1, *[1] * (values.dim() - 1))
        b.append((values.float() * scales).to(values.dtype))
    ones = tuple((1.0,) * len(row) for row in pool.scales)
    down = None if pool.down is None else folded(pool.down)
    return Pool(pool.a, tuple(b), pool.ranks, ones, down)


def chunks(batch: Batch, width: int = 1) -> Iterator[tuple[slice, Batch]]:
    """Consecutive tokens, few enough for fp64: the slice of their rows in the output, and a batch
    of them alone. `width` is that of the intermediate values. An empty batch is one empty chunk."""
    tokens, width = len(batch.token_slots), max(width, batch.x.shape[1], batch.out.shape[1])
    per_token = 1 if batch.routes is None else batch.routes.topk_ids.shape[1]
    step = max(1, _CHUNK // max(1, width * per_token))
    for start in range(0, max(tokens, 1), step):
        part = slice(start, min(start + step, tokens))
        yield out_rows_of(batch, part), part_of(batch, part)


def condition_number(pool: Pool, batch: Batch, rows: Tensor, part: int) -> float:
    """rms of the sum of all terms' magnitudes, divided by the rms of the delta, for rows of one
    slot and one slice: how much a sum loses to cancellation. inf without a delta."""
    some = out_rows(batch)[rows[:_CONDITION_ROWS]]
    slice_of = Pool(pool.a[..., part : part + 1, :, :], (pool.b[part],), *_column(pool, part))
    delta = deltas(slice_of, batch.x, some, torch.float64)
    terms = deltas(magnitudes(slice_of), batch.x.abs(), some, torch.float64)
    total = delta.square().mean().sqrt().item()
    return terms.square().mean().sqrt().item() / total if total else float("inf")


def magnitudes(pool: Pool) -> Pool:
    scales = tuple(tuple(map(abs, row)) for row in pool.scales)
    return replace(pool, a=pool.a.abs(), b=tuple(b.abs() for b in pool.b), scales=scales)


def squared(pool: Pool) -> Pool:
    """The pool that maps variances of inputs to variances of outputs."""
    scales = tuple(tuple(scale**2 for scale in row) for row in pool.scales)
    b = tuple(b.float().square() for b in pool.b)
    return replace(pool, a=pool.a.float().square(), b=b, scales=scales)


def _column(
    pool: Pool, part: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[float, ...], ...]]:
    ranks = tuple((row[part],) for row in pool.ranks)
    return ranks, tuple((row[part],) for row in pool.scales)
