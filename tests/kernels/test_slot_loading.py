"""Where the factors of a load may come from, and what a load leaves behind."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lorakernels.common.stacked_weights import check_scale
from lorakernels.dense.weights import LoRAFactors, SlotWeights
from lorakernels.layers.linear import LoRALinear
from lorakernels.layers.partition import Slice
from lorakernels.moe.weights import ExpertFactors, ExpertWeights

K, WIDTH, RANK = 6, 4, 3


def fresh(device: str = "cpu") -> SlotWeights:
    return SlotWeights(
        num_slots=2,
        slice_widths=(WIDTH,),
        in_features=K,
        rank=RANK,
        dtype=torch.float32,
        device=device,
    )


def draw(seed: int = 0, rank: int = RANK) -> LoRAFactors:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(*s, generator=generator) for s in ((rank, K), (WIDTH, rank)))
    return LoRAFactors(a, b, 0.5)


def trainable(factors: LoRAFactors) -> LoRAFactors:
    return LoRAFactors(nn.Parameter(factors.a), nn.Parameter(factors.b), factors.scale)


def buffers(weights: SlotWeights | ExpertWeights) -> list[Tensor]:
    return [t.clone() for t in weights.tensors]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_an_adapter_of_parameters_leaves_no_history_and_is_freed() -> None:
    weights, given = fresh(), trainable(draw())
    gone = weakref.ref(given.a)
    weights.load(0, [given])
    assert not any(tensor.requires_grad for tensor in weights.tensors)
    del given
    assert gone() is None


def test_a_layer_takes_an_adapter_of_parameters_like_any_other() -> None:
    linear = LoRALinear(torch.zeros(WIDTH, K), slices=(Slice("q", WIDTH),), num_slots=1, rank=RANK)
    staged = linear.stage({"q": trainable(draw())})
    assert staged[0] is not None
    assert not staged[0].a.requires_grad
    linear.commit(0, staged)
    assert torch.equal(linear.slots.a[0, 0], draw().a)
    assert not linear.slots.a.requires_grad


def test_factors_that_are_views_of_the_slot_itself_are_loaded_as_they_were() -> None:
    weights, wanted = fresh(), fresh()
    weights.load(1, [draw()])
    wanted.load(1, [LoRAFactors(draw().a, draw().b, 2.0)])
    weights.load(1, [LoRAFactors(weights.a[1, 0], weights.b[1], 2.0)])
    assert same(buffers(weights), buffers(wanted))


def test_experts_that_are_views_of_the_slot_itself_are_loaded_as_they_were() -> None:
    weights = ExpertWeights(
        num_slots=1,
        num_experts=2,
        slice_widths=(WIDTH,),
        in_features=K,
        rank=RANK,
        dtype=torch.float32,
        device="cpu",
    )
    a, b = torch.randn(2, RANK, K), torch.randn(2, WIDTH, RANK)
    weights.load(0, [ExpertFactors(a, b, 1.0)])
    before = buffers(weights)
    weights.load(0, [ExpertFactors(weights.a[0, :, 0], weights.b[0], 1.0)])
    assert same(buffers(weights), before)


def test_slots_that_are_made_in_inference_mode_are_loaded_outside_of_it() -> None:
    with torch.inference_mode():
        weights = fresh()
    wanted = fresh()
    for slots in (weights, wanted):
        slots.load(1, [draw()])
    assert same(buffers(weights), buffers(wanted))
    weights.reset(1)
    assert same(buffers(weights), buffers(fresh()))


@pytest.fixture
def no_default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("no_default_device")
def test_the_default_device_of_torch_does_not_matter() -> None:
    with pytest.raises(ValueError, match="must not vanish in float32"):
        check_scale("q", 1e-50)
    weights = fresh()
    weights.load(0, [LoRAFactors(*(torch.ones(s, device="cpu") for s in ((2, K), (WIDTH, 2))), 2)])
    assert weights.scales.tolist() == [[2.0], [0.0]]


@pytest.fixture
def default_dtype_of_16_bits() -> Iterator[None]:
    torch.set_default_dtype(torch.float16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("default_dtype_of_16_bits")
def test_the_default_dtype_of_torch_does_not_matter() -> None:
    weights = fresh()
    given = draw()
    for scale in (1e5, 1e-10):
        weights.load(0, [LoRAFactors(given.a, given.b, scale)])
        assert weights.scales[0].item() == pytest.approx(scale)


class Copies(TorchDispatchMode):
    """The operations that read a number which the host has just put into a tensor, and those that
    clone one."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[str] = []
        self.cloned = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].dim() == 0:
            self.copied.append(str(func))
        self.cloned += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


def test_a_load_copies_no_single_number_from_the_host() -> None:
    weights = fresh()
    with Copies() as seen:
        weights.load(0, [draw()])
    assert seen.copied == []
    assert weights.ranks[0].tolist() == [RANK]


def test_only_factors_in_the_buffers_are_copied_before_they_are_loaded() -> None:
    weights, given = fresh(), draw()
    with Copies() as seen:
        weights.load(0, [given])
        assert seen.cloned == 0
        weights.load(0, [LoRAFactors(weights.a[0, 0], given.b, 1.0)])
        assert seen.cloned == 1


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU does not wait")


@needs_gpu
def test_a_load_from_the_device_never_waits_and_can_be_captured() -> None:
    weights = fresh("cuda")
    given = draw()
    on_device = LoRAFactors(given.a.cuda(), given.b.cuda(), given.scale)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        weights.load(0, [on_device])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights.load(1, [on_device])
    weights.reset(1)
    graph.replay()
    for tensor in weights.tensors:
        assert torch.equal(tensor[0], tensor[1])
