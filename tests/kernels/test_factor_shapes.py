"""Factors that fit but for one axis: what holds adapters refuses them, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.dense.weights import LoRAFactors, SlotWeights  # noqa: E402
from lorakernels.layers.gate_up import GateUp  # noqa: E402
from lorakernels.layers.gdn import (  # noqa: E402
    DeltaNetHeads,
    GatedDeltaNetInputProjection,
)
from lorakernels.layers.linear import LoRALinear  # noqa: E402
from lorakernels.layers.moe import FusedMoELoRA  # noqa: E402
from lorakernels.layers.partition import Slice  # noqa: E402
from lorakernels.moe.weights import ExpertFactors, ExpertWeights  # noqa: E402

Factors = LoRAFactors | ExpertFactors
Load = Callable[[Sequence[Factors]], None]

EXPERTS, RANK, IN = 3, 2, 5


def dense_factors(width: int, in_features: int = IN) -> LoRAFactors:
    return LoRAFactors(torch.ones(RANK, in_features), torch.ones(width, RANK), 0.5)


def expert_factors(
    width: int, in_features: int = IN, *, a: int = EXPERTS, b: int = EXPERTS
) -> ExpertFactors:
    return ExpertFactors(torch.ones(a, RANK, in_features), torch.ones(b, width, RANK), 0.5)


def slot_weights() -> tuple[Load, list[Factors], list[Tensor]]:
    weights = SlotWeights(
        num_slots=2, slice_widths=(6, 4), in_features=IN, rank=8, dtype=torch.float32, device="cpu"
    )
    given: list[Factors] = [dense_factors(6), dense_factors(4)]
    return lambda parts: weights.load(1, parts), given, list(weights.tensors)  # type: ignore[arg-type]


def expert_weights(shared_a: bool, shared_b: bool) -> tuple[Load, list[Factors], list[Tensor]]:
    weights = ExpertWeights(
        num_slots=2,
        num_experts=EXPERTS,
        slice_widths=(6, 4),
        in_features=IN,
        rank=8,
        dtype=torch.float32,
        device="cpu",
        shared_a=shared_a,
        shared_b=shared_b,
    )
    copies = {"a": 1 if shared_a else EXPERTS, "b": 1 if shared_b else EXPERTS}
    given: list[Factors] = [expert_factors(6, **copies), expert_factors(4, **copies)]
    return lambda parts: weights.load(1, parts), given, list(weights.tensors)  # type: ignore[arg-type]


def linear() -> tuple[Load, list[Factors], list[Tensor]]:
    slices = [Slice("q", 6), Slice("k", 4)]
    layer = LoRALinear(torch.ones(10, IN), slices=slices, num_slots=2, rank=8)
    given: list[Factors] = [dense_factors(6), dense_factors(4)]
    return (
        lambda parts: layer.load_adapter(1, dict(zip("qk", parts, strict=True))),  # type: ignore[arg-type]
        given,
        list(layer.slots.tensors),
    )


def delta_net() -> tuple[Load, list[Factors], list[Tensor]]:
    heads = DeltaNetHeads(key_heads=2, value_heads=4, key_size=4, value_size=8)
    modules = heads.grouped()
    layer = GatedDeltaNetInputProjection(
        torch.ones(80, IN), torch.ones(8, IN), modules=modules, num_slots=2, rank=8
    )
    names = [module.name for module in modules.all]
    given: list[Factors] = [dense_factors(module.width) for module in modules.all]
    return (
        lambda parts: layer.load_adapter(1, dict(zip(names, parts, strict=True))),  # type: ignore[arg-type]
        given,
        list(layer.slots.tensors),
    )


def experts() -> tuple[Load, list[Factors], list[Tensor]]:
    layer = FusedMoELoRA(
        torch.ones(EXPERTS, 12, IN),
        torch.ones(EXPERTS, IN, 6),
        num_slots=2,
        rank=8,
        gate_up=GateUp.HALVES,
    )
    names = tuple(f"experts.{name}_proj" for name in ("gate", "up", "down"))
    given: list[Factors] = [expert_factors(6), expert_factors(6), expert_factors(IN, 6)]
    tensors = [*layer.w13_slots.tensors, *layer.w2_slots.tensors]
    return (
        lambda parts: layer.load_adapter(1, dict(zip(names, parts, strict=True))),  # type: ignore[arg-type]
        given,
        tensors,
    )


HOLDERS = {
    "slots": slot_weights,
    **{
        f"experts, a shared: {a}, b shared: {b}": lambda a=a, b=b: expert_weights(a, b)
        for a in (False, True)
        for b in (False, True)
    },
    "linear layer": linear,
    "delta net": delta_net,
    "MoE layer": experts,
}


def misfits(factors: Factors) -> Iterator[tuple[str, Factors]]:
    """The factors with one axis of one of them longer or shorter by one."""
    for name in ("a", "b"):
        tensor: Tensor = getattr(factors, name)
        for axis in range(tensor.dim()):
            for size in (tensor.shape[axis] - 1, tensor.shape[axis] + 1):
                shape = list(tensor.shape)
                shape[axis] = size
                yield f"{name} {shape}", replace(factors, **{name: torch.full(shape, 2.0)})


@pytest.mark.parametrize("holder", HOLDERS)
def test_factors_that_misfit_in_one_axis_are_refused_and_change_nothing(holder: str) -> None:
    load, given, tensors = HOLDERS[holder]()
    load(given)
    before = [tensor.clone() for tensor in tensors]
    assert any(tensor.any() for tensor in before)
    accepted = []
    # other values than those in the slot
    others = [replace(factors, a=2 * factors.a, b=2 * factors.b) for factors in given]
    for index, factors in enumerate(given):
        for text, misfit in misfits(factors):
            try:
                load([*others[:index], misfit, *others[index + 1 :]])
            except ValueError:
                pass
            else:
                accepted.append(f"{index}: {text}")
            assert all(map(torch.equal, tensors, before)), text
    assert not accepted
