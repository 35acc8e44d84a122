"""The golden result, the eager one, and the size of a rounding, on which verdicts rest."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loragate.inputs import DataKind, make_base, make_batch, make_pool
from loragate.inputs.pairs import out_rows
from loragate.matrix.case import Dtype, Layout, Mix, Parallel, Ranks, Site
from loragate.oracles.numeric.deltas import deltas
from loragate.oracles.numeric.errors import half_ulp
from loragate.oracles.numeric.golden import chunks, condition_number, eager, folded, golden
from loragate.protocol import BaseLayer, Batch, Pool, Trial


def data(trial: Trial) -> tuple[Pool, Batch, BaseLayer | None]:
    """Signed data with one slice of the last slot absent."""
    case, seed, kind = trial.case, trial.seed, DataKind.SIGNED
    pool = make_pool(case, seed, kind, trial.machine, trial.capabilities)
    batch = make_batch(case, seed, 0, kind, trial.machine)
    linear = case.site is Site.LORA_LINEAR
    return pool, batch, make_base(case, seed, kind, trial.machine) if linear else None


def dot(left: list[float], right: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(left, right, strict=True))


def element_by_element(pool: Pool, batch: Batch, base: BaseLayer | None) -> list[list[float]]:
    """The definition, one number after the other, in Python's own fp64."""
    x, rows = batch.x.tolist(), []
    for token, slot in enumerate(batch.token_slots.tolist()):
        if base is None:
            row = batch.out[token].tolist()
        else:
            assert base.bias is not None
            weight, bias = base.weight.tolist(), base.bias.tolist()
            row = [dot(x[token], w) for w in weight]
            row = [value + add for value, add in zip(row, bias, strict=True)]
        column = 0
        for part, b in enumerate(pool.b):
            for values in b[slot].tolist() if slot >= 0 else ():
                shrunk = (
                    dot(x[token], pool.a[slot, part, r].tolist())
                    for r in range(pool.ranks[slot][part])
                )
                terms = [value * values[r] for r, value in enumerate(shrunk)]
                row[column] += pool.scales[slot][part] * math.fsum(terms)
                column += 1
            column = column if slot >= 0 else column + b.shape[1]
        rows.append(row)
    return rows


def squares_of_all_addends(
    pool: Pool, batch: Batch, base: BaseLayer | None, token: int, column: int
) -> float:
    """Of one element, whose slice is the first one."""
    slot, x = int(batch.token_slots[token]), batch.x[token].tolist()
    total = 0.0
    if base is not None:
        assert base.bias is not None
        total += math.fsum(
            (a * b) ** 2 for a, b in zip(x, base.weight[column].tolist(), strict=True)
        )
        total += float(base.bias[column]) ** 2
    for r in range(pool.ranks[slot][0] if slot >= 0 else 0):
        b = pool.scales[slot][0] * float(pool.b[0][slot, column, r])
        products = [
            value * weight for value, weight in zip(x, pool.a[slot, 0, r].tolist(), strict=True)
        ]
        total += b**2 * math.fsum(product**2 for product in products)
        total += (b * math.fsum(products)) ** 2
    return total


@pytest.mark.parametrize("site", [Site.DENSE_DELTA, Site.LORA_LINEAR])
def test_fp32_sums_are_as_uncertain_as_what_they_add_up(
    site: Site, make_trial: Callable[..., Trial]
) -> None:
    trial = make_trial(site=site, dtype=Dtype.FP32, tokens=6, in_features=9, rank=3)
    pool, batch, base = data(trial)
    addends = golden(pool, batch, base).addends_sq
    assert addends is not None
    for token in range(6):
        for column in (0, 7):
            wanted = squares_of_all_addends(pool, batch, base, token, column)
            assert float(addends[token, column]) == pytest.approx(wanted, rel=1e-5)
    narrow = make_trial(site=site, dtype=Dtype.BF16)
    assert golden(*data(narrow)).addends_sq is None


@pytest.mark.parametrize("site", [Site.DENSE_DELTA, Site.LORA_LINEAR])
@pytest.mark.parametrize("layout", Layout)
def test_golden_is_the_definition_element_by_element(
    site: Site, layout: Layout, make_trial: Callable[..., Trial]
) -> None:
    trial = make_trial(
        site=site, layout=layout, tokens=9, in_features=20, slices=(6, 3), rank=4, slots=3
    )
    pool, batch, base = data(trial)
    wanted = torch.tensor(element_by_element(pool, batch, base), dtype=torch.float64)
    torch.testing.assert_close(golden(pool, batch, base).out, wanted, rtol=1e-13, atol=1e-13)


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("site", [Site.DENSE_DELTA, Site.MOE_DELTA])
def test_golden_takes_no_more_operations_for_more_slots(
    make_trial: Callable[..., Trial], site: Site
) -> None:
    # each is a launch on a GPU, which the trials of many workers share. The ranks are all the same:
    # a view of all of them is another operation than one of some
    counts = []
    for slots in (2, 40):
        axes = {"slots": slots, "tokens": 80, "mix": Mix.SHUFFLED, "ranks": Ranks.FULL}
        trial = make_trial(site=site, **axes)
        case, seed = trial.case, trial.seed
        pool = make_pool(case, seed, DataKind.SIGNED, trial.machine, trial.capabilities)
        batch = make_batch(case, seed, 0, DataKind.SIGNED, trial.machine)
        with _Counted() as counted:
            golden(pool, batch)
        counts.append(counted.operations)
    assert counts[0] == counts[1] > 0


