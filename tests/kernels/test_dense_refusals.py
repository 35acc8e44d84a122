"""What the operations of a linear layer refuse: one mistake at a time, by name and with nothing
changed; and what is exactly at a limit, which they take."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from lorakernels.batch.metadata import BatchMetadata
from lorakernels.dense.check import check_operands
from lorakernels.dense.ops import (
    DenseWorkspace,
    dense_delta,
    expand_from_tiles,
    shrink_in_tiles,
    shrunk_shape,
)
from lorakernels.dense.weights import LoRAFactors, SlotWeights
from lorakernels.layers.linear import LoRALinear
from lorakernels.layers.partition import Slice

ROWS, K, WIDTH, RANK, SLOTS = 3, 8, 6, 2, 2


def make_weights(device: str = "cpu") -> SlotWeights:
    weights = SlotWeights(
        num_slots=SLOTS,
        slice_widths=(WIDTH,),
        in_features=K,
        rank=RANK,
        dtype=torch.float32,
        device=device,
    )
    weights.load(0, [LoRAFactors(torch.ones(RANK, K), torch.ones(WIDTH, RANK), 1.0)])
    return weights


def make_batch(slots: int = SLOTS, rows: int = ROWS) -> BatchMetadata:
    batch = BatchMetadata(max_tokens=max(1, rows), max_slots=slots, device="cpu")
    batch.prepare(torch.zeros(rows, dtype=torch.int32))
    return batch


class Step:
    def __init__(self) -> None:
        self.weights, self.batch = make_weights(), make_batch()
        self.shape = shrunk_shape(ROWS, self.weights)
        self.workspace = DenseWorkspace([self.weights], max_tokens=ROWS)
        self.x, self.out = torch.ones(ROWS, K), torch.ones(ROWS, WIDTH)
        self.shrunk = torch.zeros(self.shape)

    def run(self, op: str, **changes: Any) -> None:
        x, out = changes.get("x", self.x), changes.get("out", self.out)
        batch, shrunk = changes.get("batch", self.batch), changes.get("shrunk", self.shrunk)
        if op == "delta":
            dense_delta(x, self.weights, batch, self.workspace, out)
        elif op == "shrink":
            shrink_in_tiles(x, self.weights, batch, shrunk)
        else:
            expand_from_tiles(shrunk, self.weights, batch, out)


WIDE = torch.ones(ROWS, K + WIDTH)
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(
        (op, {operand: tensor}, message)
        for op, operand, columns in (
            ("delta", "x", K),
            ("shrink", "x", K),
            ("delta", "out", WIDTH),
            ("expand", "out", WIDTH),
        )
        for tensor, message in (
            (torch.ones(ROWS * columns), "two dimensions (got shape"),
            (torch.ones(ROWS, columns, 1), "two dimensions (got shape"),
            (torch.ones(ROWS - 1, columns), "must have 3 rows"),
            (torch.ones(ROWS + 1, columns), "must have 3 rows"),
            (torch.ones(ROWS, columns - 1), f"{operand} must have {columns} columns"),
            (torch.ones(ROWS, columns + 1), f"{operand} must have {columns} columns"),
            (torch.ones(ROWS, columns).half(), f"{operand} must be torch.float32 like the weights"),
            (torch.ones(ROWS, columns, device="meta"), f"{operand} must be on cpu (got meta)"),
        )
        # with a tensor without data, torch does not call the operator at all
        if op != "delta" or tensor.device.type == "cpu"
    ),
    *(
        (op, {"batch": make_batch(slots=SLOTS + 1)}, "metadata must have at most 2 slots")
        for op in ("delta", "shrink", "expand")
    ),
    ("delta", {"x": WIDE[:, :K], "out": WIDE[:, K - 1 : K + WIDTH - 1]}, "out must not overlap x"),
    ("delta", {"out": torch.ones(1, WIDTH).expand(ROWS, WIDTH)}, "out must not overlap itself"),
    ("expand", {"out": torch.ones(1, WIDTH).expand(ROWS, WIDTH)}, "out must not overlap itself"),
]


@pytest.mark.parametrize(("op", "change", "message"), REFUSED)
def test_each_wrong_operand_of_a_step_is_refused_by_name(
    op: str, change: dict[str, Any], message: str
) -> None:
    step = Step()
    with pytest.raises(ValueError, match=re.escape(message)):
        step.run(op, **change)
    assert (step.out == 1).all()
    assert not step.shrunk.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change, message)
        for op, change, message in REFUSED
        if op == "delta" and "batch" not in change
    ],
)
def test_a_step_that_is_declared_to_have_no_adapter_refuses_the_same_operands(
    change: dict[str, Any], message: str
) -> None:
    step = Step()
    with step.batch.without_adapters(ROWS), pytest.raises(ValueError, match=re.escape(message)):
        step.run("delta", **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(0, K).half()}, "x must be torch.float32 like the weights"),
        ({"out": torch.ones(0, WIDTH).half()}, "out must be torch.float32 like the weights"),
        ({"x": torch.ones(0, K + 1)}, f"x must have {K} columns"),
        ({"out": torch.ones(0, WIDTH - 1)}, f"out must have {WIDTH} columns"),
        ({"out": torch.ones(1, WIDTH)}, "out must have 0 rows like x"),
    ],
)
def test_a_step_without_rows_refuses_operands_that_no_step_could_take(
    change: dict[str, Any], message: str
) -> None:
    step = Step()
    operands = {"x": torch.ones(0, K), "out": torch.ones(0, WIDTH)} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        step.run("delta", batch=make_batch(rows=0), **operands)


@pytest.mark.parametrize("name", ["x", "out"])
def test_operands_of_another_device_are_refused(name: str) -> None:
    step = Step()
    operands = {"x": step.x, "out": step.out}
    operands[name] = operands[name].to("meta")
    a, b = step.weights.a, step.weights.b
    with pytest.raises(ValueError, match=rf"^{name} must be on cpu \(got meta\)$"):
        check_operands(operands["x"], a, b, operands["out"])


def wrong_shrunk(splits: int, rows: int, ranks: int) -> dict[str, Tensor]:
    return {
        "one value for each row": torch.zeros(splits, rows, 1),
        "more rows": torch.zeros(splits, rows + 1, ranks),
        "more split-K partials": torch.zeros(splits + 1, rows, ranks),
        "no split-K partials": torch.zeros(rows, ranks),
        "bf16": torch.zeros(splits, rows, ranks, dtype=torch.bfloat16),
        "fp64": torch.zeros(splits, rows, ranks, dtype=torch.float64),
        "every second column": torch.zeros(splits, rows, 2 * ranks)[:, :, ::2],
        "transposed": torch.zeros(splits, ranks, rows).transpose(1, 2),
    }


@pytest.mark.parametrize("op", ["shrink", "expand"])
@pytest.mark.parametrize("what", wrong_shrunk(1, 1, 1))
def test_each_wrong_shrink_output_is_refused(op: str, what: str) -> None:
    step = Step()
    with pytest.raises(ValueError, match="shrunk must be contiguous float32"):
        step.run(op, shrunk=wrong_shrunk(*step.shape)[what])
    assert (step.out == 1).all()


def test_a_batch_of_fewer_slots_than_the_weights_have_is_served() -> None:
    step = Step()
    step.run("delta", batch=make_batch(slots=1))
    assert (step.out == 1 + RANK * K).all()


def test_a_workspace_of_exactly_the_size_of_a_step_is_enough() -> None:
    step = Step()
    size = step.shrunk.numel()
    step.workspace.shrunk = step.workspace.shrunk[:size]
    step.run("delta")
    assert (step.out == 1 + RANK * K).all()
    step.workspace.shrunk = step.workspace.shrunk[: size - 1]
    with pytest.raises(ValueError, match=rf"workspace must hold {size} values .* \(got {size - 1}"):
        step.run("delta")
    assert (step.out == 1 + RANK * K).all()


def test_a_step_without_rows_may_have_any_operands_of_no_rows() -> None:
    step, batch = Step(), make_batch(rows=0)
    # of one place, and with strides by which rows would overlap
    x, out = (torch.ones(K).as_strided((0, width), (1, 1)) for width in (K, WIDTH))
    step.run("delta", batch=batch, x=x, out=x[:, :WIDTH])
    step.run("delta", batch=batch, x=x, out=out)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DenseWorkspace([], max_tokens=1), "layers must name at least one layer"),
        (lambda: DenseWorkspace([make_weights()], max_tokens=0), "max_tokens must be at least 1"),
        (
            lambda: DenseWorkspace(
                [make_weights(), make_weights(device="meta"), make_weights()], max_tokens=1
            ),
            "layers must be on one device (got cpu, meta)",
        ),
        (lambda: BatchMetadata(max_tokens=0, max_slots=1, device="cpu"), "max_tokens must be"),
        (lambda: BatchMetadata(max_tokens=1, max_slots=0, device="cpu"), "max_slots must be"),
        (
            lambda: make_batch().prepare(torch.zeros(1, dtype=torch.int32, device="meta")),
            "token_slots must be on cpu (got meta)",
        ),
        (
            lambda: make_batch().prepare(torch.tensor(0, dtype=torch.int32)),
            "token_slots must be int32 with one dimension",
        ),
        (
            lambda: make_batch().prepare(torch.zeros(1, dtype=torch.int32), num_rows=ROWS + 1),
            "token_slots may have 3 rows (got 4)",
        ),
    ],
)
def test_what_cannot_hold_a_batch_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_a_batch_may_be_as_large_as_its_tables_and_no_larger_than_its_rows() -> None:
    batch = make_batch()
    ids = torch.tensor([SLOTS - 1, -1], dtype=torch.int32)
    for rows in (2, ROWS):
        batch.prepare(ids, num_rows=rows)
        assert batch.num_rows == rows
        assert batch.token_slots.tolist() == [SLOTS - 1, -1, -1]
    smallest = BatchMetadata(max_tokens=1, max_slots=1, device="cpu")
    smallest.prepare(torch.zeros(1, dtype=torch.int32))
    assert smallest.tile_rows[smallest.tile_rows >= 0].tolist() == [0]


def make_linear(weight: Tensor, bias: Tensor | None = None) -> LoRALinear:
    return LoRALinear(weight, bias, slices=(Slice("q", WIDTH),), num_slots=1, rank=RANK)


@pytest.mark.parametrize("shape", [(WIDTH,), (WIDTH, K, 1), (WIDTH + 1, K), (WIDTH - 1, K)])
def test_a_weight_that_is_no_matrix_of_the_slices_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"weight must be \[6, in_features\]"):
        make_linear(torch.ones(shape))


@pytest.mark.parametrize("shape", [(WIDTH, 1), (1, WIDTH), (), (WIDTH + 1,), (1,)])
def test_a_bias_that_is_not_one_number_for_each_column_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"bias must be \[6\]"):
        make_linear(torch.ones(WIDTH, K), torch.ones(shape))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(ROWS, K - 1), "x must have 8 columns (got 7)"),
        (torch.ones(ROWS, K).half(), "x must be torch.float32 like the weight"),
        (torch.ones(ROWS, K).double(), "x must be torch.float32 like the weight"),
    ],
)
def test_a_wrong_input_of_a_linear_layer_is_refused_by_name(x: Tensor, message: str) -> None:
    layer = make_linear(torch.ones(WIDTH, K))
    workspace = DenseWorkspace([layer.slots], max_tokens=ROWS)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        layer(x, make_batch(slots=1), workspace)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((RANK + 1, K, WIDTH, RANK + 1, 1.0), "rank of q must be 1 to 2 (got 3)"),
        ((0, K, WIDTH, 0, 1.0), "rank of q must be 1 to 2 (got 0)"),
        ((RANK, K, WIDTH, RANK, float("inf")), "scale of q must be finite"),
        ((RANK, K, WIDTH, RANK, 1e-50), "scale of q must not vanish"),
        ((RANK, K + 1, WIDTH, RANK, 1.0), "a of q must be [rank, 8]"),
        ((RANK, K, WIDTH + 1, RANK, 1.0), "b of q must be [6, 2]"),
        ((RANK, K, WIDTH, RANK - 1, 1.0), "b of q must be [6, 2]"),
    ],
)
def test_each_mistake_in_a_part_is_refused_before_it_is_loaded(
    parts: tuple[int, int, int, int, float], message: str
) -> None:
    rows, depth, width, ranks, scale = parts
    factors = LoRAFactors(torch.ones(rows, depth), torch.ones(width, ranks), scale)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        make_linear(torch.ones(WIDTH, K)).stage({"q": factors})
