"""The dense delta where fp16 is short of range: results that PEFT computes stay what they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch import metadata  # noqa: E402
from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.dense import shape as shapes  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace, dense_delta  # noqa: E402
from lorakernels.dense.weights import LoRAFactors, SlotWeights  # noqa: E402

ROWS, K, WIDTH = 6, 32, 80


def draw(rank: int, magnitude: float) -> tuple[Tensor, Tensor, Tensor]:
    """x, A and B in fp16, with rank sums of about `magnitude` and products of about 16."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, K, generator=generator).half()
    a = (torch.randn(rank, K, generator=generator) * (magnitude / K**0.5)).half()
    b = (torch.randn(WIDTH, rank, generator=generator) * (16 / magnitude / rank**0.5)).half()
    return x, a, b


def served(x: Tensor, factors: LoRAFactors) -> Tensor:
    weights = SlotWeights(
        num_slots=1,
        slice_widths=(WIDTH,),
        in_features=K,
        rank=factors.rank,
        dtype=torch.float16,
        device="cpu",
    )
    weights.load(0, [factors])
    batch = BatchMetadata(max_tokens=ROWS, max_slots=1, device="cpu")
    batch.prepare(torch.zeros(ROWS, dtype=torch.int32))
    out = torch.zeros(ROWS, WIDTH, dtype=torch.float16)
    dense_delta(x, weights, batch, DenseWorkspace([weights], max_tokens=ROWS), out)
    return out


def peft(x: Tensor, factors: LoRAFactors) -> Tensor:
    """As PEFT computes it: each product rounded to fp16, the scale last."""
    return ((x @ factors.a.T) @ factors.b.T) * factors.scale


@pytest.mark.usefixtures("new_plans")
# one block of ranks, several blocks of ranks, and columns that stream by
@pytest.mark.parametrize(("height", "rank"), [(16, 8), (16, 160), (64, 8)])
# rank sums times scale beyond the largest fp16 and below the smallest one
@pytest.mark.parametrize(("magnitude", "scale"), [(8192.0, 64.0), (2.0**-7, 2.0**-14)])
def test_what_peft_computes_within_fp16_keeps_its_value(
    monkeypatch: pytest.MonkeyPatch, height: int, rank: int, magnitude: float, scale: float
) -> None:
    for module in (shapes, metadata):
        monkeypatch.setattr(module, "tile_height", lambda rows, tuning: height)
    x, a, b = draw(rank, magnitude)
    factors = LoRAFactors(a, b, scale)
    exact = scale * (x.double() @ a.double().T) @ b.double().T
    eager_error = (peft(x, factors).double() - exact).norm()
    assert eager_error.isfinite(), "the data are beyond fp16 for PEFT as well"
    out = served(x, factors)
    assert out.isfinite().all()
    assert (out.double() - exact).norm() <= 2 * eager_error
