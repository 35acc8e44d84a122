"""The permute oracle fails subjects whose results depend on the place of a slot or of a row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from loragate.core.verdict import Failure, OracleName, Verdict
from loragate.matrix.case import Mix
from loragate.oracles import ORACLES
from loragate.protocol import Trial
from loragate.subjects.torch.subject import DenseDelta


class AddsTheSlot(DenseDelta):
    """The rows of another slot get another number."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        return super().apply(x, out).add_(self.token_slots.clamp(min=0)[:, None])


class AddsTheRow(DenseDelta):
    """Each row gets its own number."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        return super().apply(x, out).add_(torch.arange(len(x))[:, None])


# two of them are in their usual order in half of all random ones
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("subject", "fields"),
    [
        (AddsTheSlot, {"slots": 2, "tokens": 6}),
        (AddsTheSlot, {"slots": 5, "tokens": 6}),
        (AddsTheRow, {"slots": 1, "tokens": 2}),
        (AddsTheRow, {"slots": 2, "tokens": 5}),
    ],
)
def test_slots_and_rows_change_places_in_every_draw(
    subject: type[DenseDelta], fields: dict[str, int], seed: int, make_trial: Callable[..., Trial]
) -> None:
    fails = ORACLES[OracleName.PERMUTE].judge(make_trial(subject, seed, mix=Mix.RAGGED, **fields))
    assert fails.verdict is Verdict.FAIL
    assert fails.failure is Failure.NOT_EQUIVARIANT
    passes = ORACLES[OracleName.PERMUTE].judge(make_trial(None, seed, mix=Mix.RAGGED, **fields))
    assert passes.verdict is Verdict.PASS
