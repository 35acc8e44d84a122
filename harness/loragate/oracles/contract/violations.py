"""The bad calls of the guard oracle: rows, outputs, routes, mappings and adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from loragate.inputs import DataKind, copy_batch, make_pool
from loragate.inputs.mapping import BASE_ROW
from loragate.inputs.placement import guarded
from loragate.matrix.case import (
    IN_PLACE_SITES,
    MOE_SITES,
    Buffers,
    Case,
    Loading,
    Placement,
    Ranks,
    Site,
)
from loragate.protocol import AnyInstance, Batch, Guard, Pool, Routes, Trial, apply_step


@dataclass(frozen=True, slots=True)
class Violation:
    """One bad call. The error must name `given`; `watched` must keep their bits."""

    guard: Guard
    what: str
    given: str
    call: Callable[[], object]
    watched: tuple[Tensor, ...] = ()


def violations(
    trial: Trial, case: Case, instance: AnyInstance, batch: Batch
) -> Iterator[Violation]:
    """Every bad call that concerns the site, whether or not the subject promises to refuse it."""
    yield from _bad_rows(case, instance, copy_batch(batch))
    if case.site in IN_PLACE_SITES:
        yield from _bad_outputs(case, instance, copy_batch(batch))
    if case.site in MOE_SITES:
        yield from _bad_routes(case, instance, copy_batch(batch))
    yield from _bad_mappings(case, instance, batch.token_slots)
    # into stacks a server writes for itself
    if case.buffers is not Buffers.STACKS:
        yield from _bad_adapters(trial, case, instance)


def _bad_rows(case: Case, instance: AnyInstance, batch: Batch) -> Iterator[Violation]:
    x, out = batch.x, batch.out
    other = torch.float32 if x.dtype != torch.float32 else torch.float16

    def violation(guard: Guard, what: str, given: object, x: Tensor, out: Tensor) -> Violation:
        return Violation(
            guard,
            what,
            str(given),
            partial(apply_step, instance, replace(batch, x=x, out=out)),
            (x, out),
        )

    yield violation(Guard.X_DTYPE, f"x of {other}", other, x.to(other), out)
    if case.site is not Site.EMBEDDING:
        narrow = case.in_features - 1
        yield violation(Guard.X_WIDTH, f"x with {narrow} columns", narrow, x[:, :narrow], out)
    more = len(x) + 1
    taller = (torch.cat([x, x[:1]]), torch.cat([out, out[:1]]))
    yield violation(Guard.ROWS, f"{more} rows, {len(x)} prepared", more, *taller)
    if len(x) > 1:
        fewer = len(x) - 1
        yield violation(Guard.ROWS, f"{fewer} rows, {len(x)} prepared", fewer, x[:-1], out[:-1])


def _bad_outputs(case: Case, instance: AnyInstance, batch: Batch) -> Iterator[Violation]:
    x, out = batch.x, batch.out
    other = torch.float32 if out.dtype != torch.float32 else torch.float16
    columns = case.out_features - 1
    narrow, cast = out[:, :columns], out.to(other)
    call = partial(apply_step, instance, replace(batch, out=narrow))
    yield Violation(Guard.OUT_WIDTH, f"out with {columns} columns", str(columns), call, (x, out))
    call = partial(apply_step, instance, replace(batch, out=cast))
    yield Violation(Guard.OUT_DTYPE, f"out of {other}", str(other), call, (x, cast))
    for guard, offset in ((Guard.ALIASED_OUT, 0), (Guard.OVERLAPPING_OUT, case.in_features // 2)):
        size = max(x.numel(), out.numel()) + offset
        storage = guarded(size, x.dtype, x.device)
        inside = storage.as_strided(x.shape, (case.in_features, 1))
        inside.copy_(x)
        above = storage.as_strided(out.shape, (case.out_features, 1), offset)
        call = partial(apply_step, instance, replace(batch, x=inside, out=above))
        what = f"out that starts {offset} elements after x"
        yield Violation(guard, what, "out", call, (storage,))


def _bad_routes(case: Case, instance: AnyInstance, batch: Batch) -> Iterator[Violation]:
    routes = batch.routes
    assert routes is not None

    def violation(guard: Guard, what: str, given: object, bad: Routes) -> Violation:
        call = partial(apply_step, instance, replace(batch, routes=bad))
        return Violation(guard, what, str(given), call, (batch.x, batch.out))

    ids = routes.topk_ids
    wide = replace(routes, topk_ids=ids.long())
    yield violation(Guard.TOPK_DTYPE, "topk_ids of int64", "int64", wide)
    more = case.top_k + 1
    taller = replace(routes, topk_ids=torch.cat([ids, ids[:, :1]], 1))
    yield violation(Guard.TOPK_SHAPE, f"topk_ids with {more} columns", more, taller)
    rows = case.tokens + 1
    weights = torch.ones(rows, case.top_k, device=ids.device)
    longer = replace(routes, weights=weights)
    yield violation(Guard.ROUTER_SHAPE, f"{rows} rows of router weights", rows, longer)
    weights = torch.ones(case.tokens, case.top_k, device=ids.device)
    half = replace(routes, weights=weights.half())
    yield violation(Guard.ROUTER_DTYPE, "router weights of float16", torch.float16, half)
    if routes.expert_map is not None:
        mapped = replace(routes, expert_map=routes.expert_map.long())
        yield violation(Guard.MAP_DTYPE, "an expert map of int64", "int64", mapped)
    # a tensor of one element, or with one column, is contiguous whatever its strides
    if ids.numel() > 1:
        # a layer whose experts do not lie in runs looks up all ids first
        if case.placement is Placement.RUNS:
            what = "topk_ids that are not contiguous"
            spread = replace(routes, topk_ids=_spread(ids))
            yield violation(Guard.TOPK_STRIDES, what, "topk_ids", spread)
        spread = replace(routes, weights=_spread(weights))
        what = "router weights that are not contiguous"
        yield violation(Guard.ROUTER_STRIDES, what, "contiguous", spread)


def _spread(values: Tensor) -> Tensor:
    """The same values in every other element of a tensor."""
    return torch.stack([values, values], -1)[..., 0]


def _bad_mappings(case: Case, instance: AnyInstance, good: Tensor) -> Iterator[Violation]:
    def violation(guard: Guard, what: str, given: str, mapping: Tensor) -> Violation:
        return Violation(guard, what, given, partial(instance.prepare, mapping), (mapping,))

    # base rows alone: where they are kept although they are refused, no row has its adapter
    base = torch.full_like(good, BASE_ROW)
    yield violation(Guard.MAPPING_DTYPE, "token_slots of int64", "int64", base.long())
    given = str(case.max_tokens + 1)
    longer = good.new_zeros(case.max_tokens + 1)
    yield violation(Guard.MAPPING_LENGTH, f"{given} token_slots", given, longer)
    if len(good) > 1:
        what = "token_slots that are not contiguous"
        # no row is padding, which a subject may cut off
        rows = torch.full_like(good, case.slots - 1)
        yield violation(Guard.MAPPING_STRIDES, what, "token_slots", _spread(rows))
    for slot in (case.slots, -2):
        foreign = base.clone()
        foreign[0] = slot
        yield violation(Guard.SLOT_RANGE, f"a row of slot {slot}", str(slot), foreign)


def _bad_adapters(trial: Trial, case: Case, instance: AnyInstance) -> Iterator[Violation]:
    last, width = case.slots - 1, case.slices[-1] + 1

    def pool(bad: Case) -> Pool:
        # other values than those that are loaded
        seed = trial.seed + 1
        return make_pool(bad, seed, DataKind.SIGNED, trial.machine, trial.capabilities)

    def load(guard: Guard, what: str, given: int, bad: Case, slot: int = last) -> Violation:
        return Violation(guard, what, str(given), partial(instance.load, slot, pool(bad)))

    rank = case.rank + 1
    higher = replace(case, rank=rank, ranks=Ranks.FULL)
    yield load(Guard.ADAPTER_RANK, f"an adapter of rank {rank}", rank, higher)
    full = replace(case, ranks=Ranks.FULL)
    # all slices but the last one fit
    wider = replace(full, slices=(*case.slices[:-1], width))
    # on a device B of all slices is one tensor
    named = case.out_features + 1 if case.loading is Loading.DEVICE else width
    yield load(Guard.ADAPTER_SHAPE, f"a last slice of width {width}", named, wider)
    features = case.in_features + 1
    deeper = replace(full, in_features=features)
    yield load(Guard.ADAPTER_SHAPE, f"an adapter of {features} features", features, deeper)
    if case.site in MOE_SITES:
        count = case.experts + 1
        others = replace(full, experts=count)
        yield load(Guard.ADAPTER_EXPERTS, f"an adapter of {count} experts", count, others)
    more = replace(full, slots=case.slots + 1)
    # in Python -1 is an index of the last one
    for slot in (case.slots, -1):
        yield load(Guard.SLOT, f"an adapter for slot {slot}", slot, more, slot)
        unload = partial(instance.unload, slot)
        yield Violation(Guard.SLOT, f"emptying slot {slot}", str(slot), unload)
