"""Captures and steps that are refused or fail: what they say, and what they leave behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.serving.graph_runner import GraphRunner  # noqa: E402
from lorakernels.serving.keys import GraphKey  # noqa: E402

from .graph_steps import (  # noqa: E402
    SIZES,
    assert_served,
    contents,
    replace_adapters,
    replayed,
    run,
    runner_of,
)


def test_a_capture_that_fails_leaves_no_graph_and_no_dummy_adapter(stack: Any, graphs: Any) -> None:
    before = contents(stack)

    def step(rows: int) -> Tensor:
        if rows == 2 and graphs.open is not None:
            raise RuntimeError("out of memory")
        return stack.step(rows)

    runner = GraphRunner(step, stack.inputs, stack.buffers, sizes=SIZES)
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.capture()
    assert runner.keys == ()
    for old, new in zip(before, contents(stack), strict=True):
        assert torch.equal(old, new)
    # and none of its rows is left in force
    assert_served(runner, stack, [0, 2, -1])


def test_a_second_capture_that_fails_leaves_nothing_of_the_first_one(
    stack: Any, graphs: Any
) -> None:
    is_full = False

    def step(rows: int) -> Tensor:
        if is_full and rows == 2:
            raise RuntimeError("out of memory")
        return stack.step(rows)

    runner = GraphRunner(step, stack.inputs, stack.buffers, sizes=SIZES)
    runner.capture()
    is_full = True
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.capture()
    assert runner.keys == ()
    # no graph reads what is replaced
    replace_adapters(stack)
    runner.check_addresses()
    stack.called.clear()
    assert_served(runner, stack, [0, 2, -1])
    assert stack.called == [3]
    assert runner.replays == 0


def test_a_capture_that_fails_in_a_graph_without_adapters_leaves_no_declaration(
    stack: Any, graphs: Any
) -> None:
    def step(rows: int) -> Tensor:
        if stack.buffers.batch.token_slots[:rows].max() < 0:
            raise RuntimeError("out of memory")
        return stack.step(rows)

    runner = GraphRunner(step, stack.inputs, stack.buffers, sizes=SIZES)
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.capture()
    assert_served(runner, stack, [0, 2, -1])


def test_a_batch_that_is_too_large_is_refused_by_both_numbers(stack: Any) -> None:
    runner = runner_of(stack)
    with pytest.raises(ValueError, match=r"a step may have 12 rows, max_tokens \(got 13\)"):
        run(runner, stack, [0] * 13)


def test_a_slot_that_does_not_exist_is_refused(stack: Any, graphs: Any) -> None:
    runner = runner_of(stack)
    runner.capture()
    with pytest.raises(ValueError, match=r"token_slots must be -1 to 2 \(got 0 to 3\)"):
        run(runner, stack, [0, 3])
    assert_served(runner, stack, [0, 2])


def bad_mapping(mapping: Tensor, values: dict[str, Tensor]) -> None:
    mapping[1] = 3


def bad_values(mapping: Tensor, values: dict[str, Tensor]) -> None:
    values["x"] = values["x"].double()


def missing_values(mapping: Tensor, values: dict[str, Tensor]) -> None:
    del values["router"]


@pytest.mark.parametrize("spoil", [bad_mapping, bad_values, missing_values])
@pytest.mark.parametrize("rows", [2, 9])
def test_a_step_that_is_refused_leaves_inputs_and_mapping_as_they_were(
    stack: Any, graphs: Any, spoil: Any, rows: int
) -> None:
    runner = runner_of(stack)
    runner.capture()
    run(runner, stack, [0, 2, -1], seed=3)
    batch = stack.buffers.batch
    before = [tensor.clone() for tensor in (stack.inputs.block, *batch.buffers)]
    mapping, values = torch.full((rows,), 2, dtype=torch.int32), stack.values(rows, 4)
    spoil(mapping, values)
    with pytest.raises(ValueError, match="must be"):
        runner.run(mapping, **values)
    after = (stack.inputs.block, *batch.buffers)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    # of the graph that was replayed
    assert batch.num_rows == 8
    assert runner.replays == 1


def test_a_graph_whose_check_failed_is_checked_again_until_all_is_in_place(
    stack: Any, graphs: Any
) -> None:
    runner = runner_of(stack)
    runner.capture()
    own = stack.linear.slots.a
    replace_adapters(stack)
    # the second graph is asked for between two runs of the first one
    for slots in ([0, 2], [-1], [0, 2]):
        with pytest.raises(RuntimeError, match="a of adapters 0 was replaced"):
            run(runner, stack, slots)
    assert replayed(runner, graphs) == []
    assert runner.replays == 0
    stack.linear.slots.a = own
    assert_served(runner, stack, [0, 2])
    assert replayed(runner, graphs) == [GraphKey(2, True)]
    assert runner.replays == 1


def test_graphs_of_a_second_capture_are_checked_like_those_of_the_first_one(
    stack: Any, graphs: Any
) -> None:
    runner = runner_of(stack)
    runner.capture()
    run(runner, stack, [0, 2])
    replace_adapters(stack)
    graphs.made.clear()
    # they read what has taken the place of the old tensor
    runner.capture()
    runner.check_addresses()
    replace_adapters(stack)
    with pytest.raises(RuntimeError, match="a of adapters 0 was replaced"):
        run(runner, stack, [0, 2])
    assert replayed(runner, graphs) == []


def test_inputs_that_are_larger_than_what_was_reserved_are_refused(make_stack: Any) -> None:
    small, large = make_stack(max_tokens=4), make_stack(max_tokens=5)
    with pytest.raises(ValueError, match=r"inputs may have 4 rows, as was reserved \(got 5\)"):
        GraphRunner(small.step, large.inputs, small.buffers, sizes=[2])


def test_inputs_of_another_device_than_the_buffers_are_refused(stack: Any) -> None:
    stack.inputs.block = stack.inputs.block.to("meta")
    with pytest.raises(ValueError, match=r"inputs must be on cpu like the buffers \(got meta\)"):
        runner_of(stack)


def wide_runner(stack: Any) -> GraphRunner:
    """Requests have a row each, or three."""
    return GraphRunner(
        stack.step, stack.inputs, stack.buffers, sizes=SIZES[:1], wide_steps={3: stack.step}
    )


def assert_refused(runner: GraphRunner, stack: Any, rows: int, width: int, match: str) -> None:
    """With inputs and mapping as they were, in the middle of steps that are served."""
    run(runner, stack, [0, 2, -1], seed=3)
    batch = stack.buffers.batch
    tensors = (stack.inputs.block, *batch.buffers)
    before, num_rows = [tensor.clone() for tensor in tensors], batch.num_rows
    mapping = torch.full((rows,), 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=match):
        runner.run(mapping, width=width, **stack.values(rows, 4))
    assert all(torch.equal(old, new) for old, new in zip(before, tensors, strict=True))
    assert batch.num_rows == num_rows
    assert_served(runner, stack, [0, 2, -1])


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("width", [-1, 0, 2, 4])
# of a graph, and without one
@pytest.mark.parametrize("rows", [4, 12])
def test_a_step_of_a_width_that_the_runner_has_not_is_refused_with_those_it_has(
    stack: Any, graphs: Any, captures: bool, width: int, rows: int
) -> None:
    runner = wide_runner(stack)
    if captures:
        runner.capture()
    assert_refused(runner, stack, rows, width, rf"width must be 1 or 3 \(got {width}\)")


def test_a_runner_of_one_width_names_it_where_it_refuses_another(stack: Any) -> None:
    assert_refused(runner_of(stack), stack, 4, 2, r"width must be 1 \(got 2\)")


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("rows", [4, 11])
def test_a_step_with_a_part_of_the_rows_of_a_request_is_refused(
    stack: Any, graphs: Any, captures: bool, rows: int
) -> None:
    runner = wide_runner(stack)
    if captures:
        runner.capture()
    message = rf"token_slots must have 3 rows for each request \(got {rows} rows\)"
    assert_refused(runner, stack, rows, 3, message)


@pytest.mark.parametrize("width", [-2, 0, 1])
def test_steps_of_less_than_two_rows_for_a_request_are_not_taken_as_wide(
    stack: Any, width: int
) -> None:
    wide = {2: stack.step, width: stack.step}
    with pytest.raises(ValueError, match=rf"wide_steps must be from 2 rows on \(got {width}\)"):
        GraphRunner(stack.step, stack.inputs, stack.buffers, sizes=[2], wide_steps=wide)
