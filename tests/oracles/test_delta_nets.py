"""gdn_in_proj in plain torch: right layers pass, and mistakes of its columns and adapters fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from loragate.core.machine import Machine
from loragate.core.verdict import OracleName, Verdict
from loragate.execution.session import inputs_of
from loragate.inputs import DataKind
from loragate.matrix.case import Case, Dtype, Mix, Site
from loragate.oracles import ORACLES
from loragate.oracles.numeric.errors import half_ulp
from loragate.oracles.numeric.reference import judge_result
from loragate.protocol import AnyInstance, BaseLayer, Pool, Trial
from loragate.subjects.torch.gdn import DeltaNetInput
from loragate.subjects.torch.subject import DenseDelta, TorchSubject

CPU = Machine("cpu", "test", None, 1, 0)
GROUPED = Case(
    site=Site.GDN_IN_PROJ,
    tokens=12,
    in_features=40,
    slices=(64, 8),
    key_heads=2,
    rank=6,
    slots=4,
    dtype=Dtype.BF16,
    mix=Mix.SHUFFLED,
)
SEPARATE = replace(GROUPED, slices=(40, 24, 4, 4))
NUMERICS = (OracleName.REFERENCE, OracleName.EXACT, OracleName.BASE_ROWS, OracleName.SEQUENCE)


class OtherOrder(DeltaNetInput):
    """The output has ba in front of qkvz."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        return super().apply(x, out).roll(self.case.slices[-1], 1)


class KeptSlice(DeltaNetInput):
    """A slice that the next adapter of a slot lacks keeps what it had."""

    def load(self, slot: int, pool: Pool) -> None:
        super().load(slot, pool)
        for rank in self.ranks:
            delta = rank.delta
            assert isinstance(delta, DenseDelta)
            for part, factors in enumerate(delta.slots[slot]):
                if not len(factors[0]):
                    a = pool.a[(slot + 1) % len(pool.ranks), part]
                    b = pool.b[part][(slot + 1) % len(pool.ranks), rank.of_slices[part]]
                    delta.slots[slot][part] = (a, b, 1.0)


class DoubleCount(DeltaNetInput):
    """The results of ranks are added up, also those of columns that several ranks hold."""

    def apply(self, x: Tensor, out: Tensor) -> Tensor:
        result = x.new_zeros(len(x), self.case.out_features)
        for rank in self.ranks:
            y = rank.delta.apply(x, torch.nn.functional.linear(x, rank.weight))
            result.index_add_(1, rank.columns, y)
        return result


class Subject(TorchSubject):
    def __init__(self, layer: type[DeltaNetInput]) -> None:
        self.layer = layer

    def open(self, case: Case, machine: Machine, base: BaseLayer | None) -> AnyInstance:
        assert base is not None
        return self.layer(case, base, [DenseDelta(case) for _ in range(case.tp)])


def verdicts(case: Case, layer: type[DeltaNetInput]) -> dict[OracleName, Verdict]:
    subject = Subject(layer)
    have = subject.capabilities(CPU)
    assert not isinstance(have, str)
    trial = Trial(case, subject, have, CPU, seed=3)  # type: ignore[arg-type]
    return {name: ORACLES[name].judge(trial).verdict for name in NUMERICS}


@pytest.mark.parametrize("case", [GROUPED, SEPARATE], ids=["grouped", "separate"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_ranks_of_a_right_layer_pass(case: Case, tp: int) -> None:
    found = verdicts(replace(case, tp=tp), DeltaNetInput)
    assert set(found.values()) == {Verdict.PASS}, found


@pytest.mark.parametrize(
    ("case", "layer"),
    [
        (GROUPED, OtherOrder),
        (SEPARATE, OtherOrder),
        (GROUPED, KeptSlice),
        (replace(SEPARATE, tp=4), DoubleCount),
    ],
)
def test_a_wrong_layer_fails_in_both_numeric_oracles(
    case: Case, layer: type[DeltaNetInput]
) -> None:
    found = verdicts(case, layer)
    assert found[OracleName.REFERENCE] is Verdict.FAIL
    assert found[OracleName.EXACT] is Verdict.FAIL


@pytest.mark.parametrize("wrong", [1.0, 3.0])
def test_a_base_product_of_ba_alone_may_round_its_parts(
    wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLAS cuts it into more parts than the product of all columns."""
    case = replace(SEPARATE, tokens=60, in_features=512, mix=Mix.ALL_BASE)
    have = Subject(DeltaNetInput).capabilities(CPU)
    assert not isinstance(have, str)
    trial = Trial(case, Subject(DeltaNetInput), have, CPU, 5)  # type: ignore[arg-type]
    pool, batch, base = inputs_of(trial, DataKind.SIGNED)
    assert isinstance(base, BaseLayer)
    right, plain = batch.x.double() @ base.weight.double().T, functional.linear
    ba = 2 * case.slices[2]
    off = torch.zeros_like(right)
    off[17, -ba:] = 6 * half_ulp(right[17, -ba:], torch.bfloat16)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return (right + off)[:, -ba:].to(x.dtype) if len(weight) == ba else plain(x, weight, bias)

    monkeypatch.setattr(functional, "linear", linear)
    result = (right + wrong * off).to(batch.x.dtype)
    judgement = judge_result(trial, pool, batch, base, result)
    assert (judgement.verdict is Verdict.PASS) is (wrong == 1.0), judgement
