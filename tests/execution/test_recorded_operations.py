"""What is recorded of ATen operators and of Triton launches in the interpreter."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from loragate.core.machine import interpreter_is_on
from loragate.execution.graph import capture
from loragate.execution.streams.interpreted import (
    NeverSatisfied,
    recorded_launches,
    reversed_programs,
)
from loragate.execution.streams.model import current_number, modelled_streams
from loragate.execution.streams.recorder import Recorder
from loragate.execution.trace.conflicts import Hazard, conflicts
from loragate.execution.trace.operations import HOST, Free, Launch, Sync
from loragate.execution.trace.orders import legal_orders

interpreted = pytest.mark.skipif(not interpreter_is_on(), reason="needs Triton's interpreter")


@contextmanager
def recording(*, replays: bool = False) -> Iterator[Recorder]:
    recorder = Recorder("cpu", current_number, replays=replays)
    with modelled_streams(recorder), recorded_launches(recorder), recorder:
        yield recorder


def launches(recorder: Recorder) -> list[Launch]:
    return [op for op in recorder.trace().operations if isinstance(op, Launch)]


def touched(recorder: Recorder, launch: Launch, tensor: Tensor) -> dict[bool, list[int]]:
    """Elements of a tensor's storage that a launch reads (False) and writes (True)."""
    block = recorder.blocks.of(tensor, 0, name="")
    assert block is not None
    size = tensor.element_size()
    found: dict[bool, list[int]] = {}
    for access in launch.accesses:
        if access.block == block.number:
            elements = [e for a, b in access.spans for e in range(a // size, b // size)]
            found[access.is_write] = sorted({*found.get(access.is_write, []), *elements})
    return found


def test_an_operator_reads_and_writes_what_its_schema_says() -> None:
    x, y = torch.ones(4, 6), torch.zeros(4, 6)
    with recording() as recorder:
        y[:, 2:4].add_(x[1, :2])[0].mul_(2)
        torch.mul(x[0], 3, out=y[3])
        y.view(2, 12).t()
        torch.empty(7)
    add, mul, out = launches(recorder)
    assert touched(recorder, add, y) == {True: [2, 3, 8, 9, 14, 15, 20, 21]}
    assert touched(recorder, mul, y) == {True: [2, 3]}
    assert touched(recorder, out, y) == {True: list(range(18, 24))}
    assert touched(recorder, out, x) == {False: list(range(6))}


def test_an_operator_written_in_python_is_looked_into() -> None:
    @torch.library.custom_op("loragate_test::half_of", mutates_args=("out",))
    def half_of(x: Tensor, out: Tensor) -> None:
        out[:2] = x[:2] * 2

    x, out = torch.ones(4), torch.zeros(4)
    with recording() as recorder:
        half_of(x, out)
    mul, copy = launches(recorder)
    assert touched(recorder, mul, x) == {False: [0, 1]}
    assert touched(recorder, copy, out) == {True: [0, 1]}


def test_an_assigned_number_is_no_memory_but_a_tensor_of_one_is() -> None:
    @torch.library.custom_op("loragate_test::clear", mutates_args=("out",))
    def clear(out: Tensor) -> None:
        out[:] = 0

    out, zero = torch.ones(4), torch.zeros(())
    with recording() as recorder:
        out[:2] = 0
        operator.setitem(out, out > 0, 0.0)
        clear(out)
        out[:2] = zero
        one = torch.tensor(1.0)
        out.fill_(one)
    accesses = [(op.name, len(op.accesses)) for op in launches(recorder)]
    numbers = [("fill_", 1), ("gt", 2), ("index_put_", 2), ("fill_", 1)]
    assert accesses == [*numbers, ("fill_", 2), ("fill_", 2)]
    assert not any(isinstance(op, Sync) for op in recorder.trace().operations)
    assert touched(recorder, launches(recorder)[-2], zero) == {False: [0]}
    assert touched(recorder, launches(recorder)[-1], one) == {False: [0]}


def test_the_host_waits_for_an_assigned_number_that_a_device_needs_in_its_memory() -> None:
    out, rows, mapping = torch.ones(4), torch.tensor([1, 2]), torch.tensor([1, 0])
    with recording() as recorder:
        recorder.name({"mapping": mapping}, on_host=True)
        out[0] = 0
        out[rows] = 0
        mapping[0] = 0
    syncs = [op for op in recorder.trace().operations if isinstance(op, Sync)]
    assert syncs == [Sync(stream=0), Sync(stream=0), Sync(stream=HOST)]


def test_the_host_does_what_uses_host_memory_only_and_waits_for_values() -> None:
    mapping, table = torch.tensor([1, 0]), torch.ones(2)
    with recording() as recorder:
        recorder.name({"mapping": mapping}, on_host=True)
        rows = mapping + mapping
        table[0].item()
        table.add_(rows)
    operations = recorder.trace().operations
    assert [op.stream for op in operations if isinstance(op, Launch)] == [HOST, 0, 0]
    assert Sync(stream=0) in operations


def test_beside_a_device_the_host_does_all_that_has_no_tensor_of_the_device() -> None:
    # as in a step whose batch has no live row
    rows = torch.tensor([3, 4], dtype=torch.int32)
    recorder = Recorder("cuda", lambda: 7)
    with recorder:
        assert not bool((rows[:0] >= 0).any())
        assert torch.zeros(2).sum().item() == 0
    assert {launch.stream for launch in launches(recorder)} == {HOST}
    assert conflicts(recorder.trace()) == []


def test_what_names_no_stream_belongs_to_the_current_one() -> None:
    y = torch.zeros(4)
    with recording() as recorder:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            with torch.cuda.stream(None):
                assert torch.cuda.current_stream() is side
                y.add_(1)
                event = torch.cuda.Event()
                event.record()
                event.wait()
            y.add_(1)
        with torch.cuda.stream(None):
            y.add_(1)
    operations = [op for op in recorder.trace().operations if not isinstance(op, (Free, Sync))]
    assert [op.stream for op in operations] == [side.number] * 4 + [0]


def test_memory_is_free_when_nothing_holds_it_and_after_the_streams_that_record_it() -> None:
    with recording() as recorder:
        side = torch.cuda.Stream()
        for is_kept in (False, True):
            x = torch.ones(8)
            if is_kept:
                x.record_stream(side)
            del x
        torch.cuda.Event().record()
    frees = [op for op in recorder.trace().operations if isinstance(op, Free)]
    assert [free.used_by for free in frees] == [frozenset(), frozenset({side.number})]
    assert all(free.stream == 0 and free.size == 32 for free in frees)


def captured(x: Tensor, out: Tensor) -> Any:
    """A graph that reads x and writes out, with memory of its own between them."""

    def call() -> None:
        torch.add(x * 2, 1, out=out)

    return capture(call, warm_ups=0).graph


def test_a_graph_is_ordered_as_a_whole_on_the_stream_that_launches_it() -> None:
    for joins, expected in ((True, []), (False, ["x", "out"])):
        x, out = torch.ones(4), torch.zeros(4)
        with recording() as recorder:
            recorder.name({"x": x, "out": out})
            graph, side = captured(x, out), torch.cuda.Stream()
            for _ in range(2):
                x.add_(1)
                if joins:
                    side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    graph.replay()
                if joins:
                    torch.cuda.current_stream().wait_stream(side)
            out.zero_()
        trace = recorder.trace()
        found = {trace.block_name(conflict.block) for conflict in conflicts(trace)}
        assert found == set(expected)


def test_a_launch_of_a_graph_does_its_work_again_but_not_what_the_host_did() -> None:
    x, out, table = torch.ones(4), torch.zeros(4), torch.zeros(1)
    with recording(replays=True) as recorder:
        recorder.name({"table": table}, on_host=True)

        def call() -> None:
            table.add_(1)
            torch.add(x, table.item(), out=out)

        graph = capture(call, warm_ups=0).graph
        x.fill_(5)
        graph.replay()
        assert out.tolist() == [6] * 4
        assert table.tolist() == [1]
        waits = capture(lambda: out.add_(x.sum().item()), warm_ups=0).graph
        event = torch.cuda.Event()

        def waits_for_an_event() -> None:
            event.record()
            event.synchronize()

        others = [
            capture(f, warm_ups=0).graph for f in (torch.cuda.synchronize, waits_for_an_event)
        ]
    assert all(recorder.graphs.host_waited(other.number) for other in others)
    # what is on the host itself is read without a wait
    assert not recorder.graphs.host_waited(graph.number)
    assert recorder.graphs.host_waited(waits.number)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_graph_keeps_its_memory_and_not_that_of_others(is_known: bool) -> None:
    x, out = torch.ones(4), torch.zeros(4)
    with recording() as recorder:
        if is_known:
            x = torch.ones(4)
        graph = captured(x, out)
        graph.replay()
        assert conflicts(recorder.trace()) == []
        del x
        graph.replay()
    assert {conflict.hazard for conflict in conflicts(recorder.trace())} == {Hazard.USE_AFTER_FREE}


@triton.jit
def move_columns(x_ptr, out_ptr, stride, WIDTH: tl.constexpr, LIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.arange(0, WIDTH)
    row = tl.program_id(0)
    values = tl.load(x_ptr + row * stride + columns, mask=columns < LIVE)
    tl.store(out_ptr + row * stride + 1 + columns, values, mask=columns < LIVE)


@triton.jit
def wait_for(flag_ptr):  # type: ignore[no-untyped-def]
    while tl.load(flag_ptr) == 0:
        pass


@triton.jit
def set_flag(flag_ptr):  # type: ignore[no-untyped-def]
    tl.atomic_add(flag_ptr, 1)


@triton.jit
def swap_flag(flag_ptr):  # type: ignore[no-untyped-def]
    tl.atomic_cas(flag_ptr, 0, 1)


@interpreted
@pytest.mark.parametrize("kernel", [set_flag, swap_flag], ids=["add", "compare-and-swap"])
def test_an_atomic_operation_reads_and_writes_and_is_ordered_by_no_other_one(kernel: Any) -> None:
    flags = torch.zeros(4, dtype=torch.int32)
    for joins in (True, False):
        with recording() as recorder:
            side = torch.cuda.Stream()
            kernel[(1,)](flags[2:])
            if joins:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                kernel[(1,)](flags[2:])
        for launch in launches(recorder):
            assert touched(recorder, launch, flags) == {False: [2], True: [2]}
        assert bool(conflicts(recorder.trace())) is not joins


@interpreted
def test_a_launch_accesses_exactly_the_bytes_of_its_programs() -> None:
    x, out = torch.ones(3, 6, dtype=torch.float16), torch.zeros(3, 6, dtype=torch.float16)
    with recording() as recorder:
        move_columns[(2,)](x, out, 6, WIDTH=4, LIVE=3)
    (launch,) = launches(recorder)
    assert launch.name == "move_columns"
    assert touched(recorder, launch, x) == {False: [0, 1, 2, 6, 7, 8]}
    assert touched(recorder, launch, out) == {True: [1, 2, 3, 7, 8, 9]}
    assert {access.name for access in launch.accesses} == {"x_ptr", "out_ptr"}


@triton.jit
def copy_behind(sizes_ptr, table_ptr, address, out_ptr):  # type: ignore[no-untyped-def]
    behind = tl.load(table_ptr + 1).to(tl.pointer_type(tl.float32))
    tl.store(out_ptr, tl.load(behind) + tl.load(sizes_ptr))
    tl.store(out_ptr + 1, tl.load(address.to(tl.pointer_type(tl.float32))))


@interpreted
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
@pytest.mark.parametrize("known", ["", "table_ptr", "address"])
def test_memory_that_is_not_known_is_told_by_the_argument_with_its_address(
    known: str, dtype: torch.dtype
) -> None:
    behind, given, out = torch.ones(2), torch.ones(1), torch.zeros(2)
    addresses = {"table_ptr": behind.data_ptr() + 4, "address": given.data_ptr()}
    table = torch.tensor([0, addresses["table_ptr"]], dtype=torch.int64).to(dtype)
    with recording() as recorder:
        if known:
            recorder.name({"known": behind if known == "table_ptr" else given})
        copy_behind[(1,)](torch.tensor([3, 5]), table, addresses["address"], out)
    assert out.tolist() == [4, 1]
    assert recorder.unknown == {"copy_behind": {*addresses} - {known}}


@triton.jit
def fill_rows(out_ptr, count_ptr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.arange(0, WIDTH)
    count = tl.load(count_ptr)
    # the interpreter makes integers of a mask that a loaded number has a part in
    live = (rows < 3)[:, None] & (rows < count)[None, :] & (count > 1)
    tl.store(out_ptr + rows[:, None] * WIDTH + rows[None, :], 1.0, mask=live)


@interpreted
def test_a_mask_of_integers_is_a_mask() -> None:
    out, number = torch.zeros(4, 4), torch.tensor([2], dtype=torch.int32)
    with recording() as recorder:
        fill_rows[(1,)](out, number, WIDTH=4)
    (launch,) = launches(recorder)
    assert touched(recorder, launch, out) == {True: [0, 1, 4, 5, 8, 9]}


@interpreted
def test_columns_side_by_side_are_no_conflict_and_the_same_columns_are() -> None:
    for shift, expected in ((3, 0), (2, 1)):
        x, out = torch.ones(4, 8), torch.zeros(4, 9)
        with recording() as recorder:
            move_columns[(4,)](x, out, 8, WIDTH=4, LIVE=3)
            with torch.cuda.stream(torch.cuda.Stream()):
                move_columns[(4,)](x, out.view(-1)[shift:], 8, WIDTH=4, LIVE=3)
        assert len(conflicts(recorder.trace())) == expected


@interpreted
def test_a_launch_is_done_again_in_another_order() -> None:
    x, out = torch.ones(4, 8), torch.zeros(4, 9)
    with recording(replays=True) as recorder:
        move_columns[(4,)](x, out, 8, WIDTH=4, LIVE=3)
        with torch.cuda.stream(torch.cuda.Stream()):
            x.fill_(2)
    results = []
    for order in legal_orders(recorder.trace(), limit=9, seed=0):
        recorder.blocks.restore()
        for index in order:
            recorder.replays[index]()
        results.append(float(out[0, 1]))
    assert results == [1, 2]


@interpreted
def test_a_kernel_that_waits_for_what_comes_later_is_reported() -> None:
    flag = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(NeverSatisfied, match="kernel wait_for reads the same place"), recording():
        wait_for[(1,)](flag)


@interpreted
def test_a_wait_that_only_one_order_satisfies_is_reported_in_the_other_one() -> None:
    flag = torch.zeros(1, dtype=torch.int32)
    with recording(replays=True) as recorder:
        set_flag[(1,)](flag)
        with torch.cuda.stream(torch.cuda.Stream()):
            wait_for[(1,)](flag)
    orders = list(legal_orders(recorder.trace(), limit=9, seed=0))
    assert len(orders) == 2
    recorder.blocks.restore()
    with pytest.raises(NeverSatisfied):
        recorder.replays[orders[1][0]]()


@triton.jit
def clear_then_set(out_ptr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(out_ptr + tl.arange(0, WIDTH), 0.0)
    tl.store(out_ptr + tl.program_id(0) * 2 + tl.program_id(1), 1.0)


@interpreted
def test_programs_run_from_the_last_to_the_first_if_reversed() -> None:
    out = torch.full((4,), 5.0)
    clear_then_set[(2, 2)](out, WIDTH=4)
    assert out.tolist() == [1, 1, 1, 1]
    with reversed_programs():
        clear_then_set[(2, 2)](out, WIDTH=4)
    assert out.tolist() == [1, 0, 0, 0]
