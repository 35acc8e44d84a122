"""What is rounded between input and output of a delta, and what is not, on every path: numbers for
which one rounding more, or one in another place, gives another result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import detect_machine, select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.dense import launch as dense_launch  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace, dense_delta  # noqa: E402
from lorakernels.dense.weights import LoRAFactors, SlotWeights  # noqa: E402
from lorakernels.moe.align.metadata import PairMetadata  # noqa: E402
from lorakernels.moe.delta import launch as moe_launch  # noqa: E402
from lorakernels.moe.delta.ops import MoEPath, MoEWorkspace, moe_delta  # noqa: E402
from lorakernels.moe.weights import ExpertFactors, ExpertWeights  # noqa: E402

DEVICE = detect_machine().device
ROWS, WIDTH = 4, 40
Delta = Callable[[Tensor, Tensor, Tensor, float, Tensor], Tensor]


def dense(x: Tensor, a: Tensor, b: Tensor, scale: float, out: Tensor) -> Tensor:
    sizes: dict[str, Any] = {"in_features": x.shape[1], "rank": len(a), "dtype": x.dtype}
    weights = SlotWeights(num_slots=1, slice_widths=(WIDTH,), device=DEVICE, **sizes)
    weights.load(0, [LoRAFactors(a, b, scale)])
    batch = BatchMetadata(max_tokens=ROWS, max_slots=1, device=DEVICE)
    batch.prepare(torch.zeros(ROWS, dtype=torch.int32))
    dense_delta(x, weights, batch, DenseWorkspace([weights], max_tokens=ROWS), out)
    return out


def of_pairs(path: MoEPath) -> Delta:
    def delta(x: Tensor, a: Tensor, b: Tensor, scale: float, out: Tensor) -> Tensor:
        sizes: dict[str, Any] = {"in_features": x.shape[1], "rank": len(a), "dtype": x.dtype}
        layer: dict[str, Any] = {"num_experts": 1, "device": DEVICE}
        weights = ExpertWeights(num_slots=1, slice_widths=(WIDTH,), **layer, **sizes)
        weights.load(0, [ExpertFactors(a[None], b[None], scale)])
        batch = BatchMetadata(max_tokens=ROWS, max_slots=1, device=DEVICE)
        batch.prepare(torch.zeros(ROWS, dtype=torch.int32))
        pairs = PairMetadata(max_tokens=ROWS, top_k=1, max_slots=1, **layer)
        pairs.prepare(torch.zeros(ROWS, 1, dtype=torch.int32, device=DEVICE), batch)
        workspace = MoEWorkspace([weights], max_tokens=ROWS, top_k=1)
        moe_delta(x, weights, pairs, workspace, out, path=path)
        return out

    return delta


# each kernel, and of an expand both of its forms
PATHS: dict[str, tuple[Delta, ModuleType, int | None]] = {
    "dense": (dense, dense_launch, 1),
    "dense in groups": (dense, dense_launch, 2),
    "two kernels": (of_pairs(MoEPath.TWO_KERNEL), moe_launch, 1),
    "two kernels in groups": (of_pairs(MoEPath.TWO_KERNEL), moe_launch, 2),
    "one shot": (of_pairs(MoEPath.ONE_SHOT), moe_launch, None),
    "small batch": (of_pairs(MoEPath.SMALL_BATCH), moe_launch, None),
}


@pytest.fixture(params=list(PATHS))
def delta(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Delta:
    run, module, group = PATHS[request.param]
    planned = module.plan_expand
    if group is not None:

        def forced(shape: Any) -> Any:
            return replace(planned(shape), group=group, block_n=16)

        monkeypatch.setattr(module, "plan_expand", forced)
    return run


def result(
    delta: Delta, x: list[float], a: list[list[float]], scale: float, base: float, dtype: Any
) -> set[float]:
    """All values of the output: rows are equal, and so are columns, because B is 1 throughout."""
    rows = torch.tensor([x] * ROWS, dtype=dtype, device=DEVICE)
    factor = torch.tensor(a, dtype=dtype, device=DEVICE)
    b = torch.ones(WIDTH, len(a), dtype=dtype, device=DEVICE)
    out = torch.full((ROWS, WIDTH), base, dtype=dtype, device=DEVICE)
    return set(delta(rows, factor, b, scale, out).flatten().tolist())


low = pytest.mark.parametrize(
    ("dtype", "ulp_two"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)], ids=["bf16", "fp16"]
)


@low
def test_base_and_delta_are_added_before_they_are_rounded(
    delta: Delta, dtype: torch.dtype, ulp_two: float
) -> None:
    # the delta is odd where only even numbers exist; two ranks, so that neither is rounded before
    found = result(delta, [ulp_two, 1.0], [[1.0, 0.0], [0.0, 1.0]], 1.0, 1.0, dtype)
    assert found == {ulp_two + 2}


@low
def test_products_with_a_are_added_before_they_are_rounded(
    delta: Delta, dtype: torch.dtype, ulp_two: float
) -> None:
    root = 16.0 if dtype is torch.bfloat16 else 64.0
    # (n + 1)^2 - n (n + 2) = 1
    found = result(delta, [root + 1, -root - 2], [[root + 1, root]], 1.0, 0.0, dtype)
    assert found == {1.0}


def test_the_ranks_of_bf16_are_scaled_before_they_are_rounded(delta: Delta) -> None:
    # 257 * 3 is nearest to 772; with 256 in its place it would be 768
    assert result(delta, [256.0, 1.0], [[1.0, 1.0]], 3.0, 0.0, torch.bfloat16) == {772.0}
