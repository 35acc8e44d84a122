"""ExpertWeights: sharing, resetting, all or nothing, and errors that name the field."""

from __future__ import annotations

import re

import pytest
import torch

from lorakernels.moe.weights import ExpertFactors, ExpertWeights

EXPERTS = 3
SIDES = [(False, False), (True, False), (False, True), (True, True)]


def fresh(*, shared_a: bool = False, shared_b: bool = False) -> ExpertWeights:
    return ExpertWeights(
        num_slots=2,
        num_experts=EXPERTS,
        slice_widths=(6, 4),
        in_features=5,
        rank=3,
        dtype=torch.float32,
        device="cpu",
        shared_a=shared_a,
        shared_b=shared_b,
    )


def factors(
    rank: int, width: int, *, scale: float = 0.5, a: int = EXPERTS, b: int = EXPERTS
) -> ExpertFactors:
    draw = torch.Generator().manual_seed(rank * 100 + width)
    return ExpertFactors(
        torch.randn(a, rank, 5, generator=draw), torch.randn(b, width, rank, generator=draw), scale
    )


def state(weights: ExpertWeights) -> list[torch.Tensor]:
    return [t.clone() for t in (weights.a, weights.b, weights.ranks, weights.scales)]


@pytest.mark.parametrize(("shared_a", "shared_b"), SIDES)
def test_each_side_is_stored_once_or_once_per_expert(shared_a: bool, shared_b: bool) -> None:
    weights = fresh(shared_a=shared_a, shared_b=shared_b)
    gate = factors(2, 6, a=1 if shared_a else EXPERTS, b=1 if shared_b else EXPERTS)
    up = factors(3, 4, a=1 if shared_a else EXPERTS, b=1 if shared_b else EXPERTS)
    weights.load(1, [gate, up])
    assert weights.a.shape == (2, 1 if shared_a else EXPERTS, 2, 3, 5)
    assert weights.b.shape == (2, 1 if shared_b else EXPERTS, 10, 3)
    assert (weights.shared_a, weights.shared_b) == (shared_a, shared_b)
    assert torch.equal(weights.a[1, :, 0, :2], gate.a)
    assert torch.equal(weights.a[1, :, 1], up.a)
    assert torch.equal(weights.b[1, :, :6, :2], gate.b)
    assert torch.equal(weights.b[1, :, 6:], up.b)


@pytest.mark.parametrize(("shared_a", "shared_b"), SIDES)
def test_a_shared_factor_reaches_every_expert_of_buffers_that_are_not_shared(
    shared_a: bool, shared_b: bool
) -> None:
    weights = fresh(shared_a=shared_a, shared_b=shared_b)
    gate = factors(2, 6, a=1, b=1)
    weights.load(0, [gate, None])
    for expert in range(EXPERTS):
        assert torch.equal(weights.a.expand(-1, EXPERTS, -1, -1, -1)[0, expert, 0, :2], gate.a[0])
        assert torch.equal(weights.b.expand(-1, EXPERTS, -1, -1)[0, expert, :6, :2], gate.b[0])


@pytest.mark.parametrize(("shared_a", "shared_b"), SIDES)
def test_nothing_of_a_larger_predecessor_stays_in_a_slot(shared_a: bool, shared_b: bool) -> None:
    weights = fresh(shared_a=shared_a, shared_b=shared_b)
    reference = fresh(shared_a=shared_a, shared_b=shared_b)
    weights.load(1, [factors(3, 6, a=1, b=1), factors(3, 4, a=1, b=1)])
    small = [factors(1, 6, a=1, b=1), None]
    weights.load(1, small)
    reference.load(1, small)
    assert all(torch.equal(*pair) for pair in zip(state(weights), state(reference), strict=True))


def test_loading_a_slot_leaves_the_others_alone() -> None:
    weights = fresh()
    weights.load(0, [factors(2, 6), factors(2, 4)])
    before = [t[0].clone() for t in state(weights)]
    weights.load(1, [factors(3, 6), factors(3, 4)])
    weights.reset(1)
    assert all(torch.equal(t[0], old) for t, old in zip(state(weights), before, strict=True))


def test_the_scale_is_kept_separate_and_the_factors_are_unchanged() -> None:
    weights = fresh()
    gate, up = factors(2, 6, scale=0.25), factors(1, 4, scale=4.0)
    before = [t.clone() for t in (gate.a, gate.b, up.a, up.b)]
    for slot in (0, 1, 0):
        weights.load(slot, [gate, up])
    assert weights.scales.tolist() == [[0.25, 4.0]] * 2
    assert weights.ranks.tolist() == [[2, 1]] * 2
    assert torch.equal(weights.b[0, :, :6, :2], before[1])
    after = (gate.a, gate.b, up.a, up.b)
    assert all(torch.equal(*pair) for pair in zip(after, before, strict=True))


