"""Deltas of a linear layer that are stored on a second stream and added behind the base product."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch.metadata import BatchMetadata  # noqa: E402
from lorakernels.dense.expand_plan import plan_expand  # noqa: E402
from lorakernels.dense.forms import LinearForm, plan_form  # noqa: E402
from lorakernels.dense.ops import DenseWorkspace  # noqa: E402
from lorakernels.dense.plan import tile_programs  # noqa: E402
from lorakernels.dense.shape import DenseShape  # noqa: E402
from lorakernels.dense.sizes import largest_stored  # noqa: E402
from lorakernels.dense.weights import LoRAFactors  # noqa: E402
from lorakernels.layers.linear import LoRALinear  # noqa: E402
from lorakernels.layers.partition import Slice  # noqa: E402
from lorakernels.runtime.tuning import DEFAULT  # noqa: E402

from .linear_steps import K, Step  # noqa: E402


@pytest.mark.parametrize("rows", [1, 9, 40])
def test_a_stored_delta_gives_the_same_up_to_the_order_of_a_sum(
    recorded_streams: Any, rows: int
) -> None:
    step = Step()
    x = step.prepare(rows)
    single, stored = step.run(x, LinearForm.SINGLE), step.run(x, LinearForm.STORED)
    # the base output is added last and not first
    torch.testing.assert_close(stored, single, rtol=1e-5, atol=1e-4)


def test_a_stored_delta_may_have_several_blocks_of_columns_in_a_program(
    recorded_streams: Any,
) -> None:
    rows, rank, width = 129, 72, 200
    shape = DenseShape(rows, 16, (width,), rank, 2)
    assert plan_expand(shape).group > 1
    # values of which every sum is exact in any order and dtype
    draw = torch.Generator().manual_seed(3)
    x, a, b = (
        torch.randint(-1, 2, size, generator=draw).bfloat16()
        for size in ((rows, 16), (rank, 16), (width, rank))
    )
    linear = LoRALinear(
        torch.zeros(width, 16, dtype=torch.bfloat16),
        slices=(Slice("q", width),),
        num_slots=1,
        rank=rank,
    )
    linear.load_adapter(0, {"q": LoRAFactors(a, b, 0.25)})
    workspace = DenseWorkspace([linear.slots], max_tokens=rows)
    metadata = BatchMetadata(max_tokens=rows, max_slots=1, device="cpu")
    metadata.prepare(torch.zeros(rows, dtype=torch.int32))
    out = linear(x, metadata, workspace, form=LinearForm.STORED)
    wanted = 0.25 * (x.float() @ a.float().T) @ b.float().T
    assert torch.equal(out, wanted.bfloat16())


def test_nothing_is_stored_where_all_batches_have_one_plan() -> None:
    shape = DenseShape(1, 16, (64,), 8, 2)
    fixed = replace(DEFAULT, dense=replace(DEFAULT.dense, planned_rows=1))
    assert plan_form(shape, dual_stream=True) is LinearForm.STORED
    assert largest_stored(shape, 4) == 256
    shape = replace(shape, tuning=fixed)
    assert plan_form(shape, dual_stream=True) is LinearForm.DUAL
    assert largest_stored(shape, 4) == 0


def test_a_stored_delta_runs_beside_the_base_product_and_is_added_behind_both(
    noted_linear: list[str],
) -> None:
    step = Step()
    step.run(step.prepare(3), LinearForm.STORED)
    assert noted_linear == [
        "main records event0",
        "side1 waits event0",
        "side1 runs shrink",
        "side1 runs expand",
        "side1 records event1",
        "main runs base",
        "main waits event1",
        "main runs add",
    ]


@pytest.mark.parametrize("rows", [5, 40])
def test_a_stored_delta_is_complete_where_an_adapter_has_no_ranks(
    recorded_streams: Any, rows: int
) -> None:
    # of one slice, or of all: the workspace holds NaN where nothing is stored
    step = Step()
    own = {"k": LoRAFactors(step.randn(3, K), step.randn(8, 3), 0.5)}
    for missing in (own, {}):
        step.linear.load_adapter(1, missing)
        x = step.prepare(rows)
        stored, single = step.run(x, LinearForm.STORED), step.run(x, LinearForm.SINGLE)
        torch.testing.assert_close(stored, single, rtol=1e-5, atol=1e-4)


def test_a_stored_delta_reaches_tiles_beyond_the_programs_of_a_launch(
    recorded_streams: Any,
) -> None:
    slots = 12
    linear = LoRALinear(torch.zeros(16, K), slices=(Slice("q", 16),), num_slots=slots, rank=1)
    for slot in range(slots):
        factors = LoRAFactors(torch.ones(1, K), torch.full((16, 1), slot + 1.0), 1.0)
        linear.load_adapter(slot, {"q": factors})
    workspace = DenseWorkspace([linear.slots], max_tokens=slots)
    metadata = BatchMetadata(max_tokens=slots, max_slots=slots, device="cpu")
    metadata.prepare(torch.arange(slots, dtype=torch.int32))
    shape = DenseShape(slots, K, (16,), 1, 4)
    assert tile_programs(shape, capacity=slots) < slots
    out = linear(torch.ones(slots, K), metadata, workspace, form=LinearForm.STORED)
    assert torch.equal(out[:, 0], K * torch.arange(1.0, slots + 1))


def test_a_delta_is_stored_up_to_the_size_that_a_workspace_holds(recorded_streams: Any) -> None:
    # all values are used, and the shrink output comes beside them
    width, rows = 4000, 100
    assert width * rows == DEFAULT.dense.stored_values
    weight = torch.zeros(width, 16)
    linear = LoRALinear(weight, slices=(Slice("q", width),), num_slots=1, rank=1)
    linear.load_adapter(0, {"q": LoRAFactors(torch.ones(1, 16), torch.ones(width, 1), 1.0)})
    workspace = DenseWorkspace([linear.slots], max_tokens=2 * rows)
    metadata = BatchMetadata(max_tokens=2 * rows, max_slots=1, device="cpu")
    # the last row alone has an adapter, so that one tile is interpreted
    slots = torch.full((2 * rows,), -1, dtype=torch.int32)
    slots[rows - 1] = 0
    metadata.prepare(slots[:rows])
    out = linear(torch.ones(rows, 16), metadata, workspace, form=LinearForm.STORED)
    assert bool((out[-1] == 16).all())
    assert not out[:-1].any()
    metadata.prepare(slots)
    with pytest.raises(ValueError, match="workspace must hold"):
        linear(torch.ones(2 * rows, 16), metadata, workspace, form=LinearForm.STORED)
