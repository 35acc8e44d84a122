"""The drawn routes and MoE adapters have the properties that verdicts rely on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loragate.core.machine import Machine
from loragate.inputs import DataKind, copy_batch, make_batch, make_pool, reordered_rows
from loragate.inputs.expert_places import rank_of_pairs
from loragate.inputs.pairs import local_experts, out_rows, part_of
from loragate.inputs.placement import bits_of, owned, whole
from loragate.inputs.pool_changes import reordered_experts, with_huge_unused
from loragate.matrix.case import (
    Case,
    Dtype,
    ExpertMap,
    Placement,
    RouterWeights,
    Routing,
    Sharing,
    Site,
    Source,
)
from loragate.oracles.numeric.exact import assert_exact
from loragate.protocol import Batch, Capabilities, Pool, Routes
from loragate.subjects.torch.subject import TorchSubject

CPU = Machine("cpu", "test", None, 1, 0)
SEEDS = range(20)
CASE = Case(
    site=Site.MOE_DELTA,
    tokens=30,
    in_features=40,
    slices=(24, 9),
    rank=8,
    slots=3,
    dtype=Dtype.BF16,
    experts=8,
    top_k=3,
    router=RouterWeights.OUTPUT,
)
PARALLEL = replace(CASE, expert_map=ExpertMap.PARALLEL)


def capabilities() -> Capabilities:
    have = TorchSubject().capabilities(CPU)
    assert not isinstance(have, str)
    return have


def batch_of(case: Case, seed: int, kind: DataKind = DataKind.SIGNED, step: int = 0) -> Batch:
    return make_batch(case, seed, step, kind, CPU)


def routes_of(case: Case, seed: int) -> Routes:
    routes = batch_of(case, seed).routes
    assert routes is not None
    return routes


def pool_of(case: Case, seed: int, kind: DataKind = DataKind.SIGNED) -> Pool:
    return make_pool(case, seed, kind, CPU, capabilities())


@pytest.mark.parametrize("case", [CASE, PARALLEL, replace(CASE, routing=Routing.SKEWED)])
def test_the_experts_of_a_token_are_distinct_and_known(case: Case) -> None:
    for seed in SEEDS:
        ids = routes_of(case, seed).topk_ids
        assert (ids.dtype, tuple(ids.shape)) == (torch.int32, (case.tokens, case.top_k))
        assert ids.max() < case.global_experts
        for row in ids.tolist():
            present = [expert for expert in row if expert >= 0]
            assert len(set(present)) == len(present)


@pytest.mark.parametrize("routing", Routing)
@pytest.mark.parametrize("expert_map", ExpertMap)
def test_the_last_adapter_always_meets_the_last_expert(
    routing: Routing, expert_map: ExpertMap
) -> None:
    case = replace(CASE, routing=routing, expert_map=expert_map)
    for tokens in (1, 2, 30):
        for seed in SEEDS:
            rows = out_rows(batch_of(replace(case, tokens=tokens), seed))
            last = (rows.slots == case.slots - 1) & (rows.experts == case.experts - 1)
            assert last.any()


@pytest.mark.parametrize("top_k", [2, 3, 5])
def test_a_single_token_of_the_last_adapter_chooses_an_expert_of_another_rank(top_k: int) -> None:
    case = replace(PARALLEL, tokens=1, top_k=top_k)
    elsewhere, nowhere = [], []
    for seed in SEEDS:
        routes = routes_of(case, seed)
        is_none = routes.topk_ids < 0
        nowhere.append(bool(is_none.any()))
        elsewhere.append(bool(((local_experts(routes) < 0) & ~is_none).any()))
    if top_k > 2:
        assert all(elsewhere)
        assert all(nowhere)
    else:
        # there is room for one of both
        assert all(one != other for one, other in zip(elsewhere, nowhere, strict=True))
        assert any(elsewhere)
        assert any(nowhere)


@pytest.mark.parametrize("placement", [Placement.RUNS, Placement.ROUND_ROBIN])
def test_a_single_token_of_a_layer_meets_experts_of_two_ranks(placement: Placement) -> None:
    case = replace(CASE, site=Site.MOE_LAYER, slices=(24, 24), tokens=1, ep=2, placement=placement)
    for seed in SEEDS:
        ids = routes_of(case, seed).topk_ids
        chosen = ids[ids >= 0]
        assert len(rank_of_pairs(case, chosen, torch.zeros_like(chosen)).unique()) == 2


def test_uniform_routing_leaves_one_expert_idle_and_skewed_routing_half_of_them() -> None:
    hot = []
    for seed in SEEDS:
        uniform = routes_of(CASE, seed).topk_ids
        assert len(uniform.unique()) == CASE.experts - 1
        skewed = routes_of(replace(CASE, routing=Routing.SKEWED), seed).topk_ids
        assert len(skewed.unique()) <= CASE.experts // 2
        hot.append(int(skewed.flatten().bincount().max()))
    # of thirty tokens
    assert sum(count >= 24 for count in hot) > len(hot) // 2


def test_each_step_has_other_routes_and_the_same_expert_map() -> None:
    first, second = (batch_of(PARALLEL, 3, step=step).routes for step in (0, 1))
    assert first is not None
    assert second is not None
    assert not torch.equal(first.topk_ids, second.topk_ids)
    assert first.expert_map is not None
    assert second.expert_map is not None
    assert torch.equal(first.expert_map, second.expert_map)


def test_an_expert_map_holds_every_local_expert_once_and_the_last_global_one() -> None:
    for seed in SEEDS:
        routes = routes_of(PARALLEL, seed)
        table = routes.expert_map
        assert table is not None
        assert len(table) == 2 * CASE.experts
        assert sorted(table[table >= 0].tolist()) == list(range(CASE.experts))
        assert table[-1] >= 0
        # the memory before and after it would be valid ids of experts
        assert (whole(table) >= -1).all()
        experts = local_experts(routes)
        assert (routes.topk_ids < 0).any()
        assert (experts < 0).sum() > (routes.topk_ids < 0).sum()


def test_ids_and_the_expert_map_lie_between_guards_that_are_valid_ids() -> None:
    for seed in SEEDS:
        routes = routes_of(PARALLEL, seed)
        assert routes.expert_map is not None
        for values, ids in ((routes.topk_ids, 2 * CASE.experts), (routes.expert_map, CASE.experts)):
            storage, mine = whole(values), owned(values)
            first, last = (int(mine.nonzero()[i]) for i in (0, -1))
            # a tile of 64 rows too many still lands in the guard
            assert first >= 64 * values.shape[-1]
            assert len(storage) - last > 64 * values.shape[-1]
            assert ((storage[~mine] >= 0) & (storage[~mine] < ids)).all()


@pytest.mark.parametrize("case", [CASE, PARALLEL])
def test_an_id_that_is_read_past_the_end_is_that_of_the_last_local_expert(case: Case) -> None:
    for seed in SEEDS:
        routes = routes_of(case, seed)
        last, experts = case.experts - 1, routes.expert_map
        guards = whole(routes.topk_ids)[~owned(routes.topk_ids)].long()
        local = guards if experts is None else experts[guards]
        assert (local == last).all()


def test_the_experts_of_a_rank_are_no_run_and_in_no_order_of_their_global_ids() -> None:
    for seed in SEEDS:
        table = routes_of(PARALLEL, seed).expert_map
        assert table is not None
        here = (table >= 0).nonzero().flatten()
        assert (here.diff() > 1).any()
        assert (table[here].diff() < 0).any()


@pytest.mark.parametrize("kind", DataKind)
def test_each_step_has_other_router_weights(kind: DataKind) -> None:
    first, second = (batch_of(CASE, 3, kind, step=step).routes for step in (0, 1))
    assert first is not None
    assert second is not None
    assert first.weights is not None
    assert second.weights is not None
    assert not torch.equal(first.weights, second.weights)


@pytest.mark.parametrize("kind", DataKind)
def test_router_weights_differ_and_lie_between_nans(kind: DataKind) -> None:
    for seed in SEEDS:
        routes = batch_of(CASE, seed, kind).routes
        assert routes is not None
        assert routes.weights is not None
        assert routes.weights.dtype == torch.float32
        assert (routes.weights != 1).any()
        assert (routes.weights >= 0).all()
        # some of exact data, and none of the other, which errors are relative to
        assert (routes.weights == 0).any() == (kind is DataKind.EXACT)
        outside = whole(routes.weights).isnan().sum()
        assert outside == whole(routes.weights).numel() - routes.weights.numel()


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("sharing", [Sharing.PER_EXPERT, Sharing.SHARED_A, Sharing.SHARED_B])
@pytest.mark.parametrize("router", [RouterWeights.NONE, RouterWeights.OUTPUT])
def test_exact_data_of_moe_deltas_leaves_nothing_to_round(
    router: RouterWeights, sharing: Sharing, dtype: Dtype
) -> None:
    for source in Source:
        case = replace(PARALLEL, dtype=dtype, sharing=sharing, router=router, source=source)
        for seed in range(5):
            kind = DataKind.EXACT
            assert_exact(pool_of(case, seed, kind), batch_of(case, seed, kind), None)


@pytest.mark.parametrize("kind", DataKind)
def test_each_expert_of_each_slot_has_numbers_of_its_own_unless_they_are_shared(
    kind: DataKind,
) -> None:
    pool = pool_of(CASE, 4, kind)
    # the slice that the last slot lacks is zero for all of them
    every = {
        (part, tuple(bits_of(factor[slot, expert]).flatten().tolist()))
        for part in range(2)
        for factor in (pool.a[:, :, part], pool.b[part])
        for slot in range(CASE.slots)
        for expert in range(CASE.experts)
        if pool.ranks[slot][part]
    }
    assert len(every) == 2 * CASE.experts * sum(r > 0 for row in pool.ranks for r in row)
    for sharing, shape in ((Sharing.SHARED_A, (1, 8)), (Sharing.SHARED_B, (8, 1))):
        pool = pool_of(replace(CASE, sharing=sharing), 4, kind)
        assert (pool.a.shape[1], pool.b[0].shape[1]) == shape


def test_only_what_no_pair_uses_becomes_huge() -> None:
    for sharing in Sharing:
        pool = pool_of(replace(CASE, sharing=sharing), 0)
        used = torch.zeros(CASE.slots, CASE.experts, dtype=torch.bool)
        used[1, 2] = used[1, 5] = True
        poisoned = with_huge_unused(pool, used)
        huge = torch.finfo(pool.a.dtype).max
        for part, b in enumerate(poisoned.b):
            for factor in (poisoned.a[:, :, part], b):
                is_huge = (factor == huge).flatten(2).any(2)
                wanted = ~used if factor.shape[1] > 1 else ~used.any(1, keepdim=True)
                # a slice that a slot lacks stays zero
                live = torch.tensor([row[part] > 0 for row in pool.ranks])[:, None]
                assert torch.equal(is_huge, wanted & live)


@pytest.mark.parametrize("source", Source)
def test_a_pair_keeps_its_row_slot_expert_and_weight_when_tokens_move(source: Source) -> None:
    case = replace(PARALLEL, source=source)
    batch = batch_of(case, 5)
    order = torch.randperm(case.tokens, generator=torch.Generator().manual_seed(1))
    moved, before = out_rows(reordered_rows(batch, order)), out_rows(batch)
    place = (order[:, None] * case.top_k + torch.arange(case.top_k)).flatten()
    assert torch.equal(moved.slots, before.slots[place])
    assert torch.equal(moved.experts, before.experts[place])
    assert moved.weights is not None
    assert before.weights is not None
    assert torch.equal(moved.weights, before.weights[place])
    x = reordered_rows(batch, order).x[moved.x_rows]
    assert torch.equal(x, batch.x[before.x_rows[place]])


@pytest.mark.parametrize("source", Source)
def test_the_pairs_of_part_of_a_batch_are_those_of_its_tokens(source: Source) -> None:
    batch = batch_of(replace(PARALLEL, source=source), 5)
    part = part_of(batch, slice(4, 11))
    rows, whole_batch = out_rows(part), out_rows(batch)
    pairs = slice(12, 33)
    assert torch.equal(rows.slots, whole_batch.slots[pairs])
    assert torch.equal(rows.experts, whole_batch.experts[pairs])
    assert torch.equal(part.x[rows.x_rows], batch.x[whole_batch.x_rows[pairs]])


def test_experts_of_a_pool_change_places_but_shared_factors_do_not() -> None:
    order = [3, 0, 1, 2, 4, 7, 6, 5]
    pool = pool_of(replace(CASE, sharing=Sharing.SHARED_A), 2)
    moved = reordered_experts(pool, order)
    assert torch.equal(moved.a, pool.a)
    assert torch.equal(moved.b[1][:, 0], pool.b[1][:, 3])


def test_a_copy_of_a_batch_has_routes_of_its_own() -> None:
    batch = batch_of(CASE, 1)
    copy = copy_batch(batch)
    assert batch.routes is not None
    assert copy.routes is not None
    before = batch.routes.topk_ids.clone()
    copy.routes.topk_ids.zero_()
    assert torch.equal(batch.routes.topk_ids, before)
