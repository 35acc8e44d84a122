"""Steps that are replayed from graphs, with graphs that a CPU records: what is in a graph, which
one a batch gets, and what a replay gives."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.batch.metadata import tile_height  # noqa: E402
from lorakernels.dense.weights import SlotWeights  # noqa: E402
from lorakernels.moe.weights import ExpertWeights  # noqa: E402
from lorakernels.serving.dummy import dummy_adapters  # noqa: E402
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

OF_ADAPTERS = {"lora_shrink_kernel", "lora_expand_kernel", "moe_shrink_kernel"}


def test_graphs_are_captured_largest_first_into_one_pool(stack: Any, graphs: Any) -> None:
    runner = runner_of(stack)
    assert runner.keys == ()
    keys = runner.capture()
    assert keys == runner.keys
    assert keys == tuple(GraphKey(size, has) for size in (8, 2) for has in (True, False))
    assert len({id(graph.pool) for graph in graphs.made}) == 1
    # warm-ups before each capture
    assert stack.called == [8] * 6 + [2] * 6


@pytest.mark.parametrize("resident", [False, True])
def test_a_graph_holds_the_kernels_of_adapters_exactly_if_it_is_for_adapters(
    make_stack: Any, graphs: Any, resident: bool
) -> None:
    stack = make_stack(moe=True)
    if resident:
        stack.load(1, seed=1)
    runner = runner_of(stack, sizes=(4,))
    runner.capture()
    for key, graph in zip(runner.keys, graphs.made, strict=True):
        found = OF_ADAPTERS.intersection(graph.launches)
        assert found == (OF_ADAPTERS if key.has_adapters else set()), key
        assert "moe_gemm_kernel" in graph.launches


def test_a_dummy_run_whose_mapping_has_base_rows_alone_still_captures_adapters(
    stack: Any, graphs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lorakernels.serving import graph_runner

    monkeypatch.setattr(graph_runner, "dummy_slots", lambda rows, slots: [-1] * rows)
    runner = runner_of(stack)
    runner.capture()
    for key, graph in zip(runner.keys, graphs.made, strict=True):
        assert bool(OF_ADAPTERS.intersection(graph.launches)) == key.has_adapters
    assert_served(runner, stack, [0, 2])


def test_a_run_before_a_capture_launches_every_kernel_that_is_captured(
    stack: Any, graphs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a kernel that is launched for the first time in a capture would be compiled in it
    from triton.runtime.interpreter import GridExecutor

    launched: list[str] = []
    before: list[set[str]] = []
    launch = GridExecutor.__call__

    def noting(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        launched.append(self.fn.__name__)
        return launch(self, *args, **kwargs)

    def step(rows: int) -> Tensor:
        out: Tensor = stack.step(rows)
        if graphs.open is None:
            before.append(set(launched))
        launched.clear()
        return out

    monkeypatch.setattr(GridExecutor, "__call__", noting)
    GraphRunner(step, stack.inputs, stack.buffers, sizes=(1, 2, 8)).capture()
    captured = [set(graph.launches) for graph in graphs.made]
    assert len(before) == 2 * len(captured) == 12
    for index, names in enumerate(captured):
        assert before[2 * index : 2 * index + 2] == [names, names]


def test_a_capture_runs_with_adapters_in_all_slots_and_base_rows(stack: Any, graphs: Any) -> None:
    seen = []

    def step(rows: int) -> Tensor:
        ranks = [weights.ranks.min(1).values for weights in stack.buffers.slot_weights]
        seen.append((stack.buffers.batch.token_slots[:rows].tolist(), torch.stack(ranks).tolist()))
        return stack.step(rows)

    GraphRunner(step, stack.inputs, stack.buffers, sizes=[8]).capture()
    for slots, ranks in seen[:3]:
        assert set(slots) == {-1, 0, 1, 2}
        assert all(rank > 0 for of_layer in ranks for rank in of_layer)
    for slots, _ in seen[3:]:
        assert slots == [-1] * 8


@pytest.mark.parametrize("slots", ["w2_slots", "w13_slots"])
def test_an_adapter_of_one_layer_takes_its_slot_in_all(
    make_stack: Any, graphs: Any, slots: str
) -> None:
    stack = make_stack(moe=True)
    loaded = getattr(stack.experts, slots)
    loaded.a[1].fill_(0.5)
    # of gate and up the last one alone
    loaded.ranks[1, -1].fill_(2)
    before = contents(stack)
    runner_of(stack, sizes=(2,)).capture()
    for old, new in zip(before, contents(stack), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("loaded", [[], [1], [0, 1, 2]])
def test_a_capture_leaves_the_slots_as_they_were(
    make_stack: Any, graphs: Any, loaded: list[int]
) -> None:
    stack = make_stack()
    for slot in loaded:
        stack.load(slot, seed=slot)
    before = contents(stack)
    runner_of(stack).capture()
    for old, new in zip(before, contents(stack), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("shared_a", [False, True])
def test_dummy_adapters_of_experts_have_all_ranks_of_every_expert(shared_a: bool) -> None:
    experts = ExpertWeights(
        num_slots=2,
        num_experts=3,
        slice_widths=[8, 8],
        in_features=16,
        rank=4,
        dtype=torch.float16,
        device="cpu",
        shared_a=shared_a,
    )
    with dummy_adapters([experts]):
        assert experts.ranks.tolist() == [[4, 4], [4, 4]]
        assert experts.a.gt(0).all()
        assert experts.b.gt(0).all()
    assert not experts.ranks.any()


def test_dummy_adapters_of_a_large_layer_keep_sums_finite_in_fp16() -> None:
    slots = SlotWeights(
        num_slots=1,
        slice_widths=[8],
        in_features=8192,
        rank=128,
        dtype=torch.float16,
        device="cpu",
    )
    with dummy_adapters([slots]):
        assert slots.ranks.tolist() == [[128]]
        # of a row of ones
        shrunk = slots.a[0].float().sum(dim=-1).flatten()
        delta = slots.b[0].float() @ shrunk
    assert min(shrunk.min(), delta.min()) > 0
    assert max(shrunk.max(), delta.max()) < 0.01 * torch.finfo(torch.float16).max


def test_the_collector_destroys_no_graph_while_another_one_is_captured(
    stack: Any, graphs: Any
) -> None:
    states = []

    def step(rows: int) -> Tensor:
        states.append((graphs.open is not None, gc.isenabled()))
        return stack.step(rows)

    GraphRunner(step, stack.inputs, stack.buffers, sizes=SIZES).capture()
    assert set(states) == {(True, False), (False, True)}
    assert gc.isenabled()


def test_a_collector_that_was_off_before_a_capture_stays_off(stack: Any, graphs: Any) -> None:
    gc.disable()
    try:
        GraphRunner(stack.step, stack.inputs, stack.buffers, sizes=SIZES).capture()
        assert graphs.made
        assert not gc.isenabled()
    finally:
        # or it would be off for all tests behind this one
        gc.enable()


@pytest.mark.parametrize(
    ("slots", "key"),
    [
        ([0], GraphKey(2, True)),
        ([-1], GraphKey(2, False)),
        ([-1, 2], GraphKey(2, True)),
        ([-1, -1, 2], GraphKey(8, True)),
        ([-1] * 3, GraphKey(8, False)),
        ([0] * 8, GraphKey(8, True)),
        ([2] * 9, None),
        ([-1] * 12, None),
    ],
)
def test_a_batch_is_replayed_from_its_graph_or_runs_eagerly(
    stack: Any, graphs: Any, slots: list[int], key: GraphKey | None
) -> None:
    runner = runner_of(stack)
    runner.capture()
    stack.called.clear()
    assert_served(runner, stack, slots)
    assert replayed(runner, graphs) == ([] if key is None else [key])
    assert stack.called == ([len(slots)] if key is None else [])


@pytest.mark.parametrize("moe", [False, True])
def test_one_graph_serves_every_mix_of_adapters_one_after_the_other(
    make_stack: Any, graphs: Any, moe: bool
) -> None:
    stack = make_stack(moe=moe)
    runner = runner_of(stack, sizes=(8,))
    runner.capture()
    for slot in range(3):
        stack.load(slot, seed=slot)
    mixes = [[0, 1, 2, -1], [-1] * 8, [2] * 8, [-1], [1, 1, -1, 0, 2, 0], [0], [-1, -1, -1, 1]]
    for seed, slots in enumerate(mixes):
        assert_served(runner, stack, slots, seed)
    assert len(replayed(runner, graphs)) == len(mixes)


def test_adapters_are_evicted_replaced_and_loaded_between_replays(stack: Any, graphs: Any) -> None:
    runner = runner_of(stack)
    runner.capture()
    slots = [0, 1, 2, -1, 0]
    assert_served(runner, stack, slots)
    stack.evict(0)
    assert_served(runner, stack, slots)
    stack.load(0, seed=7)
    stack.load(1, seed=8)
    assert_served(runner, stack, slots)
    stack.load(2, seed=9)
    assert_served(runner, stack, slots)


def test_padded_rows_are_base_rows_in_tiles_of_the_height_of_all_rows(
    make_stack: Any, graphs: Any
) -> None:
    live, padded = 120, 136
    stack = make_stack(max_tokens=padded)
    assert tile_height(live) != tile_height(padded)
    stack.load(1, seed=1)
    runner = runner_of(stack, sizes=(padded,))
    runner.capture()
    run(runner, stack, [1] * padded)
    slots = ([1, -1, 0] * live)[:live]
    assert_served(runner, stack, slots)
    batch = stack.buffers.batch
    assert batch.num_rows == padded
    assert batch.token_slots.tolist() == slots + [-1] * (padded - live)


def test_an_eager_step_has_the_device_of_its_inputs_current_from_its_tables_on(
    stack: Any, graphs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[Tensor] = []
    seen: list[Tensor] = []

    @contextmanager
    def on_device_of(tensor: Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.pop()

    def noting(call: Any) -> Any:
        return lambda *args: seen.extend(current[-1:]) or call(*args)

    monkeypatch.setattr("lorakernels.serving.graph_runner.on_device_of", on_device_of)
    monkeypatch.setattr(stack.buffers.batch, "install", noting(stack.buffers.batch.install))
    runner = GraphRunner(noting(stack.step), stack.inputs, stack.buffers, sizes=SIZES)
    assert_served(runner, stack, [0, 2, -1])
    assert len(seen) == 2
    assert all(tensor is stack.inputs.block for tensor in seen)


class Forbidden:
    def __getitem__(self, grid: Any) -> Any:
        raise AssertionError("the host launches a kernel beside the graph")


def test_a_replay_installs_the_mapping_of_its_step_without_a_launch_by_the_host(
    stack: Any, graphs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(stack)
    runner.capture()
    monkeypatch.setattr("lorakernels.batch.metadata.prepare_kernel", Forbidden())
    for slots in ([0, 2], [2] * 8, [-1, -1, 2], [-1], [0]):
        assert_served(runner, stack, slots)
        mapping = stack.buffers.batch.token_slots.tolist()
        assert mapping == slots + [-1] * (len(mapping) - len(slots))


def test_a_device_without_graphs_says_so_and_runs_every_step_eagerly(stack: Any) -> None:
    runner = runner_of(stack)
    assert not runner.can_capture
    assert runner.capture() == ()
    assert runner.keys == ()
    assert_served(runner, stack, [0, -1, 2])
    assert_served(runner, stack, [-1, -1])
    assert stack.called == [3, 2]


def test_a_device_with_graphs_says_so(stack: Any, graphs: Any) -> None:
    assert runner_of(stack).can_capture


def test_a_second_capture_replaces_the_first_one(stack: Any, graphs: Any) -> None:
    runner = runner_of(stack)
    runner.capture()
    first = list(graphs.made)
    graphs.made.clear()
    runner.capture()
    assert_served(runner, stack, [0, 2])
    assert not any(graph.replays for graph in first)
    assert replayed(runner, graphs) == [GraphKey(2, True)]


def replace_weight(stack: Any) -> None:
    stack.linear.weight.data = stack.linear.weight.data.clone()


def replace_mapping(stack: Any) -> None:
    stack.buffers.batch.tile_rows = stack.buffers.batch.tile_rows.clone()


def replace_inputs(stack: Any) -> None:
    stack.inputs.block = stack.inputs.block.clone()


@pytest.mark.parametrize(
    ("replace", "name"),
    [
        (replace_adapters, "a of adapters 0"),
        (replace_weight, "weight of linear"),
        (replace_mapping, "reserved buffer 2"),
        (replace_inputs, "the block of inputs"),
    ],
)
def test_what_moved_after_the_capture_is_named_before_the_first_replay(
    stack: Any, graphs: Any, replace: Any, name: str
) -> None:
    runner = runner_of(stack)
    runner.capture()
    replace(stack)
    message = f"{name} was replaced by another tensor after the graphs had been captured"
    with pytest.raises(RuntimeError, match=message):
        run(runner, stack, [0, 2])
    assert replayed(runner, graphs) == []
    with pytest.raises(RuntimeError, match=message):
        runner.check_addresses()


def test_the_host_asks_for_addresses_before_the_first_replay_of_a_graph_alone(
    stack: Any, graphs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, asked = runner_of(stack), []
    runner.capture()
    monkeypatch.setattr(runner, "check_addresses", lambda: asked.append(True))
    for _ in range(3):
        run(runner, stack, [0, 2])
    assert len(asked) == 1
    run(runner, stack, [-1])
    assert len(asked) == 2


def test_the_host_work_of_a_step_does_not_grow_with_the_slots(
    make_stack: Any, graphs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # operators that the host calls for one replay
    from torch.overrides import TorchFunctionMode

    class Counting(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr("lorakernels.batch.metadata.prepare_kernel", Ignored())
    counts = set()
    for slots in (3, 60):
        stack = make_stack(slots=slots)
        runner = runner_of(stack)
        runner.capture()
        run(runner, stack, [0, 2])
        values, mapping = stack.values(2, 3), torch.tensor([0, 2], dtype=torch.int32)
        for graph in graphs.made:
            graph.calls.clear()
        graphs.made.clear()
        with Counting() as counting:
            runner.run(mapping, **values)
        counts.add(counting.count)
    assert len(counts) == 1


class Ignored:
    """A kernel whose launches do nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: None
