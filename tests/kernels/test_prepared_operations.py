"""Operations whose launches were prepared by other steps give the bits of those that were not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loragate.core.machine import detect_machine, select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace, dense_delta  # noqa: E402
from lorakernels.dense.weights import LoRAFactors, SlotWeights  # noqa: E402
from lorakernels.moe.align.metadata import PairMetadata  # noqa: E402
from lorakernels.moe.delta.ops import MoEPath, MoEWorkspace, moe_delta  # noqa: E402
from lorakernels.moe.weights import ExpertFactors, ExpertWeights  # noqa: E402
from lorakernels.runtime import prepared  # noqa: E402

MACHINE = detect_machine()
DEVICE = "cpu" if MACHINE.interpreted else "cuda"
MOST, SLOTS, EXPERTS, TOP_K = 40, 2, 3, 2
LAYOUTS = ("contiguous", "wide", "transposed", "shifted")
layouts = st.sampled_from(LAYOUTS)
steps = st.lists(
    st.tuples(st.sampled_from((1, 2, 17, 33, MOST)), layouts, layouts, st.integers(0, 3)),
    min_size=2,
    max_size=5,
)


def laid_out(values: Tensor, layout: str) -> Tensor:
    rows, columns = values.shape
    made = {
        "contiguous": lambda: values.new_zeros(rows, columns),
        "wide": lambda: values.new_zeros(rows, 2 * columns)[:, :columns],
        "transposed": lambda: values.new_zeros(columns, rows).T,
        "shifted": lambda: values.new_zeros(rows * columns + 1)[1:].view(rows, columns),
    }[layout]()
    return made.copy_(values)


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def slots_of(rows: int) -> Tensor:
    return torch.arange(rows, dtype=torch.int32, device=DEVICE) % (SLOTS + 1) - 1


class Dense:
    """A layer whose weights depend on `kind`, for steps of any size."""

    def __init__(self, kind: int) -> None:
        self.width, self.in_features, rank = 16 + 8 * (kind % 2), 24, 4 + 4 * (kind // 2)
        self.weights = SlotWeights(
            num_slots=SLOTS,
            slice_widths=(self.width, 8),
            in_features=self.in_features,
            rank=rank,
            dtype=torch.float32,
            device=DEVICE,
        )
        for slot in range(SLOTS):
            parts = [
                LoRAFactors(randn(slot, rank, 24), randn(slot + 9, width, rank), 1.0 + slot)
                for width in self.weights.slice_widths
            ]
            self.weights.load(slot, parts)
        self.batch = BatchMetadata(max_tokens=MOST, max_slots=SLOTS, device=DEVICE)
        self.workspace = DenseWorkspace([self.weights], max_tokens=MOST)

    def run(self, rows: int, of_x: str, of_out: str, slots: Tensor | None = None) -> Tensor:
        self.batch.prepare(slots_of(rows) if slots is None else slots)
        x = laid_out(randn(rows, rows, self.in_features), of_x)
        out = laid_out(randn(rows + 1, rows, self.width + 8), of_out)
        dense_delta(x, self.weights, self.batch, self.workspace, out)
        return out


class Experts:
    """The same for experts. With an even kind each pair has a row of x."""

    def __init__(self, kind: int) -> None:
        self.width, self.in_features, self.kind, rank = 16 + 8 * (kind % 2), 24, kind, 4
        self.weights = ExpertWeights(
            num_slots=SLOTS,
            num_experts=EXPERTS,
            slice_widths=(self.width,),
            in_features=self.in_features,
            rank=rank,
            dtype=torch.float32,
            device=DEVICE,
        )
        for slot in range(SLOTS):
            a, b = randn(slot, EXPERTS, rank, 24), randn(slot + 9, EXPERTS, self.width, rank)
            self.weights.load(slot, [ExpertFactors(a, b, 1.0 + slot)])
        self.batch = BatchMetadata(max_tokens=MOST, max_slots=SLOTS, device=DEVICE)
        sizes = {"max_tokens": MOST, "top_k": TOP_K}
        self.pairs = PairMetadata(**sizes, num_experts=EXPERTS, max_slots=SLOTS, device=DEVICE)
        self.workspace = MoEWorkspace([self.weights], **sizes)

    def run(self, rows: int, of_x: str, of_out: str, slots: Tensor | None = None) -> Tensor:
        self.batch.prepare(slots_of(rows) if slots is None else slots)
        ids = torch.arange(rows * TOP_K, device=DEVICE).view(rows, TOP_K).remainder(EXPERTS).int()
        self.pairs.prepare(ids, self.batch)
        x_rows = rows * TOP_K if self.kind % 2 == 0 else rows
        x = laid_out(randn(rows, x_rows, self.in_features), of_x)
        out = laid_out(randn(rows + 1, rows * TOP_K, self.width), of_out)
        options: dict[str, Any] = {
            "router_weights": randn(rows, rows, TOP_K) if rows % 2 else None,
            "add_inputs": of_x != "wide",
            "path": (None, MoEPath.SMALL_BATCH, MoEPath.ONE_SHOT, MoEPath.TWO_KERNEL)[self.kind],
        }
        moe_delta(x, self.weights, self.pairs, self.workspace, out, **options)
        return out


@pytest.mark.parametrize("operation", [Dense, Experts])
@settings(max_examples=25)
@given(steps=steps)
def test_steps_of_any_layout_in_any_order_have_the_bits_of_steps_on_their_own(
    operation: type[Dense | Experts], steps: list[tuple[int, str, str, int]]
) -> None:
    prepared._PREPARED.clear()
    layers = [operation(kind) for kind in range(4)]
    # once more, when each has its launches
    in_a_row = [layers[kind].run(*step) for *step, kind in steps * 2]
    on_their_own = {}
    for *step, kind in dict.fromkeys(steps):
        prepared._PREPARED.clear()
        on_their_own[*step, kind] = layers[kind].run(*step)
    for have, step in zip(in_a_row, steps * 2, strict=True):
        assert torch.equal(have, on_their_own[step])


@pytest.mark.parametrize("operation", [Dense, Experts])
@pytest.mark.parametrize("kind", range(4))
@pytest.mark.parametrize("rows", [3, MOST])
def test_a_step_reaches_all_its_rows_whatever_the_first_of_its_layout_had(
    operation: type[Dense | Experts], kind: int, rows: int
) -> None:
    layer, layout = operation(kind), ("contiguous", "contiguous")
    slots = torch.ones_like(slots_of(rows))
    layer.run(rows, *layout, slots=torch.where(torch.arange(rows, device=DEVICE) == 0, slots, -1))
    have = layer.run(rows, *layout, slots=slots)
    prepared._PREPARED.clear()
    assert torch.equal(have, layer.run(rows, *layout, slots=slots))
