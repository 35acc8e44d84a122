"""For every numeric oracle there is a defect that no other one detects, so none can be left out.

A subject is plain torch with one change, and all oracles judge it.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor

from loragate.core.verdict import OracleName, Verdict
from loragate.oracles import ORACLES
from loragate.oracles.memory import canary
from loragate.protocol import Trial
from loragate.subjects.torch.subject import DenseDelta

NUMERIC = (
    OracleName.REFERENCE,
    OracleName.EXACT,
    OracleName.BASE_ROWS,
    OracleName.CANARY,
    OracleName.REPEAT,
    OracleName.PERMUTE,
    OracleName.SEQUENCE,
)


# not torch's generator, whose state a step must leave
ORDERS = Random()


class Rounding(DenseDelta):
    """The delta is rounded to bf16 by `rounded` before it is added."""

    def rounded(self, delta: Tensor) -> Tensor:
        raise NotImplementedError

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        delta = super().apply(x.float(), torch.zeros(out.shape))
        used = delta.any(1)
        out[used] += self.rounded(delta)[used]
        return out


class FiveBits(Rounding):
    """Rounds to five bits of mantissa, which is all that exact data needs."""

    def rounded(self, delta: Tensor) -> Tensor:
        quantum = torch.exp2(torch.frexp(delta).exponent - 5.0)
        coarse = (delta / quantum).round() * quantum
        return torch.where(delta % 0.5 == 0, delta, coarse).bfloat16()


class RoundsUpWhatIsExact(Rounding):
    """Truncates and adds one, as if the truncated part were never zero."""

    def rounded(self, delta: Tensor) -> Tensor:
        nearest = delta.bfloat16()
        away = (nearest.view(torch.int16) + 1).view(torch.bfloat16)
        return torch.where(nearest.float() == delta, away, nearest)


class AddsZeroToBaseRows(DenseDelta):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        out[self.token_slots < 0] += 0.0
        return super().apply(x, out)


class WritesItsInput(DenseDelta):
    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        super().apply(x, out)
        x *= 2
        return out


class TwoSums(DenseDelta):
    """K is summed in two parts that are added in the dtype."""

    def parts(self, width: int) -> tuple[Tensor, Tensor]:
        return torch.arange(width // 2), torch.arange(width // 2, width)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        whole = self.slots
        for part in self.parts(x.shape[1]):
            self.slots = {
                slot: [(a[:, part], b, scale) for a, b, scale in factors]
                for slot, factors in whole.items()
            }
            super().apply(x[:, part], out)
        self.slots = whole
        return out


class SumsInAnyOrder(TwoSums):
    def parts(self, width: int) -> tuple[Tensor, Tensor]:
        left, right = super().parts(width)
        return (left, right) if ORDERS.random() < 0.5 else (right, left)


class TakesWhatLiesBetweenItsRows(DenseDelta):
    """A slot that has both a run and other rows gets every row from its first to its last one."""

    def prepare(self, token_slots: Tensor) -> None:
        mapping = token_slots.clone()
        for slot in self.slots:
            rows = (token_slots == slot).nonzero().flatten()
            gaps = rows.diff()
            if (gaps == 1).any() and (gaps > 1).any():
                mapping[int(rows[0]) : int(rows[-1]) + 1] = slot
        super().prepare(mapping)


class UnloadDoesNothing(DenseDelta):
    def unload(self, slot: int) -> None:
        pass


ALONE = {
    OracleName.REFERENCE: FiveBits,
    OracleName.EXACT: RoundsUpWhatIsExact,
    OracleName.BASE_ROWS: AddsZeroToBaseRows,
    OracleName.CANARY: WritesItsInput,
    OracleName.REPEAT: SumsInAnyOrder,
    OracleName.PERMUTE: TakesWhatLiesBetweenItsRows,
    OracleName.SEQUENCE: UnloadDoesNothing,
}


def noticing(trial: Trial) -> set[OracleName]:
    found = set()
    for name in NUMERIC:
        ORDERS.seed(trial.seed)
        if ORACLES[name].judge(trial).verdict is not Verdict.PASS:
            found.add(name)
    return found


@pytest.mark.parametrize("oracle", NUMERIC)
def test_each_numeric_oracle_detects_a_defect_that_no_other_one_detects(
    oracle: OracleName, make_trial: Callable[..., Trial]
) -> None:
    for seed in range(3):
        assert noticing(make_trial(ALONE[oracle], seed)) == {oracle}


def test_a_subject_whose_rows_do_not_depend_on_their_place_is_compared_by_bits(
    make_trial: Callable[..., Trial],
) -> None:
    class SlotZeroInTwoSums(TwoSums):
        def apply(self, x: Tensor, out: Tensor) -> Tensor:
            whole = self.slots
            self.slots = {slot: f for slot, f in whole.items() if slot}
            DenseDelta.apply(self, x, out)
            self.slots = {slot: f for slot, f in whole.items() if not slot}
            super().apply(x, out)
            self.slots = whole
            return out

    assert noticing(make_trial(SlotZeroInTwoSums)) == set()
    promising = make_trial(SlotZeroInTwoSums, promises={"place_invariant": True})
    assert noticing(promising) == {OracleName.PERMUTE}


def test_the_canary_reports_the_place_of_a_foreign_write(
    make_trial: Callable[..., Trial],
) -> None:
    class OneRowPast(DenseDelta):
        def apply(self, x: Tensor, out: Tensor) -> Tensor:
            super().apply(x, out)
            rows, columns = out.shape
            out.as_strided((rows + 1, columns), out.stride())[rows, 5] += 1
            return out

    judgement = ORACLES[OracleName.CANARY].judge(make_trial(OneRowPast))
    assert judgement.where == {"row": 24, "column": 5}


@pytest.mark.parametrize("at_a_time", [2, 1 << 26])
def test_the_canary_counts_what_a_step_changed_of_its_input(
    at_a_time: int, make_trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    class ThreeElements(DenseDelta):
        def apply(self, x: Tensor, out: Tensor) -> Tensor:
            super().apply(x, out)
            x[[0, 1, -1], [0, 3, -1]] = 77
            return out

    monkeypatch.setattr(canary, "_COUNTED", at_a_time)
    judgement = ORACLES[OracleName.CANARY].judge(make_trial(ThreeElements))
    assert judgement.message.startswith("the step changed 3 elements of x")


def test_the_sequence_names_the_scene_that_failed(make_trial: Callable[..., Trial]) -> None:
    judgement = ORACLES[OracleName.SEQUENCE].judge(make_trial(UnloadDoesNothing))
    assert "an adapter that moved, and the slot that it left" in judgement.message
    assert judgement.where["slot"] == 3
