"""SlotWeights: resetting, all or nothing, and errors that name the field."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from lorakernels.dense.weights import LoRAFactors, SlotWeights


def fresh() -> SlotWeights:
    return SlotWeights(
        num_slots=2, slice_widths=(6, 4), in_features=5, rank=3, dtype=torch.float32, device="cpu"
    )


def factors(rank: int, width: int, value: float = 1.0, scale: float = 0.5) -> LoRAFactors:
    return LoRAFactors(torch.full((rank, 5), value), torch.full((width, rank), value), scale)


def state(weights: SlotWeights) -> list[torch.Tensor]:
    return [t.clone() for t in (weights.a, weights.b, weights.ranks, weights.scales)]


def test_nothing_of_a_larger_predecessor_stays_in_a_slot() -> None:
    weights, reference = fresh(), fresh()
    weights.load(1, [factors(3, 6, 9.0), factors(3, 4, 9.0)])
    small = [factors(1, 6), None]
    weights.load(1, small)
    reference.load(1, small)
    assert all(torch.equal(*pair) for pair in zip(state(weights), state(reference), strict=True))


def test_loading_a_slot_leaves_the_others_alone() -> None:
    weights = fresh()
    weights.load(0, [factors(2, 6), factors(2, 4)])
    before = [t[0].clone() for t in state(weights)]
    weights.load(1, [factors(3, 6, 2.0), factors(3, 4, 2.0)])
    weights.reset(1)
    assert all(torch.equal(t[0], old) for t, old in zip(state(weights), before, strict=True))


def test_the_scale_is_kept_separate_and_not_folded_into_b() -> None:
    weights = fresh()
    weights.load(0, [factors(2, 6, scale=0.25), factors(1, 4, scale=4.0)])
    assert weights.scales[0].tolist() == [0.25, 4.0]
    assert weights.ranks[0].tolist() == [2, 1]
    assert weights.b[0, :, 0].tolist() == [1.0] * 10


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
        (0, [factors(2, 6), factors(2, 5)], r"b of slice 1 must be \[4, 2\] \(got \[5, 2\]\)"),
        (
            0,
            [LoRAFactors(torch.zeros(2, 7), torch.zeros(6, 2), 1.0), None],
            r"a of slice 0 must be \[rank, 5\] \(got \[2, 7\]\)",
        ),
        (0, [factors(2, 6, scale=float("nan")), None], "scale of slice 0 must be finite"),
        (0, [factors(2, 6, scale=1e39), None], "scale of slice 0 must be finite in float32"),
        (0, [factors(2, 6, scale=10**400), None], "scale of slice 0 must be finite in float32"),
        (0, [factors(2, 6, scale=1e-50), None], "scale of slice 0 must not vanish in float32"),
        (0, [factors(2, 6, scale=-1e-50), None], "scale of slice 0 must not vanish in float32"),
        (0, [factors(2, 6, scale=-1e39), None], "scale of slice 0 must be finite in float32"),
        (
            0,
            [LoRAFactors(torch.zeros(2, 5, dtype=torch.int8), torch.zeros(6, 2), 1.0), None],
            "must be floating point",
        ),
        (
            0,
            [LoRAFactors(torch.zeros(2, 5), torch.zeros(6, 2, dtype=torch.int8), 1.0), None],
            "must be floating point",
        ),
        (0, [LoRAFactors(torch.zeros(5), torch.zeros(6, 5), 1.0), None], r"a of slice 0 must be"),
        (0, [LoRAFactors(torch.zeros(2, 5, 1), torch.zeros(6, 2), 1.0), None], "a of slice 0 must"),
        (0, [LoRAFactors(torch.zeros(2, 5), torch.zeros(6, 2, 1), 1.0), None], "b of slice 0 must"),
        (0, [LoRAFactors(torch.zeros(2, 5), torch.zeros(6), 1.0), None], "b of slice 0 must be"),
        *(
            (
                0,
                [LoRAFactors(torch.zeros(2, 5), torch.zeros(6, rank), 1.0), None],
                rf"b of slice 0 must be \[6, 2\] \(got \[6, {rank}\]\)",
            )
            # one that would be broadcast, one that would not, and one that fits into the buffers
            for rank in (1, 5, 3)
        ),
        (0, [LoRAFactors(torch.zeros(0, 5), torch.zeros(6, 0), 1.0), None], "rank of slice 0 must"),
        (0, [None, None, None], r"one entry for each of the 2 slices \(got 3\)"),
    ],
)
def test_a_wrong_adapter_is_refused_and_the_old_one_stays(
    slot: int, parts: list[LoRAFactors | None], message: str
) -> None:
    weights = fresh()
    weights.load(0, [factors(3, 6, 7.0), factors(1, 4, 7.0)])
    before = state(weights)
    with pytest.raises(ValueError, match=message):
        weights.load(slot, parts)
    assert all(torch.equal(*pair) for pair in zip(state(weights), before, strict=True))


@pytest.mark.parametrize("slot", [-1, 2])
def test_a_slot_that_does_not_exist_cannot_be_emptied(slot: int) -> None:
    weights = fresh()
    for own in (0, 1):
        weights.load(own, [factors(3, 6), factors(1, 4)])
    before = state(weights)
    with pytest.raises(ValueError, match=rf"slot must be 0 to 1 \(got {slot}\)"):
        weights.reset(slot)
    assert all(torch.equal(*pair) for pair in zip(state(weights), before, strict=True))


@pytest.mark.parametrize("scale", [0.0, -0.0, -2.0, 2.0**-149, torch.finfo(torch.float32).max])
def test_every_scale_that_float32_holds_is_kept(scale: float) -> None:
    weights = fresh()
    weights.load(0, [factors(1, 6, scale=scale), None])
    assert weights.scales[0].tolist() == [scale, 0.0]


# numbers of Python and of numpy that torch takes, and one that it does not take
@pytest.mark.parametrize("scale", [Fraction(1, 2), np.float32(0.5), np.float64(0.5)])
def test_a_scale_may_be_any_real_number(scale: float) -> None:
    weights = fresh()
    weights.load(0, [factors(1, 6, scale=scale), None])
    assert weights.scales[0].tolist() == [0.5, 0.0]


def test_the_smallest_and_the_largest_geometry_can_be_built() -> None:
    for size in (1, 512):
        weights = SlotWeights(
            num_slots=1,
            slice_widths=(1,),
            in_features=1,
            rank=size,
            dtype=torch.float16,
            device="cpu",
        )
        weights.load(0, [LoRAFactors(torch.ones(size, 1), torch.ones(1, size), 1.0)])
        assert weights.ranks.tolist() == [[size]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_slots", 0),
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
        "slice_widths": (4,),
        "in_features": 8,
        "rank": 4,
        "dtype": torch.float16,
        "device": "cpu",
    }
    with pytest.raises(ValueError, match=field):
        SlotWeights(**(geometry | {field: value}))  # type: ignore[arg-type]