def test_golden_keeps_base_and_delta_apart(make_trial: Callable[..., Trial]) -> None:
    pool, batch, _ = data(make_trial(mix=Mix.RAGGED))
    right = golden(pool, batch)
    base_rows = batch.token_slots < 0
    assert torch.equal(right.base, batch.out.double())
    assert not right.delta[base_rows].any()
    assert right.delta[~base_rows].any(1).all()


def test_eager_rounds_the_delta_and_then_the_sum(make_trial: Callable[..., Trial]) -> None:
    trial = make_trial()
    pool, batch, _ = data(trial)
    right = golden(pool, batch)
    wanted = right.base.bfloat16() + right.delta.float().bfloat16()
    same = (eager(trial.case, pool, batch) == wanted).double().mean()
    # a few fp32 sums are so close to a tie of bf16 that they round to the other side
    assert same > 0.995


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_eager_adds_up_the_rounded_parts_of_a_row_parallel_layer(
    tp: int, make_trial: Callable[..., Trial]
) -> None:
    trial = make_trial(site=Site.LORA_LINEAR, parallel=Parallel.ROW, tp=tp)
    pool, batch, base = data(trial)
    error = eager(trial.case, pool, batch, base).double() - golden(pool, batch, base).out
    right = golden(pool, batch, base).out
    bound = 3 * tp * half_ulp(right.abs() + 2, torch.bfloat16)
    assert (error.abs() <= bound).all()
    assert error.any()


def test_folding_multiplies_the_scale_into_b_and_rounds_once(
    make_trial: Callable[..., Trial],
) -> None:
    pool, batch, _ = data(make_trial())
    low = folded(pool)
    assert {scale for row in low.scales for scale in row} == {1.0}
    b, scale = pool.b[1][2], pool.scales[2][1]
    assert torch.equal(low.b[1][2], (b.float() * scale).bfloat16())
    gap = golden(low, batch).delta - golden(pool, batch).delta
    assert 0 < gap.abs().max() < 0.02 * golden(pool, batch).delta.abs().max()


def test_chunks_tile_the_rows_of_a_batch(
    make_trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, batch, _ = data(make_trial())
    monkeypatch.setattr("loragate.oracles.numeric.golden._CHUNK", 7 * batch.x.shape[1])
    pieces = list(chunks(batch))
    assert [len(piece.x) for _, piece in pieces] == [7, 7, 7, 3]
    together = torch.cat([golden(pool, piece).out for _, piece in pieces])
    torch.testing.assert_close(together, golden(pool, batch).out, rtol=1e-14, atol=1e-14)


def test_an_empty_batch_is_one_empty_chunk(make_trial: Callable[..., Trial]) -> None:
    _, batch, _ = data(make_trial())
    empty = Batch(batch.x[:0], batch.token_slots[:0], batch.out[:0])
    assert [len(piece.x) for _, piece in chunks(empty)] == [0]


def test_squared_terms_count_each_element_of_the_first_product_as_at_least_the_smallest(
    make_trial: Callable[..., Trial],
) -> None:
    pool, batch, _ = data(make_trial(ranks=Ranks.FULL, slots=1, mix=Mix.SINGLE, tokens=3))
    rows, smallest = out_rows(batch), 2.0**-10
    x = torch.zeros_like(batch.x)
    squares = deltas(pool, x, rows, torch.float64, squares=True, smallest=smallest)
    b = torch.cat([part[0].double() * s for part, s in zip(pool.b, pool.scales[0], strict=True)])
    wanted = (b.square().sum(1) * smallest**2).expand(3, -1)
    torch.testing.assert_close(squares, wanted)


def test_the_condition_number_grows_as_terms_cancel() -> None:
    def condition(last: float) -> float:
        one = torch.ones(1, 1, 1, 2)
        pool = Pool(one, (torch.ones(1, 1, 1),), ((1,),), ((2.0,),))
        x = torch.tensor([[1.0, last]])
        slots = torch.zeros(1, dtype=torch.int32)
        return condition_number(pool, Batch(x, slots, torch.zeros(1, 1)), torch.tensor([0]), 0)

    assert condition(1.0) == 1
    assert condition(-0.5) == 3
    assert condition(-1.0) == math.inf


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_a_step_is_half_the_distance_to_the_next_number(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, 1.25, 1.99, 2.0, 3.5, 0.3, 100.0, 1e-3, 6e-8, -1.5]).to(dtype)
    bits: Tensor = values.view(torch.int32 if dtype == torch.float32 else torch.int16)
    step = (bits + 1).view(values.dtype).double() - values.double()
    assert torch.equal(half_ulp(values.double(), dtype), step.abs() / 2)
    assert half_ulp(torch.zeros(1, dtype=torch.float64), dtype).item() == 0
