"""The golden result of an MoE layer is the definition, and its data have their properties."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import Machine
from loragate.inputs import DataKind, make_batch, make_pool, torch_dtype
from loragate.inputs.base_experts import make_base_experts, quantised, reordered_base
from loragate.inputs.pairs import out_rows, pair_rows
from loragate.inputs.pool_changes import reordered, trimmed, with_huge_unused
from loragate.matrix.case import (
    Activation,
    Bias,
    Case,
    Dtype,
    GateUp,
    Layout,
    Quantisation,
    Ranks,
    RouterWeights,
    Sharing,
    Site,
)
from loragate.oracles.numeric.activations import activated, slopes
from loragate.oracles.numeric.errors import MANTISSA, row_errors
from loragate.oracles.numeric.golden import chunks, folded
from loragate.oracles.numeric.golden_layer import eager_of, golden_of
from loragate.protocol import BaseExperts, Batch, Pool
from loragate.subjects.torch.subject import TorchSubject

CPU = Machine("cpu", "test", None, 1, 0)
CASE = Case(
    site=Site.MOE_LAYER,
    tokens=8,
    in_features=12,
    slices=(7, 7),
    rank=4,
    slots=3,
    dtype=Dtype.BF16,
    experts=4,
    top_k=2,
    ep=2,
    router=RouterWeights.OUTPUT,
)


def data(case: Case, kind: DataKind = DataKind.SIGNED, seed: int = 7) -> tuple[Pool, Batch]:
    have = TorchSubject().capabilities(CPU)
    assert not isinstance(have, str)
    return make_pool(case, seed, kind, CPU, have), make_batch(case, seed, 0, kind, CPU)


def base_of(case: Case, kind: DataKind = DataKind.SIGNED, seed: int = 7) -> BaseExperts:
    return make_base_experts(case, seed, kind, CPU)


def silu(value: float) -> float:
    return value / (1 + math.exp(-value))


def gelu_tanh(value: float) -> float:
    return 0.5 * value * (1 + math.tanh(math.sqrt(2 / math.pi) * (value + 0.044715 * value**3)))


def swiglu_oai(gate: float, up: float) -> float:
    gate, up = min(gate, 7.0), max(min(up, 7.0), -7.0)
    return (up + 1) * gate / (1 + math.exp(-1.702 * gate))


GATED = {
    "silu": lambda gate, up: silu(gate) * up,
    "gelu_tanh": lambda gate, up: gelu_tanh(gate) * up,
    "swiglu_oai": swiglu_oai,
}


def times(rows: Tensor, values: list[float]) -> list[float]:
    return [
        math.fsum(w * v for w, v in zip(row, values, strict=True)) for row in rows.double().tolist()
    ]


def product(weight: Tensor, seen: list[float], plain: list[float], adapter: Adapter) -> list[float]:
    """One projection of one expert: the base sees `seen`, the adapter `plain`."""
    if adapter is None:
        return times(weight, seen)
    a, b, scale = adapter
    delta = times(b, times(a, plain))
    return [y + scale * d for y, d in zip(times(weight, seen), delta, strict=True)]


Adapter = tuple[Tensor, Tensor, float] | None


def adapter_of(pool: Pool, slot: int, expert: int, part: int) -> Adapter:
    rank = pool.ranks[slot][part] if slot >= 0 else 0
    if not rank:
        return None
    a = pool.a[slot, min(expert, pool.a.shape[1] - 1), part, :rank]
    b = pool.b[part][slot, min(expert, pool.b[part].shape[1] - 1), :, :rank]
    return a, b, pool.scales[slot][part]


def as_the_base_sees_it(case: Case, values: list[float]) -> list[float]:
    if case.quantisation is Quantisation.NONE:
        return values
    # what was rounded to the dtype before
    low, scales = quantised(torch.tensor([values], dtype=torch.float64).to(torch_dtype(case.dtype)))
    return [float(v) * float(scales[0]) for v in low[0].float()]


def token_by_token(case: Case, pool: Pool, batch: Batch, base: BaseExperts) -> list[list[float]]:
    """The definition, one number after the other, in Python's own fp64."""
    assert batch.routes is not None
    assert batch.routes.weights is not None
    assert pool.down is not None
    w13, w2 = base.weight.float(), base.down.float()
    if base.scales is not None:
        w13, w2 = w13 * base.scales[0][..., None], w2 * base.scales[1][..., None]
    zeros = torch.zeros(case.experts, 1)
    b13 = (zeros.expand(w13.shape[:2]) if base.bias is None else base.bias).double()
    b2 = (zeros.expand(w2.shape[:2]) if base.down_bias is None else base.down_bias).double()
    starts = (0, 1) if case.gate_up == "interleaved" else (0, case.slices[0])
    step = 2 if case.gate_up == "interleaved" else 1
    out = [[0.0] * case.in_features for _ in range(case.tokens)]
    for token, values in enumerate(batch.x.double().tolist()):
        slot, seen = int(batch.token_slots[token]), as_the_base_sees_it(case, values)
        for choice in range(case.top_k):
            expert = int(batch.routes.topk_ids[token, choice])
            if expert < 0:
                continue
            weight = float(batch.routes.weights[token, choice])
            inner = []
            for part, start in enumerate(starts[: len(case.slices)]):
                rows = slice(start, start + step * case.slices[0], step)
                w, b = w13[expert][rows], b13[expert][rows].tolist()
                y = product(w, seen, values, adapter_of(pool, slot, expert, part))
                y = [v + add for v, add in zip(y, b, strict=True)]
                inner.append([v * weight if case.router == "input" else v for v in y])
            if len(inner) == 2:
                act = [GATED[case.activation](*pair) for pair in zip(*inner, strict=True)]
            else:
                act = [silu(v) for v in inner[0]]
            down = adapter_of(pool.down, slot, expert, 0)
            y = product(w2[expert], as_the_base_sees_it(case, act), act, down)
            y = [v + add for v, add in zip(y, b2[expert].tolist(), strict=True)]
            for column, value in enumerate(y):
                out[token][column] += value * (weight if case.router == "output" else 1)
    return out


