"""One layout of experts in all layers of an adapter, and errors that name a module of either."""

from __future__ import annotations

import re

import pytest
import torch

from lorakernels.adapters.adapter import Adapter
from lorakernels.adapters.errors import AdapterError
from lorakernels.adapters.expert_layout import ExpertLayout, is_stacked_name
from lorakernels.dense.weights import LoRAFactors
from lorakernels.moe.weights import ExpertFactors, Factors

FLAT = LoRAFactors(torch.ones(2, 4), torch.ones(6, 2), 1.0)


def stack(a: int, b: int) -> ExpertFactors:
    return ExpertFactors(torch.ones(a, 2, 4), torch.ones(b, 6, 2), 1.0)


def adapter(modules: dict[str, Factors]) -> Adapter:
    return Adapter("fr", {f"model.layers.{name}": part for name, part in modules.items()})


@pytest.mark.parametrize(
    ("module", "stacked"),
    [
        ("model.layers.0.mlp.experts.17.gate_proj", False),
        ("experts.0.w1", False),
        ("model.layers.0.mlp.experts.gate_up_proj", True),
        ("experts.w2", True),
        ("model.layers.0.mlp.shared_experts.gate_proj", None),
        ("model.layers.0.mlp.shared_expert.gate_proj", None),
        ("model.layers.0.mlp.experts.17.mlp.gate_proj", None),
        ("model.layers.0.mlp.gate_proj", None),
        ("model.layers.0.mlp.experts", None),
    ],
)
def test_a_name_stands_for_one_expert_or_for_all(module: str, stacked: bool | None) -> None:
    assert is_stacked_name(module) is stacked


@pytest.mark.parametrize(
    ("modules", "layout"),
    [
        ({"0.attn.q_proj": FLAT}, None),
        ({"0.attn.q_proj": FLAT, "1.experts.0.up_proj": FLAT}, ExpertLayout.PER_EXPERT),
        ({"0.experts.gate_up_proj": stack(3, 3)}, ExpertLayout.STACKED),
        (
            {"0.experts.gate_up_proj": stack(1, 3), "0.experts.down_proj": stack(3, 1)},
            ExpertLayout.SHARED_OUTER,
        ),
        ({"0.experts.w1": stack(1, 3), "0.experts.w2": stack(3, 1)}, ExpertLayout.SHARED_OUTER),
        # one factor for all experts on both sides fits either
        (
            {"0.experts.up_proj": stack(1, 1), "1.experts.up_proj": stack(1, 3)},
            ExpertLayout.SHARED_OUTER,
        ),
        (
            {"0.experts.up_proj": stack(1, 1), "1.experts.up_proj": stack(3, 3)},
            ExpertLayout.STACKED,
        ),
        ({"0.experts.up_proj": stack(1, 1)}, ExpertLayout.STACKED),
    ],
)
def test_the_layout_is_that_of_all_modules(
    modules: dict[str, Factors], layout: ExpertLayout | None
) -> None:
    assert adapter(modules).expert_layout is layout


@pytest.mark.parametrize(
    ("modules", "witnesses"),
    [
        (
            # the first layer alone is valid
            {"0.experts.up_proj": stack(3, 3), "7.experts.up_proj": stack(1, 3)},
            "model.layers.0.experts.up_proj: experts stacked in one module; "
            "model.layers.7.experts.up_proj: experts stacked, with shared outer factors",
        ),
        (
            # the first one fits both of the others
            {
                "0.experts.up_proj": stack(1, 1),
                "1.experts.up_proj": stack(3, 3),
                "2.experts.up_proj": stack(1, 3),
            },
            "model.layers.1.experts.up_proj: experts stacked in one module; "
            "model.layers.2.experts.up_proj: experts stacked, with shared outer factors",
        ),
        (
            {"0.experts.up_proj": stack(3, 3), "7.experts.2.up_proj": FLAT},
            "model.layers.0.experts.up_proj: experts stacked in one module; "
            "model.layers.7.experts.2.up_proj: one module per expert",
        ),
        (
            {"0.experts.gate_up_proj": stack(1, 3), "0.experts.down_proj": stack(3, 3)},
            "model.layers.0.experts.down_proj: experts stacked in one module; "
            "model.layers.0.experts.gate_up_proj: experts stacked, with shared outer factors",
        ),
        (
            {"0.experts.0.up_proj": FLAT, "1.experts.up_proj": stack(1, 1)},
            "model.layers.0.experts.0.up_proj: one module per expert; "
            "model.layers.1.experts.up_proj: experts stacked in one module",
        ),
    ],
)
def test_two_layouts_are_refused_with_a_witness_of_each(
    modules: dict[str, Factors], witnesses: str
) -> None:
    message = f"adapter fr: experts must have the same layout in all layers (got {witnesses})"
    with pytest.raises(AdapterError, match=f"^{re.escape(message)}$"):
        adapter(modules)


@pytest.mark.parametrize(
    ("module", "part", "reason"),
    [
        ("up_proj", stack(3, 1), "may share lora_A among its experts, no other factor"),
        ("down_proj", stack(1, 3), "may share lora_B among its experts, no other factor"),
        ("up_proj", stack(3, 2), "must have one number of experts (got 3 and 2)"),
        ("up_proj", stack(0, 3), "must have one number of experts (got 0 and 3)"),
    ],
)
def test_a_stack_that_shares_the_inner_factor_is_refused(
    module: str, part: ExpertFactors, reason: str
) -> None:
    message = f"adapter fr: model.layers.0.experts.{module} {reason}"
    with pytest.raises(AdapterError, match=f"^{re.escape(message)}$"):
        adapter({f"0.experts.{module}": part})
