"""All tensors of a layer are looked for where they were when graphs were captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.common.quantised import Quantised  # noqa: E402
from lorakernels.dense.weights import SlotWeights  # noqa: E402
from lorakernels.layers.expert_placement import ExpertPlacement  # noqa: E402
from lorakernels.layers.gate_up import GateUp  # noqa: E402
from lorakernels.layers.gdn import DeltaNetHeads, GatedDeltaNetInputProjection  # noqa: E402
from lorakernels.layers.moe import FusedMoELoRA  # noqa: E402
from lorakernels.layers.moe_partition import MoERank  # noqa: E402
from lorakernels.layers.partition import Slice  # noqa: E402
from lorakernels.layers.wrapped import WrappedLoRALinear  # noqa: E402
from lorakernels.serving.buffers import LoRALayer, ServingBuffers  # noqa: E402
from lorakernels.serving.graph_runner import GraphRunner  # noqa: E402
from lorakernels.serving.inputs import StepInputs  # noqa: E402

SIZES: dict[str, Any] = {"num_slots": 2, "rank": 4}
FP8 = torch.float8_e4m3fn


def quantised(*shape: int) -> Quantised:
    return Quantised(torch.zeros(shape).to(FP8), torch.ones(shape[:-1]))


def delta_net() -> GatedDeltaNetInputProjection:
    modules = DeltaNetHeads(key_heads=1, value_heads=1, key_size=4, value_size=4).grouped()
    qkvz, ba = (sum(module.width for module in part) for part in (modules.qkvz, modules.ba))
    return GatedDeltaNetInputProjection(
        quantised(qkvz, 16), torch.zeros(ba, 16), modules=modules, **SIZES
    )


def experts() -> FusedMoELoRA:
    # of four experts in six places, three of which are here
    placement = ExpertPlacement.of_places([0, 1, 2, 3, 0, 1], 2, num_experts=4)
    return FusedMoELoRA(
        quantised(4, 16, 16),
        quantised(4, 16, 8),
        gate_up=GateUp.HALVES,
        dtype=torch.float32,
        place=MoERank(2, 0),
        placement=placement,
        **SIZES,
    )


class Base(nn.Module):
    """A linear whose weight is no parameter, and that keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(8, 16))
        self.seen = torch.zeros(1)

    def forward(self, rows: Tensor) -> Tensor:
        self.seen = rows
        return rows @ self.weight.T


def wrapped() -> WrappedLoRALinear:
    slots = SlotWeights(
        slice_widths=[8], in_features=16, dtype=torch.float32, device="cpu", **SIZES
    )
    return WrappedLoRALinear(Base(), slots, slices=[Slice("q", 8)], in_features=16)


def captured(layer: LoRALayer) -> GraphRunner:
    buffers = ServingBuffers.reserve({"own": layer}, max_tokens=4, top_k=2)
    inputs = StepInputs({}, max_tokens=4, device="cpu")
    runner = GraphRunner(lambda rows: torch.zeros(rows, 1), inputs, buffers, sizes=[2])
    runner.capture()
    runner.check_addresses()
    return runner


def moved_scales_of_a_delta_net(layer: Any) -> None:
    layer.scales[0] = layer.scales[0].clone()


def moved_scales_of_w13(layer: Any) -> None:
    layer.w13_scales = layer.w13_scales.clone()


def moved_scales_of_w2(layer: Any) -> None:
    layer.w2_scales = layer.w2_scales.clone()


def moved_map(layer: Any) -> None:
    layer.routing.expert_map = layer.routing.expert_map.clone()


def moved_replicas(layer: Any) -> None:
    layer.routing.replicas.counts = layer.routing.replicas.counts.clone()


def moved_buffer(layer: Any) -> None:
    layer.base.weight = layer.base.weight.clone()


@pytest.mark.parametrize(
    ("make", "move", "name"),
    [
        (delta_net, moved_scales_of_a_delta_net, "scales.0"),
        (experts, moved_scales_of_w13, "w13_scales"),
        (experts, moved_scales_of_w2, "w2_scales"),
        (experts, moved_map, "routing.expert_map"),
        (experts, moved_replicas, "routing.replicas.counts"),
        (wrapped, moved_buffer, "base.weight"),
    ],
)
def test_a_tensor_that_is_no_parameter_is_named_when_it_has_moved(
    graphs: Any, make: Callable[[], LoRALayer], move: Callable[[Any], None], name: str
) -> None:
    layer = make()
    runner = captured(layer)
    move(layer)
    with pytest.raises(RuntimeError, match=f"^{name} of own was replaced by another tensor"):
        runner.check_addresses()


def test_what_a_base_keeps_of_its_last_step_may_be_another_tensor(graphs: Any) -> None:
    layer = wrapped()
    runner = captured(layer)
    layer.base(torch.ones(3, 16))
    runner.check_addresses()


def test_a_tensor_that_was_removed_is_named(graphs: Any) -> None:
    layer = experts()
    runner = captured(layer)
    layer.w2_scales = None
    with pytest.raises(RuntimeError, match=r"^w2_scales of own was removed after"):
        runner.check_addresses()
