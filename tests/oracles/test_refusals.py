"""A refusal that was promised is complete: bad input is named, nothing is changed, and the next
call is judged like the first one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from loragate.core.verdict import Failure, OracleName, Verdict
from loragate.inputs import torch_dtype
from loragate.matrix.case import Case
from loragate.oracles import ORACLES
from loragate.protocol import Guard, Trial
from loragate.subjects.torch.subject import DenseDelta

GUARDS = frozenset({Guard.SLOT_RANGE, Guard.MAPPING_DTYPE, Guard.X_DTYPE})


class Careful(DenseDelta):
    """Refuses rows of unknown slots, and x of another dtype."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.last, self.dtype = case.slots - 1, torch_dtype(case.dtype)

    def prepare(self, token_slots: Tensor) -> None:
        if token_slots.dtype != torch.int32:
            raise ValueError(f"token_slots must be int32 (got {token_slots.dtype})")
        for slot in token_slots.tolist():
            if not -1 <= slot <= self.last:
                raise ValueError(f"a slot must be from -1 to {self.last} (got {slot})")
        super().prepare(token_slots)

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        if x.dtype != self.dtype:
            self.refuse(x, out)
        return super().apply(x, out)

    def refuse(self, x: Tensor, out: Tensor) -> None:
        raise ValueError(f"x must be {self.dtype} (got {x.dtype})")


class OneSlotTooMany(Careful):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.last += 1


class KeepsWhatIsRefused(Careful):
    def prepare(self, token_slots: Tensor) -> None:
        self.token_slots = token_slots.clone()
        super().prepare(token_slots)


class WritesBeforeItRefuses(Careful):
    def refuse(self, x: Tensor, out: Tensor) -> None:
        out += 1
        super().refuse(x, out)


class RoundsItsInputFirst(Careful):
    def refuse(self, x: Tensor, out: Tensor) -> None:
        x *= 2
        super().refuse(x, out)


class RefusesOnce(Careful):
    def refuse(self, x: Tensor, out: Tensor) -> None:
        known, self.dtype = self.dtype, x.dtype
        raise ValueError(f"x must be {known} (got {x.dtype})")


class NamesNothing(Careful):
    def refuse(self, x: Tensor, out: Tensor) -> None:
        raise ValueError("x is wrong")


class FailsOtherwise(Careful):
    def refuse(self, x: Tensor, out: Tensor) -> None:
        raise TypeError(f"x must be {self.dtype} (got {x.dtype})")


@pytest.mark.parametrize(
    ("instance", "guard", "said"),
    [
        (OneSlotTooMany, Guard.SLOT_RANGE, "it was accepted"),
        (WritesBeforeItRefuses, Guard.X_DTYPE, "refused after a tensor had been changed"),
        (RoundsItsInputFirst, Guard.X_DTYPE, "refused after a tensor had been changed"),
        (RefusesOnce, Guard.X_DTYPE, ""),
        (NamesNothing, Guard.X_DTYPE, "does not name"),
        (FailsOtherwise, Guard.X_DTYPE, "TypeError instead of ValueError"),
    ],
)
def test_a_refusal_that_is_not_complete_fails(
    instance: type[DenseDelta], guard: Guard, said: str, make_trial: Callable[..., Trial]
) -> None:
    for seed in range(3):
        judgement = ORACLES[OracleName.GUARD].judge(make_trial(instance, seed, {"guards": GUARDS}))
        assert judgement.failure is Failure.NOT_REFUSED, judgement
        assert judgement.where == {"guard": guard.value}
        assert said in judgement.message


@pytest.mark.parametrize("guard", [Guard.SLOT_RANGE, Guard.MAPPING_DTYPE])
def test_a_mapping_that_is_refused_and_kept_fails(
    guard: Guard, make_trial: Callable[..., Trial]
) -> None:
    for seed in range(3):
        trial = make_trial(KeepsWhatIsRefused, seed, {"guards": frozenset({guard})})
        judgement = ORACLES[OracleName.GUARD].judge(trial)
        assert judgement.failure is Failure.STALE_STATE, judgement
        assert judgement.where["slot"] >= 0


def test_complete_refusals_pass(make_trial: Callable[..., Trial]) -> None:
    for seed in range(3):
        judgement = ORACLES[OracleName.GUARD].judge(make_trial(Careful, seed, {"guards": GUARDS}))
        assert judgement.verdict is Verdict.PASS, judgement
        # dtypes of x and of a mapping, a slot behind the last one and one below that of base rows
        assert judgement.metrics["refusals"] == 4
