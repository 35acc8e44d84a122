"""Ranks times the scale may exceed fp16 where the delta does not: the scale is applied last, in
fp32, as PEFT applies it to the output of B."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.layers.gate_up import GateUp
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.delta.ops import MoEPath, MoEWorkspace, moe_delta
from lorakernels.moe.weights import ExpertFactors, ExpertWeights

EXPERTS, WIDTH, RANK, TOKENS = 2, 16, 4, 6
SCALE = 64.0


def of_constants(a: float, b: float) -> ExpertFactors:
    return ExpertFactors(
        torch.full((EXPERTS, RANK, WIDTH), a), torch.full((EXPERTS, WIDTH, RANK), b), SCALE
    )


def prepared(*, with_base: bool) -> tuple[BatchMetadata, PairMetadata, Tensor]:
    batch = BatchMetadata(max_tokens=TOKENS, max_slots=2, device="cpu")
    batch.prepare(torch.tensor([0, 1] * (TOKENS // 2), dtype=torch.int32))
    pairs = PairMetadata(
        max_tokens=TOKENS,
        top_k=1,
        num_experts=EXPERTS,
        max_slots=2,
        device="cpu",
        with_base=with_base,
    )
    ids = torch.tensor([[0], [0], [1], [1], [0], [1]], dtype=torch.int32)
    return batch, pairs, ids


def added(path: MoEPath, slices: int, factors: ExpertFactors, x: float) -> Tensor:
    """What every slot with these factors adds to ones, from inputs that are all `x`."""
    weights = ExpertWeights(
        num_slots=2,
        num_experts=EXPERTS,
        slice_widths=(WIDTH,) * slices,
        in_features=WIDTH,
        rank=RANK,
        dtype=torch.float16,
        device="cpu",
    )
    for slot in range(2):
        weights.load(slot, [factors] * slices)
    batch, pairs, ids = prepared(with_base=False)
    pairs.prepare(ids, batch)
    workspace = MoEWorkspace([weights], max_tokens=TOKENS, top_k=1)
    inputs = torch.full((TOKENS, WIDTH), x, dtype=torch.float16)
    out = torch.ones(TOKENS, slices * WIDTH, dtype=torch.float16)
    router = torch.full((TOKENS, 1), 0.5)
    moe_delta(inputs, weights, pairs, workspace, out, path=path, router_weights=router)
    return out - 1


# 16 * 8 * 16 = 2048 for each rank, times the scale 131072: beyond 65504
@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("path", MoEPath)
def test_a_delta_of_fp16_is_finite_where_ranks_times_scale_are_not(
    path: MoEPath, slices: int
) -> None:
    found = added(path, slices, of_constants(16.0, 2.0**-8), 8.0)
    assert torch.equal(found, torch.full_like(found, 0.5 * RANK * 2048 * 2.0**-8 * SCALE))


# what lies behind the ranks of an adapter must not even be summed up: 16 * 8192 is beyond 65504,
# and its Inf times the zeros of B would be NaN
@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("path", MoEPath)
def test_ranks_that_an_adapter_lacks_are_zero_whatever_the_inputs_add_up_to(
    path: MoEPath, slices: int
) -> None:
    factors = ExpertFactors(
        torch.full((EXPERTS, 1, WIDTH), 2.0**-14), torch.full((EXPERTS, WIDTH, 1), 2.0**-3), 1.0
    )
    found = added(path, slices, factors, 8192.0)
    assert torch.equal(found, torch.full_like(found, 0.5))


def test_a_layer_of_fp16_is_finite_where_ranks_times_scale_are_not() -> None:
    layer = FusedMoELoRA(
        torch.zeros(EXPERTS, 2 * WIDTH, WIDTH, dtype=torch.float16),
        torch.zeros(EXPERTS, WIDTH, WIDTH, dtype=torch.float16),
        gate_up=GateUp.HALVES,
        num_slots=2,
        rank=RANK,
    )
    # gate and up become 32 and their product 1024; the ranks of down times
    # the scale are 2^18
    for slot in range(2):
        parts = {"gate_proj": (16.0, 2.0**-14), "up_proj": (16.0, 2.0**-14)}
        parts["down_proj"] = (0.25, 2.0**-13)
        layer.load_adapter(slot, {f"experts.{n}": of_constants(*p) for n, p in parts.items()})
    batch, pairs, ids = prepared(with_base=True)
    scratch = MoEScratch([layer], max_tokens=TOKENS, top_k=1)
    x = torch.full((TOKENS, WIDTH), 8.0, dtype=torch.float16)
    out = layer(x, ids, torch.ones(TOKENS, 1), batch, pairs, scratch)
    assert torch.equal(out, torch.full_like(out, RANK * 4096 * 2.0**-13 * SCALE))
