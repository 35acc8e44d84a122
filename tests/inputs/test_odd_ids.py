"""Ids that occur twice in a token, and ids of no expert."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loragate.core.machine import Machine
from loragate.inputs import DataKind, copy_batch, make_batch
from loragate.inputs.pairs import local_experts, pair_rows, part_of
from loragate.matrix.case import Case, Dtype, ExpertMap, Ids, Site
from loragate.protocol import Routes

CPU = Machine("cpu", "test", None, 1, 0)
SEEDS = range(10)
CASE = Case(
    site=Site.MOE_DELTA,
    tokens=30,
    in_features=16,
    slices=(8,),
    rank=4,
    slots=3,
    dtype=Dtype.BF16,
    experts=6,
    top_k=3,
)


def routes_of(case: Case, seed: int) -> Routes:
    routes = make_batch(case, seed, 0, DataKind.SIGNED, CPU).routes
    assert routes is not None
    return routes


def repeats(ids: torch.Tensor) -> int:
    return sum(len(row) - len(set(row)) for row in ids.tolist())


@pytest.mark.parametrize("expert_map", ExpertMap)
def test_only_repeated_ids_occur_twice_in_a_token(expert_map: ExpertMap) -> None:
    case = replace(CASE, expert_map=expert_map)
    for seed in SEEDS:
        # -1 may occur twice in any case
        distinct = routes_of(case, seed).topk_ids
        assert expert_map is ExpertMap.PARALLEL or repeats(distinct) == 0
        repeated = routes_of(replace(case, ids=Ids.REPEATED), seed).topk_ids
        assert repeats(repeated) > repeats(distinct)
        assert repeated.max() < case.global_experts


@pytest.mark.parametrize("expert_map", ExpertMap)
def test_a_token_repeats_choices_of_its_own(expert_map: ExpertMap) -> None:
    case = replace(CASE, expert_map=expert_map)
    for seed in SEEDS:
        distinct = routes_of(case, seed).topk_ids.tolist()
        repeated = routes_of(replace(case, ids=Ids.REPEATED), seed).topk_ids.tolist()
        for own, row in zip(distinct, repeated, strict=True):
            assert set(row) <= set(own)


@pytest.mark.parametrize("expert_map", ExpertMap)
def test_unknown_ids_lie_beyond_all_experts_and_below_zero(expert_map: ExpertMap) -> None:
    case = replace(CASE, expert_map=expert_map, ids=Ids.UNKNOWN)
    for seed in SEEDS:
        routes = routes_of(case, seed)
        ids, local = routes.topk_ids, local_experts(routes)
        count, largest = case.global_experts, torch.iinfo(torch.int32)
        assert {count, count + 1, largest.max, -1, -2, largest.min} <= set(ids.flatten().tolist())
        unknown = (ids < 0) | (ids >= count)
        assert (local[unknown] == -1).all()
        assert local.min() == -1
        assert local.max() < case.experts


def test_a_pair_of_an_unknown_id_has_no_slot_also_in_a_copy_and_in_a_part() -> None:
    batch = make_batch(replace(CASE, ids=Ids.UNKNOWN), 3, 0, DataKind.SIGNED, CPU)
    for other, rows in (
        (copy_batch(batch), slice(0, 30)),
        (part_of(batch, slice(5, 9)), slice(5, 9)),
    ):
        assert other.routes is not None
        pairs = pair_rows(other)
        unknown = ((other.routes.topk_ids < 0) | (other.routes.topk_ids >= 6)).flatten()
        assert unknown.any()
        assert (pairs.slots[unknown] == -1).all()
        assert (pairs.experts[unknown] == -1).all()
        assert len(other.token_slots) == rows.stop - rows.start


@pytest.mark.parametrize("ids", Ids)
def test_the_last_slot_meets_the_last_expert_whatever_the_ids(ids: Ids) -> None:
    for seed in SEEDS:
        batch = make_batch(replace(CASE, ids=ids), seed, 0, DataKind.SIGNED, CPU)
        pairs = pair_rows(batch)
        assert ((pairs.slots == CASE.slots - 1) & (pairs.experts == CASE.experts - 1)).any()
