"""Pairs of several adapters in one tile of a MoE product, which multiplies their slots together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.layers.gate_up import GateUp
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.weights import ExpertFactors

HIDDEN, INTERMEDIATE, RANK, SLOTS = 16, 8, 4, 70
PROJECTIONS = {"gate_proj": (HIDDEN, INTERMEDIATE), "up_proj": (HIDDEN, INTERMEDIATE)}
PROJECTIONS |= {"down_proj": (INTERMEDIATE, HIDDEN)}
# the last ones that are looked for together, the first one behind them, and the next such border
TOKEN_SLOTS = (0, 30, 31, -1, 61, 62, 69, 7, 31, 0, 30)


def randn(*shape: int, seed: int) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(torch.bfloat16)


def adapters() -> dict[int, dict[str, ExpertFactors]]:
    """One of another scale for each slot of the batch."""
    return {
        slot: {
            f"experts.{name}": ExpertFactors(
                randn(1, RANK, inputs, seed=1000 * slot + place) / inputs**0.5,
                randn(1, outputs, RANK, seed=1000 * slot + place + 500) / RANK**0.5,
                0.5 + 0.25 * (slot % 7) + place,
            )
            for place, (name, (inputs, outputs)) in enumerate(PROJECTIONS.items())
        }
        for slot in set(TOKEN_SLOTS) - {-1}
    }


@dataclass(frozen=True, slots=True)
class Bad:
    """A value of B that no check of a loader has seen."""

    projection: str
    slot: int
    value: float

    def write(self, layer: FusedMoELoRA) -> None:
        weights = layer.w2_slots if self.projection == "down_proj" else layer.w13_slots
        row = INTERMEDIATE + 3 if self.projection == "up_proj" else 3
        weights.b[self.slot, 0, row, 1] = self.value


def run(token_slots: Sequence[int] = TOKEN_SLOTS, bad: Bad | None = None) -> Tensor:
    """The output of a layer of one expert, whose tile holds all tokens."""
    w13 = randn(1, 2 * INTERMEDIATE, HIDDEN, seed=1) / HIDDEN**0.5
    w2 = randn(1, HIDDEN, INTERMEDIATE, seed=2) / INTERMEDIATE**0.5
    layer = FusedMoELoRA(
        w13, w2, num_slots=SLOTS, rank=RANK, projections=(*PROJECTIONS,), gate_up=GateUp.HALVES
    )
    for slot, parts in adapters().items():
        layer.load_adapter(slot, parts)
    if bad is not None:
        bad.write(layer)
    tokens = len(token_slots)
    rows = BatchMetadata(max_tokens=tokens, max_slots=SLOTS, device="cpu")
    rows.prepare(torch.tensor(token_slots, dtype=torch.int32))
    pairs = PairMetadata(
        max_tokens=tokens, top_k=1, num_experts=1, max_slots=SLOTS, device="cpu", with_base=True
    )
    scratch = MoEScratch([layer], max_tokens=tokens, top_k=1)
    x = randn(tokens, HIDDEN, seed=3)
    ids, router = torch.zeros(tokens, 1, dtype=torch.int32), torch.ones(tokens, 1)
    return layer(x, ids, router, rows, pairs, scratch)


def test_each_pair_of_a_tile_has_the_delta_of_its_slot_whatever_its_number() -> None:
    together, base = run(), run([-1] * len(TOKEN_SLOTS))
    for slot in set(TOKEN_SLOTS):
        alone = run([slot if other == slot else -1 for other in TOKEN_SLOTS])
        own = [row for row, other in enumerate(TOKEN_SLOTS) if other == slot]
        torch.testing.assert_close(together[own], alone[own], rtol=2e-2, atol=2e-2)
        assert ((together[own] - base[own]).abs() > 0.1).any(dim=1).all() == (slot >= 0)


def test_adapters_of_a_tile_differ() -> None:
    """Otherwise the test above would hold for any slot."""
    base = run([-1] * len(TOKEN_SLOTS))
    first = run([0] * len(TOKEN_SLOTS))
    second = run([30] * len(TOKEN_SLOTS))
    for one, other in ((base, first), (base, second), (first, second)):
        assert ((one - other).abs() > 0.1).any(dim=1).all()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("slot", [0, 31, 69])
def test_one_bad_value_of_b_stays_in_the_rows_of_its_slot(
    projection: str, value: float, slot: int
) -> None:
    good, bad = run(), run(bad=Bad(projection, slot, value))
    own = torch.tensor(TOKEN_SLOTS) == slot
    assert not bad[own].isfinite().all(dim=1).any()
    torch.testing.assert_close(bad[~own], good[~own], rtol=2e-2, atol=2e-2)