def test_the_buffers_keep_their_addresses_when_adapters_come_and_go() -> None:
    weights = fresh()
    before = [t.data_ptr() for t in (weights.a, weights.b, weights.ranks, weights.scales)]
    weights.load(0, [factors(2, 6), factors(1, 4)])
    weights.reset(0)
    after = [t.data_ptr() for t in (weights.a, weights.b, weights.ranks, weights.scales)]
    assert before == after


@pytest.mark.parametrize(
    ("slot", "parts", "message"),
    [
        (2, [None, None], r"slot must be 0 to 1 \(got 2\)"),
        (-1, [None, None], r"slot must be 0 to 1 \(got -1\)"),
        (0, [None], r"one entry for each of the 2 slices \(got 1\)"),
        (0, [None, factors(4, 4)], r"rank of slice 1 must be 1 to 3 \(got 4\)"),
        (
            0,
            [None, factors(2, 4, b=2)],
            r"b of slice 1 must be \[1, 4, 2\] or \[3, 4, 2\] \(got \[2, 4, 2\]\)",
        ),
        (
            0,
            [factors(2, 5), None],
            r"b of slice 0 must be \[1, 6, 2\] or \[3, 6, 2\] \(got \[3, 5, 2\]\)",
        ),
        (
            0,
            [ExpertFactors(torch.zeros(2, 5), torch.zeros(3, 6, 2), 1.0), None],
            r"a of slice 0 must be \[1, rank, 5\] or \[3, rank, 5\] \(got \[2, 5\]\)",
        ),
        (0, [factors(2, 6, scale=float("nan")), None], "scale of slice 0 must be finite"),
        (
            0,
            [ExpertFactors(torch.zeros(3, 2, 5).char(), torch.zeros(3, 6, 2), 1.0), None],
            "must be floating point",
        ),
        (
            0,
            [ExpertFactors(torch.zeros(3, 2, 5), torch.zeros(3, 6, 2).char(), 1.0), None],
            "must be floating point",
        ),
        (
            0,
            [ExpertFactors(torch.zeros(3, 2, 5, 1), torch.zeros(3, 6, 2), 1.0), None],
            "a of slice 0 must be",
        ),
        (
            0,
            [ExpertFactors(torch.zeros(3, 2, 4), torch.zeros(3, 6, 2), 1.0), None],
            "a of slice 0 must be",
        ),
        *(
            (
                0,
                [ExpertFactors(torch.zeros(shape), torch.zeros(1, 6, 2), 1.0), None],
                rf"a of slice 0 must be .* \(got {re.escape(str(list(shape)))}\)",
            )
            for shape in ((), (5,), (1, 2, 5, 1))
        ),
        (0, [factors(2, 6, a=2), None], "a of slice 0 must be"),
        (
            0,
            [ExpertFactors(torch.zeros(3, 2, 5), torch.zeros(6, 2), 1.0), None],
            "b of slice 0 must be",
        ),
        (
            0,
            [ExpertFactors(torch.zeros(3, 0, 5), torch.zeros(3, 6, 0), 1.0), None],
            "rank of slice",
        ),
    ],
)
def test_a_wrong_adapter_is_refused_and_the_old_one_stays(
    slot: int, parts: list[ExpertFactors | None], message: str
) -> None:
    weights = fresh()
    weights.load(0, [factors(3, 6), factors(1, 4)])
    before = state(weights)
    with pytest.raises(ValueError, match=message):
        weights.load(slot, parts)
    assert all(torch.equal(*pair) for pair in zip(state(weights), before, strict=True))


@pytest.mark.parametrize(
    ("side", "message"),
    [
        ("shared_a", r"a of slice 0 must be \[1, rank, 5\] \(got \[3, 2, 5\]\)"),
        ("shared_b", r"b of slice 0 must be \[1, 6, 2\] \(got \[3, 6, 2\]\)"),
    ],
)
def test_buffers_that_share_a_side_refuse_one_factor_per_expert(side: str, message: str) -> None:
    weights = fresh(**{side: True})
    with pytest.raises(ValueError, match=message):
        weights.load(0, [factors(2, 6), None])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_slots", 0),
        ("num_experts", 0),
        ("slice_widths", ()),
        ("slice_widths", (4, 0)),
        ("in_features", 0),
        ("rank", 0),
        ("rank", 513),
        ("dtype", torch.float64),
    ],
)
def test_a_wrong_geometry_is_refused_by_field(field: str, value: object) -> None:
    geometry = {
        "num_slots": 2,
        "num_experts": 2,
        "slice_widths": (4,),
        "in_features": 8,
        "rank": 4,
        "dtype": torch.float16,
        "device": "cpu",
    }
    with pytest.raises(ValueError, match=field):
        ExpertWeights(**(geometry | {field: value}))  # type: ignore[arg-type]