@pytest.mark.parametrize("quantisation", Quantisation)
@pytest.mark.parametrize("slices", [(7,), (7, 7)])
@pytest.mark.parametrize("sharing", [Sharing.PER_EXPERT, Sharing.SHARED_OUTER])
@pytest.mark.parametrize("router", [RouterWeights.OUTPUT, RouterWeights.INPUT])
def test_golden_is_the_definition_token_by_token(
    router: RouterWeights, sharing: Sharing, slices: tuple[int, ...], quantisation: Quantisation
) -> None:
    case = replace(CASE, router=router, sharing=sharing, slices=slices, quantisation=quantisation)
    tp = 1 if quantisation is Quantisation.FP8 else 3
    assert_golden(replace(case, tp=tp, layout=Layout.TRANSPOSED))


GATES = [
    {"activation": Activation.SWIGLU_OAI},
    {"activation": Activation.GELU_TANH, "gate_up": GateUp.INTERLEAVED},
    {"expert_bias": Bias.PRESENT, "tp": 3},
    {"expert_bias": Bias.PRESENT, "slices": (7,), "ep": 4},
    {
        "activation": Activation.SWIGLU_OAI,
        "gate_up": GateUp.INTERLEAVED,
        "expert_bias": Bias.PRESENT,
        "tp": 2,
    },
]


@pytest.mark.parametrize("axes", GATES, ids=lambda axes: "-".join(map(str, axes.values())))
def test_golden_of_other_gates_and_of_biases_is_the_definition(axes: dict[str, Any]) -> None:
    # an act of up to 56 in place of one of about 4
    assert_golden(replace(CASE, **axes), most=2.0)


