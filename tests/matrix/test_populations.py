"""What the batches and adapters of the shipped cases contain: the populations that tell a correct
kernel from one with a small mistake. No edit of the cases or of the data may lose them."""

from __future__ import annotations

import itertools
import pathlib
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

pytest.importorskip("triton", reason="the plans of lorakernels need triton")

from loragate.core.machine import Machine
from loragate.core.verdict import OracleName
from loragate.inputs import DataKind, make_batch, make_pool
from loragate.inputs.mapping import BASE_ROW, live_ranks, make_token_slots, num_padded
from loragate.inputs.pairs import local_experts
from loragate.matrix.case import (
    MOE_SITES,
    OPERATIONS,
    Bias,
    Case,
    Cut,
    ExpertMap,
    Ids,
    Layout,
    Mix,
    Parallel,
    Path,
    Products,
    Quantisation,
    Ranks,
    RouterWeights,
    Site,
    Streams,
    Tier,
    Write,
)
from loragate.matrix.ids import seed_of
from loragate.matrix.load import load_cases
from loragate.protocol import Capabilities
from loragate.subjects.lorakernels.branches import all_branches, branches
from loragate.subjects.lorakernels.subject import LoraKernelsSubject

FILES = sorted((pathlib.Path(__file__).parents[2] / "cases").glob("*.yaml"))
CPU = Machine("cpu", "test", None, 1, 0)
MIXED = (Mix.RAGGED, Mix.SHUFFLED)
# a linear layer calls the operator of the dense delta
OPERATORS = ((Site.DENSE_DELTA, Site.LORA_LINEAR), (Site.MOE_DELTA,), (Site.MOE_LAYER,))
# these call the kernels of the dense delta, in forms of their own
FORMS = ((Site.GDN_IN_PROJ,), (Site.EMBEDDING,))
# (first site, branch) -> why no smoke case takes it
EXCUSED: dict[tuple[Site, str], str] = {
    (Site.MOE_LAYER, "alignment: sums of spans: several"): (
        "half a minute in the interpreter: a case of moe_delta and tests/moe/test_align_pairs.py "
        "have it"
    ),
}


@cache
def cases_of(tier: Tier) -> tuple[Case, ...]:
    return tuple(case for case in load_cases(FILES) if case.tier is tier)


def smoke(*sites: Site) -> list[Case]:
    return [case for case in cases_of(Tier.SMOKE) if case.site in (sites or OPERATIONS)]


@cache
def users_of(case: Case) -> frozenset[int]:
    """The slots with rows in the first batch of draw 0, -1 for base rows."""
    return frozenset(make_token_slots(case, seed_of(case, 0), 0).tolist())


def ranks_of(case: Case) -> tuple[tuple[int, ...], ...]:
    """[slots][projections] of draw 0."""
    if case.site is Site.MOE_LAYER:
        case_of_all = replace(case, slices=(*case.slices, *case.out_slices))
        return live_ranks(case_of_all, seed_of(case, 0), per_slice=True)
    return live_ranks(case, seed_of(case, 0), per_slice=True)


def share(cases: list[Case], chosen: list[Case]) -> float:
    return len(chosen) / len(cases)


@pytest.mark.parametrize("site", sorted(OPERATIONS))
def test_most_first_batches_mix_two_adapters_with_base_rows(site: Site) -> None:
    cases = [case for case in smoke(site) if case.tokens >= 4]
    mixing = [case for case in cases if BASE_ROW in users_of(case) and len(users_of(case)) >= 3]
    assert share(cases, mixing) >= 0.7
    # the others have a population of their own on purpose
    cases = [case for case in cases if case.mix in MIXED and case.slots > 1]
    assert share(cases, [case for case in cases if case in mixing]) >= 0.95
    three = [case for case in cases if len(users_of(case) - {BASE_ROW}) >= 3]
    assert share(cases, three) >= 0.3


@pytest.mark.parametrize("site", sorted(OPERATIONS))
def test_most_cases_have_more_than_two_slots_and_some_have_an_idle_one(site: Site) -> None:
    cases = [case for case in smoke(site) if case.tokens >= 4]
    assert share(cases, [case for case in cases if case.slots >= 3]) >= 0.5
    idle = [c for c in cases if set(range(c.slots)) - users_of(c) and c.mix in MIXED]
    assert share(cases, idle) >= 0.3


