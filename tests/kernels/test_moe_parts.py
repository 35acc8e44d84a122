"""The part of a MoE layer that one rank holds, where the parts are as large as the whole."""

from __future__ import annotations

import re

import pytest
import torch

from lorakernels.common.quantised import Quantised
from lorakernels.dense.weights import LoRAFactors
from lorakernels.layers.gate_up import GateUp
from lorakernels.layers.moe import FusedMoELoRA
from lorakernels.layers.moe_partition import MoERank
from lorakernels.moe.weights import ExpertFactors

EXPERTS, HIDDEN, INTERMEDIATE = 3, 6, 4


@pytest.mark.parametrize("is_quantised", [False, True])
def test_a_rank_whose_part_is_all_padding_holds_zeros(is_quantised: bool) -> None:
    values = (torch.ones(EXPERTS, 2 * INTERMEDIATE, HIDDEN), torch.ones(EXPERTS, HIDDEN, 4))
    quantised = [Quantised(w.to(torch.float8_e4m3fn), torch.ones(w.shape[:2])) for w in values]
    for tp_rank in range(2):
        layer = FusedMoELoRA(
            *(quantised if is_quantised else values),
            gate_up=GateUp.HALVES,
            num_slots=1,
            rank=1,
            dtype=torch.float32,
            place=MoERank(tp_size=2, tp_rank=tp_rank),
            padded_intermediate=2 * INTERMEDIATE,
        )
        held = 1.0 - tp_rank
        assert torch.equal(layer.w13.float(), torch.full_like(values[0], held))
        assert torch.equal(layer.w2.float(), torch.full_like(values[1], held))


# with three experts on two ranks the second one holds a single expert
@pytest.mark.parametrize("ep_rank", [0, 1])
@pytest.mark.parametrize("name", ["up_proj", "down_proj"])
def test_every_rank_refuses_an_outer_factor_that_experts_do_not_share(
    name: str, ep_rank: int
) -> None:
    layer = FusedMoELoRA(
        torch.ones(EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        torch.ones(EXPERTS, HIDDEN, INTERMEDIATE),
        gate_up=GateUp.HALVES,
        num_slots=1,
        rank=1,
        shared_outer=True,
        place=MoERank(ep_size=2, ep_rank=ep_rank),
    )
    inputs, width = (INTERMEDIATE, HIDDEN) if name == "down_proj" else (HIDDEN, INTERMEDIATE)
    part = ExpertFactors(torch.ones(EXPERTS, 1, inputs), torch.ones(EXPERTS, width, 1), 1.0)
    side = "b" if name == "down_proj" else "a"
    message = f"{side} of {name} must be shared by all experts, as in this layer"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        layer.load_adapter(0, {f"experts.{name}": part})


@pytest.mark.parametrize("ep_rank", [0, 1])
@pytest.mark.parametrize("expert", range(EXPERTS))
@pytest.mark.parametrize(
    ("a", "b", "scale", "message"),
    [
        ((1, HIDDEN + 1), (INTERMEDIATE, 1), 1.0, "a of experts.{}.up_proj must be"),
        ((1, HIDDEN), (INTERMEDIATE + 1, 1), 1.0, "b of experts.{}.up_proj must be"),
        ((2, HIDDEN), (INTERMEDIATE, 2), 1.0, "up_proj"),
        ((1, HIDDEN), (INTERMEDIATE, 1), 2.0, "up_proj"),
    ],
)
def test_every_rank_refuses_a_wrong_expert_of_any_rank(
    a: tuple[int, int], b: tuple[int, int], scale: float, message: str, expert: int, ep_rank: int
) -> None:
    layer = FusedMoELoRA(
        torch.ones(EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        torch.ones(EXPERTS, HIDDEN, INTERMEDIATE),
        num_slots=1,
        rank=2,
        place=MoERank(ep_size=2, ep_rank=ep_rank),
    )
    right = LoRAFactors(torch.ones(1, HIDDEN), torch.ones(INTERMEDIATE, 1), 1.0)
    parts = {f"experts.{e}.up_proj": right for e in range(EXPERTS)}
    layer.load_adapter(0, parts)
    wrong = LoRAFactors(torch.ones(a), torch.ones(b), scale)
    with pytest.raises(ValueError, match=re.escape(message.format(expert))):
        layer.load_adapter(0, parts | {f"experts.{expert}.up_proj": wrong})
