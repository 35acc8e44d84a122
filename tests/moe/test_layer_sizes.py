"""A MoE layer whose sizes are below, at and above those of its blocks; rows of special values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.common.quantised import quantise_rows  # noqa: E402
from lorakernels.layers.gate_up import GateUp  # noqa: E402
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch  # noqa: E402
from lorakernels.moe.align.metadata import PairMetadata  # noqa: E402
from lorakernels.moe.layer.launch import launch_sum  # noqa: E402
from lorakernels.moe.weights import ExpertFactors  # noqa: E402

EXPERTS, TOKENS, TOP_K, RANK = 2, 3, 2, 3


def randn(*shape: int, seed: int) -> Tensor:
    """bf16 values, so that a layer of fp32 has the same operands."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (drawn / shape[-1] ** 0.5).bfloat16().float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sum_of_the_choices_of_a_token_is_rounded_once(dtype: torch.dtype) -> None:
    tokens, top_k, hidden = 4, 5, 300
    y = torch.randn(tokens * top_k, hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
    experts = torch.zeros(tokens * top_k, dtype=torch.int32)
    # a pair without expert, whose row was never written
    experts[7], y[7] = -1, torch.nan
    pairs: Any = SimpleNamespace(tables=SimpleNamespace(pair_experts=experts), top_k=top_k)
    out = torch.empty(tokens, hidden, dtype=dtype)
    launch_sum(y, pairs, out, pdl=False)
    wanted = torch.zeros(tokens, hidden)
    for choice in range(top_k):
        wanted += y.view(tokens, top_k, hidden)[:, choice].float().nan_to_num(0.0)
    assert torch.equal(out, wanted.to(dtype))


def served(hidden: int, inter: int, dtype: torch.dtype) -> Tensor:
    """An adapter in slot 1 of a layer of which only the sizes and the dtype are given."""
    w13, w2 = randn(EXPERTS, 2 * inter, hidden, seed=1), randn(EXPERTS, hidden, inter, seed=2)
    layer = FusedMoELoRA(w13.to(dtype), w2.to(dtype), gate_up=GateUp.HALVES, num_slots=2, rank=RANK)
    sizes = {"gate_proj": (hidden, inter), "up_proj": (hidden, inter), "down_proj": (inter, hidden)}
    parts = {
        f"experts.{name}": ExpertFactors(
            randn(EXPERTS, RANK, inputs, seed=3), randn(EXPERTS, width, RANK, seed=4), 2.0
        )
        for name, (inputs, width) in sizes.items()
    }
    layer.load_adapter(1, parts)
    batch = BatchMetadata(max_tokens=TOKENS, max_slots=2, device="cpu")
    batch.prepare(torch.tensor([1, -1, 1], dtype=torch.int32))
    experts = {"top_k": TOP_K, "num_experts": EXPERTS, "max_slots": 2, "with_base": True}
    pairs = PairMetadata(max_tokens=TOKENS, device="cpu", **experts)  # type: ignore[arg-type]
    ids = torch.tensor([[0, 1], [1, 0], [1, 0]], dtype=torch.int32)
    router = randn(TOKENS, TOP_K, seed=5)
    scratch = MoEScratch([layer], max_tokens=TOKENS, top_k=TOP_K)
    # nothing that is left in the buffers of an earlier step is read
    for buffer in (scratch.buffers.act, scratch.buffers.y, scratch.workspace.shrunk):
        buffer.fill_(float("nan"))
    x = (randn(TOKENS, hidden, seed=6) * hidden**0.5).to(dtype)
    return layer(x, ids, router, batch, pairs, scratch)


# depths are cut into blocks of 32, 64 or 128, sums into 256 or 1024 columns
@pytest.mark.parametrize(
    ("hidden", "inter"),
    [(64, 192), (192, 64), (128, 128), (96, 160), (130, 63), (255, 40), (257, 24), (1100, 8)],
)
def test_a_layer_of_bf16_is_that_of_fp32_for_sizes_around_those_of_blocks(
    hidden: int, inter: int
) -> None:
    exact = served(hidden, inter, torch.float32)
    error = served(hidden, inter, torch.bfloat16).float() - exact
    assert error.norm() < 0.02 * exact.norm()
    assert error.abs().max() < 0.05 * exact.abs().max()


def test_a_row_of_zeros_is_quantised_to_zeros() -> None:
    rows = quantise_rows(torch.tensor([[0.0, 0.0], [1.0, -4.0]]))
    assert (rows.values[0].float() == 0).all()
    assert rows.scales[0] > 0
    assert rows.scales.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_value_of_a_quantised_row_is_kept(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, -7.0, 0.5], [1e-4, 5e-5, 0.0], [448.0, 3.0, 1.0]]).to(dtype)
    rows = quantise_rows(x)
    largest = (rows.values.float() * rows.scales[:, None]).abs().amax(dim=1)
    torch.testing.assert_close(largest, x.float().abs().amax(dim=1), rtol=1e-6, atol=0.0)
    assert (rows.values.float().abs().amax(dim=1) == 448).all()


def test_a_bad_value_of_a_row_to_quantise_stays_in_its_row() -> None:
    x = torch.ones(3, 4)
    x[0, 1], x[1, 2] = float("nan"), float("inf")
    rows = quantise_rows(x)
    good = quantise_rows(torch.ones(1, 4))
    assert torch.equal(rows.values[2].float(), good.values[0].float())
    assert rows.scales[2] == good.scales[0]
    assert not rows.scales[:2].isfinite().any()
