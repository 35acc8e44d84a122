"""Layers serve: what they hold of a model wants no gradient, whatever it was made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.common.quantised import Quantised, quantise_rows  # noqa: E402
from lorakernels.layers.embedding import LoRAEmbedding  # noqa: E402
from lorakernels.layers.gate_up import GateUp  # noqa: E402
from lorakernels.layers.gdn import DeltaNetHeads, GatedDeltaNetInputProjection  # noqa: E402
from lorakernels.layers.linear import LoRALinear  # noqa: E402
from lorakernels.layers.moe import FusedMoELoRA  # noqa: E402
from lorakernels.layers.partition import Slice  # noqa: E402

SLOTS: dict[str, Any] = {"num_slots": 2, "rank": 8}


def trained(*shape: int) -> nn.Parameter:
    """As a model has it that has been trained."""
    return nn.Parameter(torch.ones(*shape))


def linear(**options: Any) -> nn.Module:
    return LoRALinear(
        trained(10, 16), slices=[Slice("q", 10)], bias=trained(10), **SLOTS, **options
    )


def linear_of_a_rank() -> nn.Module:
    return linear(tp_size=2, tp_rank=1)


def embedding() -> nn.Module:
    return LoRAEmbedding(trained(20, 12), **SLOTS)


def delta_net(qkvz: Tensor | Quantised | None = None) -> nn.Module:
    heads = DeltaNetHeads(key_heads=2, value_heads=4, key_size=4, value_size=8)
    return GatedDeltaNetInputProjection(
        trained(80, 16) if qkvz is None else qkvz,
        trained(8, 16),
        modules=heads.grouped(),
        **SLOTS,
    )


def delta_net_of_two_weights() -> nn.Module:
    return delta_net(quantise_rows(torch.ones(80, 16)))


def experts() -> nn.Module:
    return FusedMoELoRA(
        trained(3, 24, 16),
        trained(3, 16, 12),
        gate_up=GateUp.HALVES,
        w13_bias=trained(3, 24),
        w2_bias=trained(3, 16),
        **SLOTS,
    )


LAYERS = [
    (linear, 2),
    (linear_of_a_rank, 2),
    (embedding, 1),
    (delta_net, 1),
    (delta_net_of_two_weights, 2),
    (experts, 4),
]


@pytest.mark.parametrize(("make", "count"), LAYERS)
def test_no_parameter_of_a_layer_wants_a_gradient(
    make: Callable[[], nn.Module], count: int
) -> None:
    parameters = list(make().parameters())
    assert len(parameters) == count
    assert not any(parameter.requires_grad for parameter in parameters)
