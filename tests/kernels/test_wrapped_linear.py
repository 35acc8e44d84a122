"""Adapters around a linear layer that exists, against the layer that owns its weight."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loragate.core.machine import detect_machine, select_interpreter

select_interpreter()

from lorakernels.adapters.adapter import Adapter  # noqa: E402
from lorakernels.adapters.slots import AdapterSlots  # noqa: E402
from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace  # noqa: E402
from lorakernels.dense.weights import LoRAFactors, SlotWeights  # noqa: E402
from lorakernels.layers.linear import LoRALinear  # noqa: E402
from lorakernels.layers.partition import Parallel, Slice  # noqa: E402
from lorakernels.layers.sharding import sharded_slots  # noqa: E402
from lorakernels.layers.wrapped import WrappedLoRALinear  # noqa: E402

DEVICE = detect_machine().device
K, SLOTS, RANK = 24, 2, 4
SLICES = (Slice("q", 12), Slice("k", 8))
FUSED = {"qk": ("q", "k")}
ROWS = torch.tensor([1, -1, 0, 1, -1], dtype=torch.int32)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def slots(widths: tuple[int, ...] = (12, 8), in_features: int = K) -> SlotWeights:
    return SlotWeights(
        num_slots=SLOTS,
        slice_widths=widths,
        in_features=in_features,
        rank=RANK,
        dtype=torch.float32,
        device=DEVICE,
    )


def wrapped(base: Callable[[Tensor], Any], own: SlotWeights | None = None) -> WrappedLoRALinear:
    return WrappedLoRALinear(base, own or slots(), slices=SLICES, in_features=K, fused=FUSED)


def linear() -> nn.Linear:
    layer = nn.Linear(K, 20, device=DEVICE)
    layer.weight.data, layer.bias.data = randn(20, K, seed=1), randn(20, seed=2)
    return layer


def factors(width: int, seed: int) -> LoRAFactors:
    return LoRAFactors(randn(RANK, K, seed=seed), randn(width, RANK, seed=seed + 1), 0.7)


def serve(layer: Any, x: Tensor, rows: Tensor = ROWS) -> Tensor:
    metadata = BatchMetadata(max_tokens=8, max_slots=SLOTS, device=DEVICE)
    metadata.prepare(rows)
    out: Tensor = layer(x, metadata, DenseWorkspace([layer.slots], max_tokens=8))
    return out


def test_a_wrapped_linear_gives_what_the_layer_with_its_weight_gives() -> None:
    base, x = linear(), randn(len(ROWS), K, seed=3)
    layer = wrapped(base)
    owning = LoRALinear(
        base.weight, base.bias, slices=SLICES, num_slots=SLOTS, rank=RANK, fused=FUSED
    )
    for each in (layer, owning):
        each.load_adapter(0, {"k": factors(8, 10)})
        each.load_adapter(1, {"qk": factors(20, 20)})
    assert torch.equal(serve(layer, x), serve(owning, x))
    assert not torch.allclose(serve(layer, x)[0], base(x)[0])


def test_the_weight_of_the_base_may_be_replaced_at_any_time() -> None:
    base, x = linear(), randn(len(ROWS), K, seed=3)
    layer = wrapped(base)
    base.weight.data = randn(20, K, seed=4)
    assert torch.equal(serve(layer, x)[ROWS < 0], base(x)[ROWS < 0])
    assert layer.base is base


def test_a_base_whose_weights_are_of_another_format_is_called_alone() -> None:
    values = randn(20, K, seed=5).to(torch.float8_e4m3fn)

    def quantised(x: Tensor) -> Tensor:
        return F.linear(x, values.float() * 0.5)

    layer, x = wrapped(quantised), randn(len(ROWS), K, seed=3)
    layer.load_adapter(1, {"q": factors(12, 10)})
    out, plain = serve(layer, x), quantised(x)
    assert torch.equal(out[ROWS < 1], plain[ROWS < 1])
    part = factors(12, 10)
    wanted = plain.double()[ROWS == 1]
    wanted[:, :12] += part.scale * (x[ROWS == 1].double() @ part.a.double().T) @ part.b.double().T
    torch.testing.assert_close(out[ROWS == 1].double(), wanted, rtol=1e-5, atol=1e-4)


def test_the_base_gets_rows_whatever_the_dimensions_of_the_input() -> None:
    shapes = []

    def base(x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        return x.new_zeros(len(x), 20)

    layer, x = wrapped(base), randn(2, 2, K, seed=3)
    layer.load_adapter(0, {"q": factors(12, 10)})
    rows = torch.tensor([-1, -1, 0, -1], dtype=torch.int32)
    out = serve(layer, x, rows)
    assert shapes == [(4, K)]
    assert out.shape == (2, 2, 20)
    assert out.view(4, 20).any(dim=1).tolist() == [False, False, True, False]


def test_the_result_has_no_gradient_although_the_base_has_parameters() -> None:
    layer = wrapped(linear())
    assert not serve(layer, randn(len(ROWS), K, seed=3)).requires_grad


def test_the_parameters_of_a_base_that_is_a_module_move_with_the_layer() -> None:
    layer = wrapped(linear())
    assert [name for name, _ in layer.named_parameters()] == ["base.weight", "base.bias"]
    assert not any(True for _ in wrapped(linear().forward).parameters())


def test_adapter_slots_load_an_adapter_into_a_wrapped_linear() -> None:
    layer, x = wrapped(linear()), randn(len(ROWS), K, seed=3)
    resident = AdapterSlots({"attn.qk": layer})
    adapter = Adapter("one", {"attn.q": factors(12, 10), "attn.k": factors(8, 20)})
    slot = resident.activate(adapter)
    changed = (serve(layer, x) != linear()(x)).any(dim=1)
    assert changed.tolist() == (slot == ROWS).tolist()


@pytest.mark.parametrize(("parallel", "rank"), [(Parallel.COLUMN, 1), (Parallel.ROW, 1)])
def test_an_adapter_is_cut_like_the_part_that_the_base_holds(parallel: Parallel, rank: int) -> None:
    cut = {"parallel": parallel, "tp_size": 2, "tp_rank": rank}
    is_column = parallel is Parallel.COLUMN
    own = slots((6, 4), K) if is_column else slots(in_features=K // 2)
    layer = WrappedLoRALinear(
        lambda x: x.new_zeros(len(x), own.out_features), own, slices=SLICES, in_features=K, **cut
    )
    part = factors(12, 10)
    layer.load_adapter(0, {"q": part})
    assert torch.equal(own.a[0, 0], part.a if is_column else part.a[:, K // 2 :])
    assert torch.equal(own.b[0, : own.slice_widths[0]], part.b[6:] if is_column else part.b)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (slots((12, 9)), "slices of [12, 8] and 24 input features, as this rank holds them"),
        (slots((20,)), "(got [20] and 24)"),
        (slots(in_features=K // 2), "(got [12, 8] and 12)"),
    ],
)
def test_slots_of_another_geometry_are_refused(own: SlotWeights, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        wrapped(linear(), own)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (lambda x: (x.new_zeros(len(x), 20), None), "base must return a tensor (got a tuple)"),
        (lambda x: x.new_zeros(len(x), 19), "out must have 20 columns (got 19)"),
        (lambda x: x.new_zeros(len(x) + 1, 20), "out must have 5 rows like x (got 6)"),
        (lambda x: x.new_zeros(len(x), 20).half(), "out must be torch.float32 like the weights"),
        (lambda x: x.new_zeros(1, 20).expand(len(x), 20), "out must not overlap itself"),
        (lambda x: x[:, :20], "out must not overlap x in memory"),
    ],
)
def test_a_result_that_no_delta_can_be_added_to_is_refused(
    base: Callable[[Tensor], Any], message: str
) -> None:
    layer = wrapped(base)
    with pytest.raises(ValueError, match=re.escape(message)):
        serve(layer, randn(len(ROWS), K, seed=3))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(5, K - 1), "x must have 24 columns (got 23)"),
        (torch.zeros(5, K + 1), "x must have 24 columns (got 25)"),
        (torch.zeros(5, K, dtype=torch.float16), "x must be torch.float32 like the weights"),
    ],
)
def test_an_input_that_does_not_fit_never_reaches_the_base(x: Tensor, message: str) -> None:
    def base(rows: Tensor) -> Tensor:
        raise AssertionError("the base was called")

    with pytest.raises(ValueError, match=re.escape(message)):
        serve(wrapped(base), x.to(DEVICE))


def test_sharded_slots_are_on_the_device_that_is_asked_for_whatever_the_default_is() -> None:
    with torch.device("meta"):
        slots = sharded_slots(
            num_slots=2,
            slices=(Slice("gate", 24), Slice("up", 36)),
            in_features=48,
            rank=4,
            dtype=torch.float32,
            device="cpu",
            parallel=Parallel.COLUMN,
            tp_size=2,
            tp_rank=0,
        )
    assert {tensor.device.type for tensor in (slots.a, slots.b, slots.ranks)} == {"cpu"}
