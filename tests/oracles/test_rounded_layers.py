"""MoE layers that round whatever a kernel could write, as those of vLLM do, are right: also where
so few features follow the first product that no luck averages out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor
from torch.nn import functional

from loragate.core.verdict import Failure, OracleName, Verdict
from loragate.matrix.case import Case, Dtype, RouterWeights, Site
from loragate.oracles import ORACLES
from loragate.protocol import Rounding, Trial
from loragate.subjects.torch.moe_layer import Factors, MoELayer, Rank


class RoundedLayer(MoELayer):
    """B has the scale in it. Base outputs and deltas are rounded before they are added, and again
    behind that, and the value of the activation function before it is multiplied by up."""

    too_large = 1.0

    def first(self, rank: Rank, expert: int, x: Tensor, tokens: Tensor) -> Tensor:
        parts = []
        for part, weight in enumerate(self.w13[expert].float().chunk(2)):
            y = low(x.float() @ weight.T, x)
            for slot, (up, _) in self.slots.items():
                own = self.of_slot(slot, tokens)
                y[own] = low(y[own] + low(self.delta(up[part], x[own], expert), x), x)
            parts.append(y)
        gate, up = parts
        value = low(functional.silu(gate), x)
        return low(value * up, x)

    def activated(self, inner: Tensor) -> Tensor:
        return inner

    def second(self, rank: Rank, expert: int, act: Tensor, tokens: Tensor) -> Tensor:
        y = low(act.float() @ self.w2[expert].float().T, act)
        for slot, (_, down) in self.slots.items():
            own = self.of_slot(slot, tokens)
            y[own] = low(y[own] + low(self.delta(down, act[own], expert), act), act)
        return y

    def delta(self, factors: Factors, rows: Tensor, expert: int) -> Tensor:
        a, b = (f[min(expert, len(f) - 1)].float() for f in (factors.a, factors.b))
        shrunk = low(rows.float() @ a.T, rows)
        return shrunk @ low(b * factors.scale * self.too_large, rows).T


class TooLarge(RoundedLayer):
    too_large = 1.05


def low(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.dtype).float()


def layer_case(dtype: Dtype, features: int, *, hidden: int = 256, tokens: int = 300) -> Case:
    return Case(
        site=Site.MOE_LAYER,
        tokens=tokens,
        in_features=hidden,
        slices=(features, features),
        rank=16,
        slots=3,
        dtype=dtype,
        experts=6,
        top_k=1,
        router=RouterWeights.OUTPUT,
    )


# each seed has a row whose roundings add up: where a delta is nearly the negative of the base
# output, and the last one where gate and its activation are below the normal numbers
@pytest.mark.parametrize(
    ("case", "seeds"),
    [
        (layer_case(Dtype.BF16, 1), (129, 132, 150)),
        (layer_case(Dtype.BF16, 2), (156, 178)),
        (layer_case(Dtype.BF16, 4), (179,)),
        (layer_case(Dtype.FP16, 1), (135, 142, 181)),
        (layer_case(Dtype.FP16, 8), (128,)),
        (layer_case(Dtype.FP16, 1, hidden=1024, tokens=494), (22, 35)),
    ],
)
def test_a_layer_that_promises_nothing_may_round_between_its_products(
    case: Case, seeds: tuple[int, ...], layer_trial: Callable[..., Trial]
) -> None:
    for seed in seeds:
        trial = layer_trial(RoundedLayer, seed, case, roundings=None, folds_scale_into_weights=True)
        judgement = ORACLES[OracleName.REFERENCE].judge(trial)
        assert judgement.verdict is Verdict.PASS, (seed, judgement)
        assert judgement.metrics["ratio"] < 0.97


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16])
@pytest.mark.parametrize("features", [1, 8, 64])
def test_a_scale_that_is_off_is_seen_behind_all_of_these_roundings(
    dtype: Dtype, features: int, layer_trial: Callable[..., Trial]
) -> None:
    for seed in range(3):
        trial = layer_trial(
            TooLarge,
            seed,
            layer_case(dtype, features),
            roundings=None,
            folds_scale_into_weights=True,
        )
        judgement = ORACLES[OracleName.REFERENCE].judge(trial)
        assert judgement.failure is Failure.WRONG_ANSWER, (seed, judgement)


def test_a_layer_that_promises_its_roundings_is_allowed_these_alone(
    layer_trial: Callable[..., Trial],
) -> None:
    case = layer_case(Dtype.BF16, 64)

    def ratio(**promises: object) -> float:
        trial = layer_trial(RoundedLayer, 1, case, **promises)
        return ORACLES[OracleName.REFERENCE].judge(trial).metrics["ratio"]

    assert ratio(roundings=lambda case: {Rounding.SHRUNK}) > 1.2 * ratio(roundings=None)
