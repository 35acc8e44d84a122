"""The golden result of moe_delta is the definition, pair by pair."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from loragate.core.machine import Machine
from loragate.inputs import DataKind, make_batch, make_pool
from loragate.inputs.pairs import local_experts
from loragate.matrix.case import (
    Case,
    Dtype,
    ExpertMap,
    Layout,
    RouterWeights,
    Sharing,
    Site,
    Source,
    Write,
)
from loragate.oracles.numeric.golden import chunks, condition_number, eager, folded, golden
from loragate.oracles.numeric.grouped import GroupedRows
from loragate.protocol import Batch, Pool
from loragate.subjects.torch.subject import TorchSubject

CPU = Machine("cpu", "test", None, 1, 0)
CASE = Case(
    site=Site.MOE_DELTA,
    tokens=9,
    in_features=20,
    slices=(6, 3),
    rank=4,
    slots=3,
    dtype=Dtype.BF16,
    experts=4,
    top_k=2,
    expert_map=ExpertMap.PARALLEL,
)


def data(case: Case) -> tuple[Pool, Batch]:
    have = TorchSubject().capabilities(CPU)
    assert not isinstance(have, str)
    pool = make_pool(case, 7, DataKind.SIGNED, CPU, have)
    return pool, make_batch(case, 7, 0, DataKind.SIGNED, CPU)


def dot(left: list[float], right: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(left, right, strict=True))


def pair_by_pair(case: Case, pool: Pool, batch: Batch) -> list[list[float]]:
    """The definition, one number after the other, in Python's own fp64."""
    assert batch.routes is not None
    x, out = batch.x.tolist(), batch.out.tolist()
    experts = local_experts(batch.routes).tolist()
    for pair, row in enumerate(out):
        token, choice = divmod(pair, case.top_k)
        slot, expert = int(batch.token_slots[token]), experts[token][choice]
        if slot < 0 or expert < 0:
            continue
        values = x[token] if case.source is Source.TOKEN else x[pair]
        weights = batch.routes.weights
        weight = 1.0 if weights is None else float(weights[token, choice])
        column = 0
        for part, width in enumerate(case.slices):
            rank = pool.ranks[slot][part]
            a = pool.a[slot, min(expert, pool.a.shape[1] - 1), part].tolist()
            b = pool.b[part][slot, min(expert, pool.b[part].shape[1] - 1)].tolist()
            shrunk = [dot(values, a[r]) for r in range(rank)]
            for n in range(width if rank else 0):
                delta = weight * pool.scales[slot][part] * dot(shrunk, b[n][:rank])
                kept = row[column + n] if case.write is Write.ADD else 0.0
                row[column + n] = kept + delta
            column += width
    return out


@pytest.mark.parametrize("source", Source)
@pytest.mark.parametrize("write", Write)
@pytest.mark.parametrize("sharing", [Sharing.PER_EXPERT, Sharing.SHARED_A, Sharing.SHARED_B])
@pytest.mark.parametrize("router", [RouterWeights.NONE, RouterWeights.OUTPUT])
def test_golden_is_the_definition_pair_by_pair(
    source: Source, write: Write, sharing: Sharing, router: RouterWeights
) -> None:
    layout = Layout.TRANSPOSED if source is Source.TOKEN else Layout.COLUMN_SLICE
    case = replace(CASE, source=source, write=write, sharing=sharing, router=router, layout=layout)
    pool, batch = data(case)
    wanted = torch.tensor(pair_by_pair(case, pool, batch), dtype=torch.float64)
    right = golden(pool, batch, None, write)
    torch.testing.assert_close(right.out, wanted, rtol=1e-13, atol=1e-13)
    error = (eager(case, pool, batch).double() - wanted).abs()
    assert 0 < error.max() < 0.05


@pytest.mark.parametrize("source", Source)
def test_a_token_of_a_single_choice_is_a_pair_with_its_expert_and_weight(source: Source) -> None:
    case = replace(CASE, top_k=1, source=source, router=RouterWeights.OUTPUT)
    pool, batch = data(case)
    wanted = torch.tensor(pair_by_pair(case, pool, batch), dtype=torch.float64)
    torch.testing.assert_close(golden(pool, batch).out, wanted, rtol=1e-13, atol=1e-13)
    # at an expert of another rank nothing is added
    assert batch.routes is not None
    nowhere = local_experts(batch.routes).flatten() < 0
    assert nowhere.any()
    assert not nowhere.all()
    assert torch.equal(golden(pool, batch).out[nowhere], batch.out[nowhere].double())


def test_chunks_tile_the_pairs_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    for source in Source:
        case = replace(CASE, source=source)
        pool, batch = data(case)
        whole = golden(pool, batch).out
        monkeypatch.setattr("loragate.oracles.numeric.golden._CHUNK", 4 * 2 * case.in_features)
        pieces = list(chunks(batch))
        assert [(rows.start, rows.stop) for rows, _ in pieces] == [(0, 8), (8, 16), (16, 18)]
        together = torch.cat([golden(pool, piece).out for _, piece in pieces])
        torch.testing.assert_close(together, whole, rtol=1e-14, atol=1e-14)
        monkeypatch.undo()


def test_folding_multiplies_the_scale_of_an_adapter_into_b_of_all_its_experts() -> None:
    pool, _ = data(CASE)
    low = folded(pool)
    scale = pool.scales[1][0]
    assert torch.equal(low.b[0][1], (pool.b[0][1].float() * scale).bfloat16())


def test_the_condition_number_of_pairs_is_that_of_their_own_terms() -> None:
    pool, batch = data(CASE)
    assert batch.routes is not None
    experts = local_experts(batch.routes).flatten()
    slots = batch.token_slots.repeat_interleave(CASE.top_k)
    rows = ((experts >= 0) & (slots == 2)).nonzero().flatten()
    assert 1 < condition_number(pool, batch, rows, 0) < 100


@pytest.mark.parametrize("count", [1, 2, 5, 40, 300])
@pytest.mark.parametrize("num_weights", [4, 1])
@pytest.mark.parametrize("squares", [False, True])
def test_rows_are_multiplied_by_the_weights_of_their_own_experts_or_by_their_squares(
    count: int, num_weights: int, squares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(count)
    experts = torch.randint(0, 4, (count,), generator=generator)
    # no row has expert 2, and the gathered weights do not fit at once
    experts[experts == 2] = 3
    monkeypatch.setattr("loragate.oracles.numeric.grouped._CHUNK", 40)
    rows = torch.randn(count, 5, generator=generator).double()
    weights = torch.randn(num_weights, 3, 5, generator=generator)
    product = GroupedRows(experts, 4).times(rows, weights, squares=squares)
    factors = weights.double() ** (2 if squares else 1)
    # experts may share their weights
    owners = experts.clamp(max=num_weights - 1).tolist()
    wanted = torch.stack([factors[e] @ row for e, row in zip(owners, rows, strict=True)])
    torch.testing.assert_close(product, wanted, rtol=1e-13, atol=1e-13)
