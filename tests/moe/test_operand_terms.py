"""Every operand of a MoE layer and of its parts, wrong in one respect at a time: refused by name,
before anything is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.common.quantised import Quantised, quantise_rows
from lorakernels.layers.gate_up import GateUp
from lorakernels.layers.moe import FusedMoELoRA, MoEScratch
from lorakernels.moe.align.metadata import PairMetadata
from lorakernels.moe.delta.ops import MoEPath, MoEWorkspace, moe_delta
from lorakernels.moe.layer.check import check_layer, check_operands
from lorakernels.moe.layer.ops import (
    Activation,
    ExpertBuffers,
    ExpertLoRA,
    run_experts,
)
from lorakernels.moe.layer.types import LayerOperands, RouterWeight
from lorakernels.moe.weights import ExpertWeights

EXPERTS, HIDDEN, INTER, SLOTS, ROWS, TOP_K = 3, 4, 6, 2, 2, 2
PAIRS = ROWS * TOP_K


def make_pairs(**changes: Any) -> PairMetadata:
    sizes: dict[str, Any] = {"max_tokens": ROWS, "top_k": TOP_K, "num_experts": EXPERTS}
    sizes |= {"max_slots": SLOTS, "with_base": True, "device": "cpu"} | changes
    pairs = PairMetadata(**sizes)
    if pairs.step.device.type == "cpu" and not changes:
        batch = BatchMetadata(max_tokens=ROWS, max_slots=SLOTS, device="cpu")
        batch.prepare(torch.zeros(ROWS, dtype=torch.int32))
        pairs.prepare(torch.tensor([[0, 1]] * ROWS, dtype=torch.int32), batch)
    return pairs


def make_slots(in_features: int, *widths: int, **changes: Any) -> ExpertWeights:
    fields = {"num_slots": SLOTS, "num_experts": EXPERTS, "rank": 1, "dtype": torch.float32}
    fields |= {"device": "cpu", "in_features": in_features, "slice_widths": widths} | changes
    return ExpertWeights(**fields)


def of_8_bits(weight: Tensor) -> Quantised:
    rows = quantise_rows(weight.flatten(0, 1))
    return Quantised(rows.values.view(weight.shape), rows.scales.view(weight.shape[:2]))


def make_operands(*, quantised: bool = False) -> dict[str, Any]:
    x, w13 = torch.ones(ROWS, HIDDEN), torch.ones(EXPERTS, 2 * INTER, HIDDEN)
    w2 = torch.ones(EXPERTS, HIDDEN, INTER)
    return {
        "x": x,
        "w13": of_8_bits(w13) if quantised else w13,
        "w2": of_8_bits(w2) if quantised else w2,
        "w13_bias": torch.ones(EXPERTS, 2 * INTER),
        "w2_bias": torch.ones(EXPERTS, HIDDEN),
        "quantised_x": quantise_rows(x) if quantised else None,
        "router_weights": torch.ones(ROWS, TOP_K),
        "act": torch.zeros(PAIRS, INTER),
        "y": torch.zeros(PAIRS, HIDDEN),
        "out": torch.zeros(ROWS, HIDDEN),
        "activation": Activation.SILU_GATED,
        "router_weight": RouterWeight.ON_OUTPUT,
    }


NAMES = {"act": "act of buffers", "y": "y of buffers"}
WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "a row less": lambda t: t[:-1].contiguous(),
    "a column more": lambda t: t.new_ones(*t.shape[:-1], t.shape[-1] + 1),
    "a column less": lambda t: t[..., :-1].contiguous(),
    "an axis more": lambda t: t[..., None],
    "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "fp64": lambda t: t.double(),
    "fp16": lambda t: t.half(),
    "another device": lambda t: t.to("meta"),
}


# the number of axes of w2 is checked where a graph is traced
def wrong(*names: str) -> list[tuple[str, str]]:
    return [p for p in product(names, WRONG) if p != ("w2", "an axis more")]


OPERANDS = ("w13", "w2", "w13_bias", "w2_bias", "router_weights", "act", "y", "out")


@pytest.mark.parametrize(("name", "what"), wrong(*OPERANDS))
def test_each_operand_of_a_layer_is_checked_for_each_property(name: str, what: str) -> None:
    operands = make_operands()
    operands[name] = WRONG[what](operands[name])
    # the last axis of w2 is the size of the layer
    of_layer = name == "w2" and "column" in what
    shown = "w13" if of_layer else NAMES.get(name, name)
    with pytest.raises(ValueError, match=f"^{shown} must be "):
        check_operands(LayerOperands(**operands), make_pairs().tables)


@pytest.mark.parametrize("w2", [torch.ones(HIDDEN, INTER), torch.ones(EXPERTS, HIDDEN, INTER, 1)])
def test_weights_with_other_than_three_axes_are_refused(w2: Tensor) -> None:
    with pytest.raises(ValueError, match="w2 must have three dimensions"):
        check_layer(LayerOperands(**(make_operands() | {"w2": w2})), None)


@pytest.mark.parametrize("name", ["w13_bias", "w2_bias"])
def test_a_bias_of_an_input_that_is_weighted_is_refused(name: str) -> None:
    operands = make_operands() | {"router_weight": RouterWeight.ON_INPUT}
    check_layer(LayerOperands(**(operands | {"w13_bias": None, "w2_bias": None})), None)
    other = "w2_bias" if name == "w13_bias" else "w13_bias"
    with pytest.raises(ValueError, match=r"^biases must be None with router weights on the input$"):
        check_layer(LayerOperands(**(operands | {other: None})), None)


@pytest.mark.parametrize("what", ["a row less", "a column more", "transposed", "another device"])
def test_the_input_of_a_layer_is_checked_for_each_property(what: str) -> None:
    operands = make_operands()
    operands["x"] = WRONG[what](operands["x"])
    with pytest.raises(ValueError, match=r"^x must be "):
        check_operands(LayerOperands(**operands), make_pairs().tables)


SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "a row less": lambda t: t[:-1].contiguous(),
    "an axis more": lambda t: t[..., None],
    "every second": lambda t: torch.ones(*t.shape, 2)[..., 0],
    "fp16": lambda t: t.half(),
    "another device": lambda t: t.to("meta"),
}


@pytest.mark.parametrize("what", SCALES)
@pytest.mark.parametrize("name", ["w13", "w2", "quantised_x"])
def test_the_scales_of_each_quantised_operand_are_checked(name: str, what: str) -> None:
    operands = make_operands(quantised=True)
    given = operands[name]
    operands[name] = Quantised(given.values, SCALES[what](given.scales))
    with pytest.raises(ValueError, match=f"^scales of {name} must be "):
        check_operands(LayerOperands(**operands), make_pairs().tables)


@pytest.mark.parametrize(("name", "what"), wrong("w2", "quantised_x"))
def test_the_values_of_each_quantised_operand_are_checked(name: str, what: str) -> None:
    operands = make_operands(quantised=True)
    given = operands[name]
    # bytes, because torch has few operations for 8-bit floats
    changed = WRONG[what](given.values.view(torch.uint8))
    values = changed.view(given.values.dtype) if changed.dtype == torch.uint8 else changed
    operands[name] = Quantised(values, given.scales)
    shown = "w13" if name == "w2" and "column" in what else name
    # there is one scale for each row of values
    with pytest.raises(ValueError, match=f"^(scales of )?{shown} must be "):
        check_operands(LayerOperands(**operands), make_pairs().tables)


@pytest.mark.parametrize("changed", ["w13", "w2", "quantised_x"])
@pytest.mark.parametrize("quantised", [False, True])
def test_all_or_no_operands_of_a_product_are_quantised(changed: str, quantised: bool) -> None:
    operands = make_operands(quantised=quantised)
    operands[changed] = make_operands(quantised=not quantised)[changed]
    with pytest.raises(ValueError, match="w13, w2 and x must all be quantised or none of them"):
        check_layer(LayerOperands(**operands), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w13": make_slots(HIDDEN + 1, INTER, INTER)}, "adapters of w13 must map 4 to [6, 6]"),
        ({"w13": make_slots(HIDDEN, INTER)}, "adapters of w13 must map 4 to [6, 6] (got 4 to [6])"),
        ({"w13": make_slots(HIDDEN, 2 * INTER)}, "adapters of w13 must map 4 to [6, 6]"),
        ({"w13": make_slots(HIDDEN, INTER, INTER - 1)}, "adapters of w13 must map 4 to [6, 6]"),
        ({"w2": make_slots(INTER + 1, HIDDEN)}, "adapters of w2 must map 6 to [4] (got 7 to [4])"),
        ({"w2": make_slots(INTER, HIDDEN - 1)}, "adapters of w2 must map 6 to [4] (got 6 to [3])"),
        (
            {"w13": make_slots(HIDDEN, INTER, INTER, dtype=torch.float16)},
            "adapters of w13 must be torch.float32 on cpu like x (got torch.float16 on cpu)",
        ),
        (
            {"w2": make_slots(INTER, HIDDEN, dtype=torch.bfloat16)},
            "adapters of w2 must be torch.float32 on cpu like x (got torch.bfloat16 on cpu)",
        ),
        (
            {"w2": make_slots(INTER, HIDDEN, device="meta")},
            "adapters of w2 must be torch.float32 on cpu like x (got torch.float32 on meta)",
        ),
        (
            {"w13": make_slots(HIDDEN, INTER, INTER, num_slots=3)},
            "adapters of w13 must have 2 slot",
        ),
        (
            {"w13": make_slots(HIDDEN, INTER, INTER, num_experts=2)},
            "adapters of w13 must have 2 sl",
        ),
        ({"w2": make_slots(INTER, HIDDEN, num_slots=1)}, "adapters of w2 must have 2 slots and 3"),
        (
            {"w2": make_slots(INTER, HIDDEN, num_experts=4)},
            "adapters of w2 must have 2 slots and 3",
        ),
    ],
)
def test_each_wrong_property_of_the_adapters_of_a_layer_is_refused(
    changes: dict[str, ExpertWeights], message: str
) -> None:
    own = {"w13": make_slots(HIDDEN, INTER, INTER), "w2": make_slots(INTER, HIDDEN)}
    workspace = MoEWorkspace(list(own.values()), max_tokens=ROWS, top_k=TOP_K)
    lora = ExpertLoRA(**(own | changes), workspace=workspace)
    operands, out = make_operands(), torch.full((ROWS, HIDDEN), 7.0)
    buffers = ExpertBuffers(
        max_tokens=ROWS,
        top_k=TOP_K,
        hidden=HIDDEN,
        intermediate=INTER,
        dtype=torch.float32,
        device="cpu",
    )
    given = [operands[name] for name in ("x", "w13", "w2", "router_weights")]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        run_experts(*given, make_pairs(), buffers, out, lora=lora)
    assert (out == 7).all()


@pytest.mark.parametrize("size", ["max_tokens", "top_k", "num_experts", "max_slots"])
def test_pairs_of_nothing_are_refused(size: str) -> None:
    with pytest.raises(ValueError, match=rf"^{size} must be at least 1 \(got 0\)$"):
        make_pairs(**{size: 0})
    assert getattr(make_pairs(**{size: 1}), size) == 1


def test_every_table_of_pairs_is_int32() -> None:
    pairs = make_pairs()
    assert {table.dtype for table in [*pairs.buffers, pairs.step]} == {torch.int32}


@pytest.mark.parametrize("size", ["max_tokens", "top_k"])
def test_a_workspace_for_nothing_is_refused(size: str) -> None:
    sizes = {"max_tokens": 1, "top_k": 1}
    layer = make_slots(HIDDEN, INTER)
    MoEWorkspace([layer], **sizes)
    with pytest.raises(ValueError, match=rf"^{size} must be at least 1 \(got 0\)$"):
        MoEWorkspace([layer], **(sizes | {size: 0}))
    with pytest.raises(ValueError, match="layers must name at least one layer"):
        MoEWorkspace([], **sizes)


@pytest.mark.parametrize("out", [(PAIRS,), (PAIRS, INTER, 1), (1, PAIRS, INTER)])
def test_an_output_of_pairs_that_is_no_matrix_is_refused(out: tuple[int, ...]) -> None:
    layer = make_slots(HIDDEN, INTER)
    workspace = MoEWorkspace([layer], max_tokens=ROWS, top_k=TOP_K)
    with pytest.raises(ValueError, match=r"^out must be \[4, 6\]"):
        moe_delta(torch.ones(ROWS, HIDDEN), layer, make_pairs(), workspace, torch.ones(out))


def test_a_workspace_of_exactly_the_size_of_a_step_is_enough_for_pairs() -> None:
    layer = make_slots(HIDDEN, INTER)
    workspace = MoEWorkspace([layer], max_tokens=ROWS, top_k=TOP_K)
    workspace.shrunk = workspace.shrunk[:PAIRS]
    x, out = torch.ones(ROWS, HIDDEN), torch.ones(PAIRS, INTER)
    moe_delta(x, layer, make_pairs(), workspace, out, path=MoEPath.TWO_KERNEL)
    assert (out == 1).all()


W13, W2 = (EXPERTS, 2 * INTER, HIDDEN), (EXPERTS, HIDDEN, INTER)
ONES = torch.ones


@pytest.mark.parametrize(
    ("w13", "w2", "options", "message"),
    [
        (ONES(W13), ONES(W2)[0], {}, "w2 must be [experts, hidden, intermediate]"),
        (ONES(W13), ONES(*W2, 1), {}, "w2 must be [experts, hidden, intermediate]"),
        (ONES(W13)[:2], ONES(W2), {}, "w13 must be [3, 12, 4]"),
        (ONES(W13)[:, :-1], ONES(W2), {}, "w13 must be [3, 12, 4]"),
        (ONES(W13)[..., :-1], ONES(W2), {}, "w13 must be [3, 12, 4]"),
        (ONES(W13).half(), ONES(W2), {}, "w13 and w2 must have one dtype and one device"),
        (ONES(W13), ONES(W2, device="meta"), {}, "w13 and w2 must have one dtype and one device"),
        (of_8_bits(ONES(W13)), of_8_bits(ONES(W2)).values, {}, "w13 and w2 must both be quantised"),
        (of_8_bits(ONES(W13)).values, of_8_bits(ONES(W2)), {}, "w13 and w2 must both be quantised"),
        (
            of_8_bits(ONES(W13)),
            Quantised(of_8_bits(ONES(W2)).values, ONES(EXPERTS, 1)),
            {},
            "scales of w2 must be [3, 4] (got [3, 1])",
        ),
        (ONES(W13), ONES(W2), {"projections": ("down",)}, "projections must be different names"),
        (ONES(W13), ONES(W2), {"projections": tuple("abcd")}, "projections must be different"),
        (ONES(W13), ONES(W2), {"projections": tuple("aab")}, "projections must be different"),
        (ONES(W13), ONES(W2), {"dtype": torch.float16}, "dtype must be torch.float32 like the"),
    ],
)
def test_each_mistake_in_the_weights_of_a_layer_is_refused(
    w13: Tensor | Quantised, w2: Tensor | Quantised, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        FusedMoELoRA(w13, w2, gate_up=GateUp.HALVES, num_slots=1, rank=1, **options)


def test_layers_of_several_devices_share_no_workspace() -> None:
    layers = [make_slots(HIDDEN, INTER), make_slots(HIDDEN, INTER, device="meta")]
    for given in (layers, layers[::-1]):
        with pytest.raises(ValueError, match=r"^layers must be on one device \(got (cpu|meta), "):
            MoEWorkspace(given, max_tokens=1, top_k=1)


def test_a_scratch_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one hidden and intermediate size \(got no layer\)"):
        MoEScratch([], max_tokens=1, top_k=1)