@pytest.mark.parametrize("site", sorted(OPERATIONS))
def test_every_slice_is_the_absent_one_of_some_adapter_that_has_rows(site: Site) -> None:
    absent: Counter[tuple[int, int]] = Counter()
    for case in smoke(site):
        ranks = ranks_of(case)
        for slot in users_of(case) - {BASE_ROW}:
            absent.update(
                (len(ranks[0]), part) for part, rank in enumerate(ranks[slot]) if not rank
            )
    mixed = [case for case in smoke(site) if case.ranks is Ranks.MIXED]
    for count in {len(ranks_of(case)[0]) for case in mixed} - {1}:
        assert all(absent[count, part] for part in range(count)), (count, absent)


@pytest.mark.parametrize("site", sorted(OPERATIONS))
def test_few_batches_leave_a_projection_without_a_live_adapter(site: Site) -> None:
    cases = [case for case in smoke(site) if case.mix in MIXED and case.tokens >= 4]
    dead = []
    for case in cases:
        users = [ranks_of(case)[slot] for slot in users_of(case) - {BASE_ROW}]
        if any(not any(column) for column in zip(*users, strict=True)):
            dead.append(case)
    assert share(cases, dead) <= 0.1


@pytest.mark.parametrize("site", sorted(OPERATIONS))
def test_ranks_differ_from_slot_to_slot_and_from_slice_to_slice(site: Site) -> None:
    cases = [c for c in smoke(site) if c.ranks is Ranks.MIXED and c.rank > 2 and c.slots > 1]
    assert cases
    for case in cases:
        ranks = ranks_of(case)
        assert len(set(ranks)) > 1
        if len(ranks[0]) > 1:
            assert any(len(set(row)) > 1 for row in ranks)


@pytest.mark.parametrize("sites", [*OPERATORS, *FORMS], ids=lambda sites: sites[0].value)
def test_every_branch_of_every_plan_has_a_smoke_case_or_an_excuse(sites: tuple[Site, ...]) -> None:
    taken = set().union(*(branches(case) for case in smoke(*sites)))
    known = set(all_branches(sites[0]))
    # a branch that no grid knows would have no row in docs/coverage.md
    for tier in Tier:
        of_tier = [case for case in cases_of(tier) if case.site in sites]
        assert set().union(*(branches(case) for case in of_tier)) <= known
    excused = {branch for site, branch in EXCUSED if site is sites[0]}
    assert sorted(known - taken - excused) == []
    assert taken.isdisjoint(excused)


def test_some_experts_of_a_mixed_batch_serve_several_slots() -> None:
    for site in sorted(MOE_SITES):
        cases = [case for case in smoke(site) if case.mix in MIXED and 8 <= case.tokens <= 40]
        shared = []
        for case in cases:
            batch = make_batch(case, seed_of(case, 0), 0, DataKind.SIGNED, CPU)
            assert batch.routes is not None
            slots: dict[int, set[int]] = {}
            rows = local_experts(batch.routes).tolist()
            for slot, experts in zip(batch.token_slots.tolist(), rows, strict=True):
                for expert in experts:
                    slots.setdefault(expert, set()).add(slot)
            if max(len(s - {BASE_ROW}) for e, s in slots.items() if e >= 0) >= 2:
                shared.append(case)
        assert share(cases, shared) >= 0.7


def test_factors_are_contiguous_in_some_cases_and_transposed_views_in_others() -> None:
    have = LoraKernelsSubject().capabilities(CPU)
    assert isinstance(have, Capabilities)
    cases = [case for case in smoke(Site.DENSE_DELTA) if case.rank > 1 and case.tokens < 40][:24]
    seen = set()
    for case in cases:
        pool = make_pool(case, seed_of(case, 0), DataKind.SIGNED, CPU, have)
        seen.add((pool.a.is_contiguous(), pool.b[0].is_contiguous()))
    assert seen == {(a, b) for a in (True, False) for b in (True, False)}