def assert_golden(case: Case, *, most: float = 0.2) -> None:
    """`most`: how far a plain computation may be off."""
    quantisation = case.quantisation
    pool, batch = data(case)
    base = base_of(case)
    wanted = torch.tensor(token_by_token(case, pool, batch, base), dtype=torch.float64)
    right = golden_of(case, pool, batch, base)
    # weights that are not quantised are exact, others are products in fp32
    tolerance = 1e-13 if quantisation is Quantisation.NONE else 1e-6
    torch.testing.assert_close(right.out, wanted, rtol=tolerance, atol=tolerance)
    none = trimmed(pool, 0)
    alone = torch.tensor(token_by_token(case, none, batch, base), dtype=torch.float64)
    torch.testing.assert_close(right.base, alone, rtol=tolerance, atol=tolerance)
    assert not right.delta[batch.token_slots < 0].count_nonzero()
    error = (eager_of(case, pool, batch, base).double() - wanted).abs()
    assert 0 < error.max() < most


@pytest.mark.parametrize("activation", Activation)
def test_the_slopes_of_an_activation_are_its_derivatives(activation: Activation) -> None:
    gate, up = (torch.linspace(*ends, 97).double() for ends in ((-9, 9), (8.5, -8.5)))
    # a value close to a limit may be on the other side of it before it is rounded
    clear = torch.stack([gate - 7, up - 7, up + 7]).abs().amin(0) > 0.2
    step = 1e-6
    by_gate, by_up = slopes(activation, gate, up)
    assert by_gate is not None
    for slope, d_gate, d_up in ((by_gate, step, 0.0), (by_up, 0.0, step)):
        ends = [activated(activation, gate + s * d_gate, up + s * d_up) for s in (-1, 1)]
        wanted = (ends[1] - ends[0]) / (2 * step)
        torch.testing.assert_close(slope[clear], wanted[clear], rtol=1e-6, atol=1e-6)


def test_the_noise_of_a_layer_is_that_of_its_roundings() -> None:
    # a wide layer in which no single rounding stands out, rounded where golden says it may be
    case = replace(CASE, tokens=64, in_features=64, slices=(96, 96), rank=8, top_k=4, ep=1)
    pool, batch = data(case)
    base = base_of(case)
    right = golden_of(case, pool, batch, base)
    unit = (torch.finfo(torch.bfloat16).eps / 2) ** 2 / 3
    error = eager_of(case, pool, batch, base).double() - right.out
    ratio = error.square().mean() / (right.terms_sq.mean() * unit)
    # eager does not round the shrink outputs, rounds the output, and no rounding is the worst one
    assert 0.1 < ratio < 1


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("axes", "least"),
    [
        ({"tp": 48, "experts": 3, "top_k": 1}, 0.7),
        # a rank that a token chose no expert of adds nothing that is rounded
        ({"ep": 16, "experts": 32, "top_k": 16}, 0.5),
        ({"ep": 4, "tp": 12, "experts": 8, "top_k": 4}, 0.5),
    ],
    ids=["columns", "experts", "both"],
)
def test_the_last_of_many_ranks_are_added_to_a_sum_of_full_size(
    axes: dict[str, Any], least: float, seed: int
) -> None:
    sizes: dict[str, Any] = {"tokens": 200, "in_features": 256, "slices": (384, 384), "slots": 1}
    case = replace(CASE, **sizes, rank=8, **{"ep": 1} | axes)
    pool, batch = data(case, seed=seed)
    base = base_of(case, seed=seed)
    plain = eager_of(case, pool, batch, base)
    errors = row_errors(case, golden_of(case, pool, batch, base), plain, plain)
    # a model in which each partial sum is as large as the part of a rank allows a third of it
    allowed = (errors.noise_sq + MANTISSA * errors.shrunk_sq).sum()
    assert least < errors.subject_sq.sum() / allowed < 1.1


