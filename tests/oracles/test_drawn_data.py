"""The drawn data has the properties that verdicts rely on."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import Machine, select_interpreter
from loragate.inputs import DataKind, make_base, make_batch, make_pool
from loragate.inputs.mapping import BASE_ROW, make_token_slots, num_padded
from loragate.inputs.placement import bits_of, owned, whole
from loragate.inputs.pool import Dead
from loragate.inputs.vocabulary import as_linear
from loragate.matrix.case import (
    LAYER_SITES,
    Case,
    Dtype,
    GateUp,
    Layout,
    Mix,
    Quantisation,
    Ranks,
    RouterWeights,
    Site,
)
from loragate.matrix.ids import seed_of
from loragate.oracles.numeric.exact import assert_exact
from loragate.protocol import Capabilities, Pool
from loragate.subjects.torch.subject import TorchSubject

select_interpreter()
CPU = Machine("cpu", "test", None, 1, 0)
SEEDS = range(20)
CASE = Case(
    site=Site.DENSE_DELTA,
    tokens=40,
    in_features=64,
    slices=(24, 16, 9),
    rank=16,
    slots=4,
    dtype=Dtype.BF16,
)


def capabilities() -> Capabilities:
    have = TorchSubject().capabilities(CPU)
    assert not isinstance(have, str)
    return have


def pool_of(case: Case, seed: int, kind: DataKind) -> Pool:
    return make_pool(case, seed, kind, CPU, capabilities())


def same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(bits_of(left), bits_of(right))


@pytest.mark.parametrize("dtype", Dtype)
# data of MoE layers: test_golden_layer.py
@pytest.mark.parametrize("site", sorted(set(Site) - {Site.MOE_LAYER}))
@pytest.mark.parametrize(
    ("tokens", "in_features", "slices", "rank"),
    [
        (0, 48, (33,), 8),
        (1, 1, (1,), 1),
        (5, 7, (3, 2), 2),
        (33, 100, (40, 17), 24),
        (3, 12288, (16,), 512),
        (4, 256, (64, 8), 512),
    ],
)
def test_exact_data_leaves_nothing_to_round(
    tokens: int, in_features: int, slices: tuple[int, ...], rank: int, site: Site, dtype: Dtype
) -> None:
    case = replace(
        CASE,
        site=site,
        tokens=tokens,
        in_features=in_features,
        slices=slices,
        rank=rank,
        slots=2,
        dtype=dtype,
    )
    kind = DataKind.EXACT
    for seed in range(1 if in_features > 1000 else 5):
        base = make_base(case, seed, kind, CPU) if site in LAYER_SITES else None
        batch = make_batch(case, seed, 0, kind, CPU)
        assert_exact(*as_linear(case, pool_of(case, seed, kind), batch, base))


def test_data_off_the_grid_is_not_accepted_as_exact() -> None:
    batch = make_batch(CASE, 0, 0, DataKind.EXACT, CPU)
    with pytest.raises(AssertionError, match="delta off the grid"):
        assert_exact(pool_of(CASE, 0, DataKind.SIGNED), batch, None)
    batch.out[0, 0] = 200.0
    with pytest.raises(AssertionError, match="a sum of magnitudes reaches"):
        assert_exact(pool_of(CASE, 0, DataKind.EXACT), batch, None)


@pytest.mark.parametrize("mix", [Mix.RAGGED, Mix.SHUFFLED])
def test_ragged_has_base_rows_and_all_slots_but_one_that_is_not_the_last(mix: Mix) -> None:
    idle = set()
    for seed in SEEDS:
        slots = set(make_token_slots(replace(CASE, mix=mix), seed, 0).tolist())
        missing = set(range(CASE.slots)) - slots
        assert BASE_ROW in slots
        assert len(missing) == 1
        assert CASE.slots - 1 not in missing
        idle |= missing
    assert idle == set(range(CASE.slots - 1))


def test_ragged_rows_of_a_slot_are_adjacent_and_shuffled_ones_are_not() -> None:
    for seed in SEEDS:
        runs = {}
        for mix in (Mix.RAGGED, Mix.SHUFFLED):
            rows = make_token_slots(replace(CASE, mix=mix), seed, 0).tolist()
            runs[mix] = [(slot, len(list(group))) for slot, group in itertools.groupby(rows)]
        assert len(runs[Mix.RAGGED]) == CASE.slots
        assert len(runs[Mix.SHUFFLED]) > CASE.slots
        population: Counter[int] = Counter()
        for slot, length in runs[Mix.SHUFFLED]:
            population[slot] += length
        assert population == dict(runs[Mix.RAGGED])


def test_ragged_runs_differ_much_in_length() -> None:
    spreads = []
    for seed in SEEDS:
        counts = Counter(make_token_slots(CASE, seed, 0).tolist()).values()
        spreads.append(max(counts) / min(counts))
    assert sorted(spreads)[len(spreads) // 2] >= 3


def test_single_uses_one_slot_for_every_row_and_any_slot_for_some_seed() -> None:
    used = [set(make_token_slots(replace(CASE, mix=Mix.SINGLE), s, 0).tolist()) for s in SEEDS]
    assert all(len(slots) == 1 for slots in used)
    assert set().union(*used) == set(range(CASE.slots))


@pytest.mark.parametrize(
    ("mix", "population"),
    [(Mix.LAST_SLOT, {BASE_ROW, CASE.slots - 1}), (Mix.ALL_BASE, {BASE_ROW})],
)
def test_the_other_mixes_have_just_their_population(mix: Mix, population: set[int]) -> None:
    for seed in SEEDS:
        assert set(make_token_slots(replace(CASE, mix=mix), seed, 0).tolist()) == population


@pytest.mark.parametrize("mix", Mix)
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 40])
def test_a_mapping_is_int32_on_the_host_with_a_row_for_each_token(mix: Mix, tokens: int) -> None:
    slots = make_token_slots(replace(CASE, mix=mix, tokens=tokens), 5, 0)
    assert (slots.dtype, slots.shape, slots.device.type) == (torch.int32, (tokens,), "cpu")
    if tokens and mix is not Mix.ALL_BASE:
        assert (slots >= 0).any()


@pytest.mark.parametrize("mix", Mix)
def test_padding_is_base_rows_after_the_live_ones(mix: Mix) -> None:
    case = replace(CASE, mix=mix, layout=Layout.PADDED_ROWS)
    for seed in SEEDS:
        slots = make_token_slots(case, seed, 0)
        assert num_padded(case) == 10
        assert (slots[-10:] == BASE_ROW).all()


def test_mixed_ranks_differ_from_slot_to_slot_and_slice_to_slice() -> None:
    for seed in SEEDS:
        ranks = pool_of(CASE, seed, DataKind.SIGNED).ranks
        assert all(0 <= rank <= CASE.rank for row in ranks for rank in row)
        # the last slot always has tokens
        assert CASE.rank in ranks[-1]
        # the last slot has one rank that is not its own
        for row in ranks[:-1]:
            live = [rank for rank in row if rank]
            assert len(set(live)) == len(live)
        for part in range(len(CASE.slices)):
            live = [row[part] for row in ranks[:-1] if row[part]]
            assert len(set(live)) == len(live)
    full = pool_of(replace(CASE, ranks=Ranks.FULL), 0, DataKind.SIGNED).ranks
    assert full == ((CASE.rank,) * len(CASE.slices),) * CASE.slots


@pytest.mark.parametrize("slots", [2, 3, 8])
def test_every_slice_is_absent_from_some_slot_and_never_from_all(slots: int) -> None:
    case = replace(CASE, slots=slots)
    absent = set()
    for seed in range(100):
        ranks = pool_of(case, seed, DataKind.SIGNED).ranks
        places = [
            (slot, part) for slot, row in enumerate(ranks) for part in range(3) if not row[part]
        ]
        assert len(places) == (1 if slots == 2 else 2)
        # of different slots and of different slices: each of them has another live adapter
        assert all(len(set(axis)) == len(places) for axis in zip(*places, strict=True))
        absent |= set(places)
    assert absent == set(itertools.product(range(slots), range(3)))


@pytest.mark.parametrize("gate_up", GateUp)
def test_the_last_adapter_of_a_layer_has_all_ranks_whichever_modules_it_has(
    gate_up: GateUp,
) -> None:
    layer = replace(CASE, site=Site.MOE_LAYER, slices=(24, 24), experts=2, top_k=1)
    for seed in SEEDS:
        pool = pool_of(replace(layer, gate_up=gate_up), seed, DataKind.SIGNED)
        assert pool.down is not None
        assert layer.rank in (*pool.ranks[-1], *pool.down.ranks[-1])


@pytest.mark.parametrize("dead", Dead)
@pytest.mark.parametrize("site", [Site.DENSE_DELTA, Site.MOE_LAYER])
def test_ranks_that_an_adapter_lacks_are_dead_in_both_factors_also_all_of_an_absent_slice(
    site: Site, dead: Dead
) -> None:
    case = replace(CASE, site=site, ranks=Ranks.MIXED, slices=(24, 24), experts=2, top_k=1)
    pool = make_pool(case, 3, DataKind.SIGNED, CPU, capabilities(), dead=dead)
    assert any(0 in row for row in pool.ranks)
    pools = [each for each in (pool, pool.down) if each is not None]
    found = [(own, slot, row) for own in pools for slot, row in enumerate(own.ranks)]
    for own, slot, row in found:
        for part, rank in enumerate(row):
            for ranks in (own.a[slot][..., part, :, :].mT, own.b[part][slot]):
                used, unused = ranks[..., :rank], ranks[..., rank:]
                assert used.isfinite().all()
                assert rank == 0 or used.any()
                assert unused.isnan().all() if dead is Dead.NAN else not unused.any()


@pytest.mark.parametrize(
    "axes",
    [
        {"slices": (2, 24)},
        {"site": Site.MOE_LAYER, "slices": (2, 2), "in_features": 3, "experts": 2, "top_k": 1},
    ],
)
def test_exact_deltas_of_a_narrow_slice_use_the_last_rank_of_each_adapter(
    axes: dict[str, Any],
) -> None:
    case = replace(CASE, ranks=Ranks.MIXED, **axes)
    for seed in SEEDS:
        pool = pool_of(case, seed, DataKind.EXACT)
        for own in (pool, pool.down) if pool.down is not None else (pool,):
            for slot, row in enumerate(own.ranks):
                for part, rank in enumerate(row):
                    assert rank == 0 or own.b[part][slot][..., rank - 1].any()


@pytest.mark.parametrize("site", [Site.DENSE_DELTA, Site.MOE_DELTA])
def test_an_output_that_is_added_to_lies_between_numbers_and_not_between_nans(site: Site) -> None:
    case = replace(CASE, site=site, experts=4, top_k=2)
    out = make_batch(case, 3, 0, DataKind.SIGNED, CPU).out
    beside = whole(out)[~owned(out)]
    # a number added to a NaN leaves no trace
    assert len(beside) > 0
    assert beside.isfinite().all()


def test_of_two_slots_one_is_idle_in_every_other_step_only() -> None:
    case = replace(CASE, slots=2)
    for seed in SEEDS:
        assert set(make_token_slots(case, seed, 0).tolist()) == {BASE_ROW, 0, 1}
        assert set(make_token_slots(case, seed, 1).tolist()) == {BASE_ROW, 1}


@pytest.mark.parametrize("kind", DataKind)
def test_scales_are_never_one_and_differ_from_slot_to_slot(kind: DataKind) -> None:
    for seed in SEEDS:
        scales = pool_of(CASE, seed, kind).scales
        assert all(scale != 1.0 for row in scales for scale in row)
        for left, right in itertools.pairwise(scales):
            assert all(a != b for a, b in zip(left, right, strict=True))
        for row in scales:
            assert all(a != b for a, b in itertools.pairwise(row))


def test_signed_scales_are_all_different_in_a_pool() -> None:
    for seed in SEEDS:
        scales = [s for row in pool_of(CASE, seed, DataKind.SIGNED).scales for s in row]
        gaps = [b - a for a, b in itertools.pairwise(sorted(scales))]
        assert min(gaps) > 0.01


def test_signed_data_has_both_signs_and_deltas_of_the_size_of_their_scale() -> None:
    case = replace(CASE, tokens=200, mix=Mix.SINGLE, ranks=Ranks.FULL, dtype=Dtype.FP32)
    for seed in SEEDS:
        batch = make_batch(case, seed, 0, DataKind.SIGNED, CPU)
        pool = pool_of(case, seed, DataKind.SIGNED)
        for values in (batch.x, batch.out, pool.a, *pool.b):
            assert 0.4 < (values > 0).float().mean() < 0.6
        slot = int(batch.token_slots[0])
        shrunk = batch.x @ pool.a[slot, 0].T
        delta = shrunk @ pool.b[0][slot].T
        assert 0.5 < delta.square().mean().sqrt() < 3


def test_the_last_column_weighs_as_much_as_all_others_at_any_width() -> None:
    # a tail that is lost would else drown in a wide row
    for width in (8, 64, 1024):
        case = replace(CASE, in_features=width, ranks=Ranks.FULL)
        batch = make_batch(case, 0, 0, DataKind.SIGNED, CPU)
        a = pool_of(case, 0, DataKind.SIGNED).a.float()
        assert (batch.x[:, -1].abs() == 1).all()
        assert (a[..., -1].abs() >= 1).all()
        assert a[..., :-1].square().sum(-1).mean() < 1.2


@pytest.mark.parametrize("axes", [{}, {"site": Site.MOE_LAYER, "slices": (16, 16), "experts": 2}])
def test_either_factor_is_a_transposed_view_in_some_draws(axes: dict[str, Any]) -> None:
    pools = [pool_of(replace(CASE, **axes), seed, DataKind.EXACT) for seed in SEEDS]
    pools += [pool.down for pool in pools if pool.down is not None]
    assert len(pools) == (40 if axes else 20)
    for some in (pools[:20], pools[-20:]):
        transposed = {(pool.a.stride(-1) > 1, pool.b[0].stride(-1) > 1) for pool in some}
        assert transposed == set(itertools.product((False, True), repeat=2))


@pytest.mark.parametrize("kind", DataKind)
@pytest.mark.parametrize("layout", Layout)
def test_the_same_seed_gives_the_same_bits(layout: Layout, kind: DataKind) -> None:
    case = replace(CASE, layout=layout)
    first, again = (make_batch(case, 9, 1, kind, CPU) for _ in range(2))
    assert same(whole(first.x), whole(again.x))
    assert same(whole(first.out), whole(again.out))
    assert torch.equal(first.token_slots, again.token_slots)
    pool, other = (pool_of(case, 9, kind) for _ in range(2))
    assert same(pool.a, other.a)
    assert all(same(a, b) for a, b in zip(pool.b, other.b, strict=True))
    assert (pool.ranks, pool.scales) == (other.ranks, other.scales)
    base, twin = (make_base(case, 9, kind, CPU) for _ in range(2))
    assert same(base.weight, twin.weight)


def test_a_global_seed_changes_nothing() -> None:
    torch.manual_seed(1)
    first = make_batch(CASE, 9, 0, DataKind.SIGNED, CPU)
    torch.manual_seed(2)
    assert same(first.x, make_batch(CASE, 9, 0, DataKind.SIGNED, CPU).x)


@pytest.mark.parametrize("kind", DataKind)
def test_draws_and_steps_differ_in_every_part(kind: DataKind) -> None:
    seeds = [seed_of(CASE, draw) for draw in range(3)]
    assert len(set(seeds)) == len(seeds)
    draws = [make_batch(CASE, seed, step, kind, CPU) for seed in seeds for step in (0, 1)]
    pools = [pool_of(CASE, seed, kind) for seed in seeds]
    for left, right in itertools.combinations(draws, 2):
        assert not torch.equal(left.x, right.x)
        assert not torch.equal(left.out, right.out)
        assert not torch.equal(left.token_slots, right.token_slots)
    for one, two in itertools.combinations(pools, 2):
        assert not torch.equal(one.a, two.a)
        assert not torch.equal(one.b[0], two.b[0])


@pytest.mark.parametrize("mix", [Mix.RAGGED, Mix.SHUFFLED])
def test_the_last_slot_has_three_rows_or_more_in_all_but_tiny_batches(mix: Mix) -> None:
    for seed in range(100):
        rows = make_token_slots(replace(CASE, mix=mix, tokens=12), seed, 0).tolist()
        assert rows.count(CASE.slots - 1) >= 3
        assert len(set(rows)) == CASE.slots


@pytest.mark.parametrize("kind", [DataKind.SIGNED, DataKind.EXACT])
def test_a_quantised_layer_gets_a_base_row_of_zeros_as_padding_is(kind: DataKind) -> None:
    case = Case(
        site=Site.MOE_LAYER,
        tokens=9,
        in_features=16,
        slices=(8, 8),
        rank=2,
        slots=2,
        dtype=Dtype.BF16,
        experts=2,
        top_k=2,
        router=RouterWeights.OUTPUT,
        quantisation=Quantisation.FP8,
    )
    for seed in range(5):
        batch = make_batch(case, seed, 0, kind, CPU)
        zero = (batch.x == 0).all(1).nonzero().flatten()
        assert len(zero) == 1
        assert batch.token_slots[zero] == BASE_ROW