def test_smoke_covers_the_ways_to_cut_a_linear_layer() -> None:
    linear = smoke(Site.LORA_LINEAR)
    padded = [case for case in linear if case.cut is Cut.PADDED]
    assert {case.parallel for case in padded} == {Parallel.COLUMN, Parallel.ROW}
    assert any(width % case.tp for case in padded for width in case.slices)
    assert any(case.in_features % case.tp for case in padded)
    # fewer heads than ranks, one for all ranks, and more
    heads = {(case.heads > 1, case.heads < case.tp) for case in linear if case.heads}
    assert heads == {(False, True), (True, True), (True, False)}
    assert {case.bias for case in linear} == set(Bias)
    assert {case.input_dims for case in linear} == {2, 3}


def test_smoke_covers_both_layouts_of_a_delta_net_in_all_forms_and_cuts() -> None:
    nets = smoke(Site.GDN_IN_PROJ)
    assert {len(case.slices) for case in nets} == {2, 4}
    forms = {(case.products, case.streams) for case in nets}
    assert forms == set(itertools.product(Products, Streams)) - {(Products.PLAN, Streams.DUAL)}
    # each rank holds several key heads, one, or one that others hold as well
    cuts = {(case.key_heads > case.tp) - (case.key_heads < case.tp) for case in nets if case.tp > 1}
    assert cuts >= {0, -1}
    # adapters of qkvz alone, of ba alone, and of both have rows
    grouped = [case for case in nets if len(case.slices) == 2 and case.mix in MIXED]
    used = {
        tuple(rank > 0 for rank in ranks_of(case)[slot])
        for case in grouped
        for slot in users_of(case) - {BASE_ROW}
    }
    assert used == {(True, True), (True, False), (False, True)}
    assert {case.input_dims for case in nets} == {2, 3}


def test_smoke_covers_odd_ids_larger_buffers_and_quantised_layers_that_are_cut() -> None:
    for site in sorted(MOE_SITES):
        assert {case.ids for case in smoke(site)} == set(Ids)
    for site in (Site.DENSE_DELTA, Site.MOE_DELTA, Site.MOE_LAYER):
        assert any(case.spare_rows for case in smoke(site))
    layers = smoke(Site.MOE_LAYER)
    assert any(c.quantisation is Quantisation.FP8 and c.tp > 1 for c in layers)
    assert {case.input_dims for case in layers} == {2, 3}


def test_padding_changes_the_tiles_of_some_smoke_case() -> None:
    padded = [case for case in smoke() if case.layout is Layout.PADDED_ROWS and num_padded(case)]
    assert any("dense tile: live rows alone would have lower tiles" in branches(c) for c in padded)


@pytest.mark.parametrize("sites", OPERATORS, ids=lambda sites: sites[0].value)
def test_some_sequence_has_steps_with_tiles_of_different_heights(sites: tuple[Site, ...]) -> None:
    """The second step of a sequence has a third of the rows."""

    def heights(case: Case) -> set[str]:
        return {branch for branch in branches(case) if "tile" in branch and branch[-1] == "s"}

    judged = [case for case in smoke(*sites) if OracleName.SEQUENCE in case.oracles]
    fewer = [replace(case, tokens=case.tokens // 3) for case in judged if case.tokens >= 3]
    assert any(
        heights(case) != heights(few)
        for case, few in zip([c for c in judged if c.tokens >= 3], fewer, strict=True)
    )


def test_smoke_crosses_paths_with_outputs_slices_and_ways_to_align() -> None:
    delta = [
        case for case in smoke(Site.MOE_DELTA) if case.tokens > 4 and case.ranks is Ranks.MIXED
    ]
    paths = {Path.TWO_KERNEL, Path.ONE_SHOT, Path.SMALL_BATCH}
    wanted = set(itertools.product(paths, Write, (RouterWeights.NONE, RouterWeights.OUTPUT)))
    several = [case for case in delta if len(case.slices) == 3 and case.top_k > 1]
    assert {(case.path, case.write, case.router) for case in several} >= wanted
    ways = {
        branch
        for case in smoke(Site.MOE_DELTA)
        if case.expert_map is ExpertMap.PARALLEL
        for branch in branches(case)
        if branch.startswith("alignment: ")
    }
    assert {
        "alignment: one program sorts all pairs",
        "alignment: pairs compared with each other",
        "alignment: several launches",
        "alignment: more buckets than a program counts",
    } <= ways