def test_an_expert_that_a_token_chose_twice_makes_the_same_errors_twice() -> None:
    case = replace(CASE, ep=1)
    pool, batch = data(case)
    base = base_of(case)
    assert batch.routes is not None
    ids = batch.routes.topk_ids[:, :1].repeat(1, 2)
    halves = torch.full(ids.shape, 0.5)
    twice = replace(batch, routes=replace(batch.routes, topk_ids=ids, weights=halves))
    ones = torch.ones(len(ids), 1)
    once = replace(batch, routes=replace(batch.routes, topk_ids=ids[:, :1], weights=ones))
    noise = [golden_of(case, pool, each, base).terms_sq for each in (twice, once)]
    torch.testing.assert_close(noise[0], noise[1])


@pytest.mark.parametrize("quantisation", Quantisation)
@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.FP16])
def test_a_single_expert_makes_the_errors_of_each_of_several_that_are_like_it(
    dtype: Dtype, quantisation: Quantisation
) -> None:
    single = replace(CASE, experts=1, top_k=1, ep=1, dtype=dtype, quantisation=quantisation)
    several = replace(single, experts=4)
    pool, batch = data(single)
    base = base_of(single)
    assert batch.routes is not None
    ids = (torch.arange(single.tokens) % 4)[:, None].to(batch.routes.topk_ids)
    alone = replace(batch, routes=replace(batch.routes, topk_ids=torch.zeros_like(ids)))
    spread = replace(batch, routes=replace(batch.routes, topk_ids=ids))
    one = golden_of(single, pool, alone, base)
    other = golden_of(several, pool, spread, reordered_base(base, [0, 0, 0, 0]))
    torch.testing.assert_close(one.terms_sq, other.terms_sq)
    torch.testing.assert_close(one.jump_sq, other.jump_sq)


def test_a_folded_scale_is_folded_into_down_as_well() -> None:
    pool, _ = data(CASE)
    low = folded(pool)
    assert low.down is not None
    assert pool.down is not None
    scale = pool.down.scales[1][0]
    assert torch.equal(low.down.b[0][1], (pool.down.b[0][1].float() * scale).bfloat16())


def test_chunks_tile_the_tokens_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, batch = data(CASE)
    base = base_of(CASE)
    whole = golden_of(CASE, pool, batch, base).out
    monkeypatch.setattr("loragate.oracles.numeric.golden._CHUNK", 3 * 2 * 14)
    pieces = list(chunks(batch, sum(CASE.slices)))
    assert [(rows.start, rows.stop) for rows, _ in pieces] == [(0, 3), (3, 6), (6, 8)]
    together = torch.cat([golden_of(CASE, pool, piece, base).out for _, piece in pieces])
    torch.testing.assert_close(together, whole, rtol=1e-13, atol=1e-13)


def test_rows_of_a_layer_are_tokens_and_its_pairs_refer_to_them() -> None:
    _, batch = data(CASE)
    assert batch.routes is not None
    rows, pairs = out_rows(batch), pair_rows(batch)
    assert torch.equal(rows.slots, batch.token_slots)
    assert pairs.x_rows.tolist() == [pair // 2 for pair in range(16)]
    nowhere = batch.routes.topk_ids.flatten() < 0
    assert nowhere.any()
    assert (pairs.slots[nowhere] == -1).all()


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("router", [RouterWeights.OUTPUT, RouterWeights.INPUT])
@pytest.mark.parametrize("top_k", [1, 2, 4, 5, 9, 12])
def test_exact_data_of_moe_layers_leaves_nothing_to_round(
    top_k: int, router: RouterWeights, dtype: Dtype
) -> None:
    kind = DataKind.EXACT
    for slices in ((9,), (9, 9)):
        case = replace(
            CASE, tokens=40, top_k=top_k, experts=12, dtype=dtype, slices=slices, router=router
        )
        case = replace(case, tp=2, ep=3, ranks=Ranks.FULL)
        for seed in range(3):
            pool, batch = data(case, kind, seed)
            base = base_of(case, kind, seed)
            right = golden_of(case, pool, batch, base)
            plain = eager_of(case, pool, batch, base)
            assert torch.equal(plain.double() + 0.0, right.out.round() + 0.0)
            assert (right.out - right.out.round()).abs().max() < 1e-30
            assert right.out.abs().max() <= 243
            # most adapters show in every token that has one
            assert (
                right.delta.count_nonzero()
                > 0.5 * right.delta.numel() * (batch.token_slots >= 0).double().mean()
            )


@pytest.mark.parametrize("top_k", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU_TANH])
def test_exact_data_with_biases_leaves_nothing_to_round(activation: Activation, top_k: int) -> None:
    kind = DataKind.EXACT
    for slices in ((9, 9), (9,)) if activation is Activation.SILU else ((9, 9),):
        case = replace(CASE, tokens=30, top_k=top_k, experts=12, slices=slices, tp=2, ep=3)
        case = replace(case, activation=activation, expert_bias=Bias.PRESENT, ranks=Ranks.FULL)
        for seed in range(3):
            pool, batch = data(case, kind, seed)
            base = base_of(case, kind, seed)
            assert base.bias is not None
            right = golden_of(case, pool, batch, base)
            plain = eager_of(case, pool, batch, base)
            assert torch.equal(plain.double() + 0.0, right.out.round() + 0.0)
            assert right.out.abs().max() <= 255
            without = replace(base, bias=None, down_bias=None)
            assert (golden_of(case, pool, batch, without).out != right.out).double().mean() > 0.5


