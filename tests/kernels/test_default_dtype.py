"""Servers change torch's default dtype while they build a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace  # noqa: E402
from lorakernels.dense.weights import SlotWeights  # noqa: E402
from lorakernels.layers.gate_up import GateUp  # noqa: E402
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch  # noqa: E402
from lorakernels.moe.align.metadata import PairMetadata  # noqa: E402


def linear() -> list[Any]:
    slots = SlotWeights(
        num_slots=2, slice_widths=[8], in_features=8, rank=4, dtype=torch.float16, device="cpu"
    )
    return [slots, DenseWorkspace([slots], max_tokens=4, branches=2)]


def moe() -> list[Any]:
    w13, w2 = (torch.zeros(shape, dtype=torch.float16) for shape in ((2, 16, 8), (2, 8, 8)))
    layer = FusedMoELoRA(w13, w2, gate_up=GateUp.HALVES, num_slots=2, rank=4)
    scratch = MoEScratch([layer], max_tokens=4, top_k=1)
    return [layer.w13_slots, layer.w2_slots, scratch.workspace, scratch.buffers]


def tables() -> list[Any]:
    pairs = PairMetadata(
        max_tokens=4, top_k=1, num_experts=2, max_slots=2, device="cpu", with_base=True
    )
    return [BatchMetadata(max_tokens=4, max_slots=2, device="cpu"), pairs]


@pytest.fixture
def in_bf16() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("build", [linear, moe, tables])
def test_buffers_have_dtypes_of_their_own(build: Callable[[], list[Any]], in_bf16: None) -> None:
    found = [
        tensor
        for part in build()
        for tensor in tree_leaves(list(vars(part).values()))
        if isinstance(tensor, Tensor)
    ]
    assert found
    assert not any(tensor.dtype is torch.bfloat16 for tensor in found)