@pytest.mark.parametrize("kind", DataKind)
def test_the_three_projections_have_numbers_ranks_and_scales_of_their_own(kind: DataKind) -> None:
    case = replace(CASE, slots=4)
    pool, _ = data(case, kind)
    assert pool.down is not None
    ranks = [(*up, *down) for up, down in zip(pool.ranks, pool.down.ranks, strict=True)]
    # the last adapter fills the buffers, and two adapters lack one of the three
    assert case.rank in ranks[-1]
    assert sorted(row.count(0) for row in ranks) == [0, 0, 1, 1]
    assert any(len(set(row)) == 3 for row in ranks)
    scales = [(*up, *down) for up, down in zip(pool.scales, pool.down.scales, strict=True)]
    assert all(row[0] != row[1] != row[2] != row[0] for row in scales)
    assert 1.0 not in {scale for row in scales for scale in row}
    shared, _ = data(replace(case, sharing=Sharing.SHARED_OUTER), kind)
    assert shared.down is not None
    assert (shared.a.shape[1], shared.down.b[0].shape[1]) == (1, 1)
    assert (shared.b[0].shape[1], shared.down.a.shape[1]) == (4, 4)


def test_whatever_is_done_to_a_pool_is_done_to_down() -> None:
    pool, _ = data(CASE)
    assert pool.down is not None

    def down_of(change: Callable[[Pool], Pool]) -> Pool:
        changed = change(pool).down
        assert changed is not None
        return changed

    assert torch.equal(down_of(lambda p: reordered(p, [2, 0, 1])).a[0], pool.down.a[2])
    assert max(down_of(lambda p: trimmed(p, 1)).ranks) == (1,)
    unused = torch.zeros(3, 4, dtype=torch.bool)
    huge = down_of(lambda p: with_huge_unused(p, unused))
    assert (huge.a[0, :, 0, 0] == torch.finfo(torch.bfloat16).max).all()


def test_a_quantised_base_keeps_three_bits_of_each_weight() -> None:
    case = replace(CASE, quantisation=Quantisation.FP8, dtype=Dtype.FP32)
    base, plain = base_of(case), base_of(replace(case, quantisation=Quantisation.NONE))
    assert base.scales is not None
    for low, scales, wanted in (
        (base.weight, base.scales[0], plain.weight),
        (base.down, base.scales[1], plain.down),
    ):
        assert low.dtype == torch.float8_e4m3fn
        error = (low.float() * scales[..., None] - wanted).abs()
        assert (error <= wanted.abs() / 16 + wanted.abs().amax(-1, keepdim=True) / 2**18).all()
    moved = reordered_base(base, [3, 1, 2, 0])
    assert moved.scales is not None
    assert torch.equal(moved.down[0].float(), base.down[3].float())
    assert torch.equal(moved.scales[0][0], base.scales[0][3])
