"""Graphs of a machine without a GPU do what a CUDA graph does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from loragate.core.machine import interpreter_is_on, select_interpreter

select_interpreter()

from loragate.execution.graph import capture  # noqa: E402
from loragate.execution.streams.model import modelled_streams  # noqa: E402
from loragate.execution.streams.modelled_graphs import ModelledGraphs  # noqa: E402


@pytest.fixture(autouse=True)
def graphs() -> Iterator[None]:
    with modelled_streams(ModelledGraphs()):
        yield


def test_a_replay_runs_operators_and_no_code_of_the_host() -> None:
    x, out, calls = torch.ones(3), torch.zeros(3), []

    def step() -> Tensor:
        calls.append(len(calls))
        return out.copy_(x * (len(calls) + 1))

    captured = capture(step, warm_ups=0)
    x.fill_(5)
    captured.graph.replay()
    # the factor is that of the capture, the values are those of today
    assert out.tolist() == [10, 10, 10]
    assert calls == [0]


def test_a_replay_assigns_the_numbers_of_the_capture() -> None:
    out, mask = torch.zeros(4), torch.tensor([False, True, False, False])

    def step() -> Tensor:
        out[:3] = 2
        out[mask] = 3.0
        return out

    captured = capture(step, warm_ups=0)
    out.zero_()
    captured.graph.replay()
    assert out.tolist() == [2, 3, 2, 0]


@pytest.mark.parametrize(
    "made",
    [
        lambda x: x.new_zeros(3),
        lambda x: x.new_ones(3) - 1,
        lambda x: x.new_full((3,), 0.0),
        lambda x: torch.zeros(3),
        torch.zeros_like,
    ],
)
def test_a_replay_fills_again_what_is_made_with_values(made: Callable[[Tensor], Tensor]) -> None:
    x, out = torch.ones(3), torch.zeros(3)

    def step() -> Tensor:
        total = made(x)
        total += x
        return out.copy_(total)

    captured = capture(step, warm_ups=0)
    for value in (2, 5):
        x.fill_(value)
        captured.graph.replay()
        assert out.tolist() == [value] * 3


@pytest.mark.parametrize("where", [0, torch.tensor([0, 1])], ids=["element", "indices"])
def test_a_capture_refuses_a_number_that_has_to_be_uploaded(where: Any) -> None:
    out = torch.zeros(4)

    def step() -> Tensor:
        out[where] = 1
        return out

    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        capture(step, warm_ups=0)


def test_what_is_on_the_host_is_read_and_written_in_the_capture_alone() -> None:
    flag, x, out = torch.zeros(1), torch.ones(3), torch.zeros(3)

    def step() -> Tensor:
        flag.add_(1)
        return out.copy_(x * flag.item())

    with modelled_streams(ModelledGraphs([flag])):
        captured = capture(step, warm_ups=0)
        flag.fill_(9)
        captured.graph.replay()
    assert (out.tolist(), flag.item()) == ([1, 1, 1], 9)
    message = "not permitted.*waits for the device in _local_scalar_dense; .* by .*host_tensors"
    with modelled_streams(ModelledGraphs([x])), pytest.raises(RuntimeError, match=message):
        capture(step, warm_ups=0)


@triton.jit
def add_kernel(x_ptr, out_ptr, number, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets) + number)


@pytest.mark.skipif(not interpreter_is_on(), reason="needs Triton's interpreter")
def test_a_launch_keeps_its_grid_and_its_numbers() -> None:
    x, out, sizes = torch.zeros(4), torch.zeros(4), [2]

    def step() -> Tensor:
        add_kernel[lambda meta: (sizes[0] // meta["BLOCK"],)](x, out, sizes[0], BLOCK=1)
        return out

    captured = capture(step, warm_ups=0)
    sizes[0] = 4
    x.fill_(10)
    out.zero_()
    captured.graph.replay()
    assert out.tolist() == [12, 12, 0, 0]


def test_memory_that_a_capture_allocates_holds_nothing_before_a_replay() -> None:
    x, first = torch.ones(3), [True]

    def step() -> Tensor:
        scratch = torch.empty(3)
        if first.pop():
            # done by the host itself, as what another graph would leave there
            with torch.utils._python_dispatch._disable_current_modes():
                scratch.copy_(x)
        return scratch + 1

    captured = capture(step, warm_ups=0)
    captured.graph.replay()
    assert captured.result.isnan().all()


def test_what_a_capture_allocated_stays_as_long_as_somebody_holds_it() -> None:
    x, kept = torch.ones(3), {}

    def step() -> Tensor:
        kept.setdefault("factor", torch.empty(3))
        return x * kept["factor"]

    captured = capture(step, warm_ups=0)
    kept["factor"].fill_(2)
    captured.graph.replay()
    assert captured.result.tolist() == [2, 2, 2]
    other = capture(lambda: x * 3, warm_ups=0)
    other.graph.replay()
    assert captured.result.tolist() == [2, 2, 2]
    del kept["factor"]
    captured.graph.replay()
    assert captured.result.isnan().all()


def test_memory_that_only_graphs_hold_has_been_given_to_somebody_else() -> None:
    held = {"weight": torch.ones(3)}
    # one of another size holds it as well
    captured, _ = (capture(lambda: held["weight"] * 2, warm_ups=0) for _ in range(2))
    captured.graph.replay()
    assert captured.result.tolist() == [2, 2, 2]
    view = held["weight"][:2]
    del held["weight"]
    captured.graph.replay()
    assert captured.result.tolist() == [2, 2, 2]
    del view
    captured.graph.replay()
    assert captured.result.isnan().all()


def test_a_custom_operator_is_replayed_by_what_it_does() -> None:
    sizes = [1]

    @torch.library.custom_op("loragate_tests::times", mutates_args=("out",))
    def times(x: Tensor, out: Tensor) -> None:
        out.copy_(x * sizes[0])

    x, out = torch.ones(2), torch.zeros(2)
    captured = capture(lambda: times(x, out), warm_ups=0)
    sizes[0], _ = 7, x.fill_(3)
    captured.graph.replay()
    assert out.tolist() == [3, 3]


def test_a_custom_operator_that_did_nothing_does_nothing() -> None:
    is_idle = [True]

    @torch.library.custom_op("loragate_tests::unless_idle", mutates_args=("out",))
    def unless_idle(x: Tensor, out: Tensor) -> None:
        if not is_idle[0]:
            out.copy_(x)

    x, out = torch.ones(2), torch.zeros(2)
    captured = capture(lambda: unless_idle(x, out), warm_ups=0)
    is_idle[0] = False
    captured.graph.replay()
    # the host left it out of the capture
    assert out.tolist() == [0, 0]


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
        lambda x: torch.cuda.Event().synchronize(),
    ],
    ids=["item", "nonzero", "mask", "synchronize", "stream", "event"],
)
def test_a_capture_in_which_the_host_waits_fails_and_the_next_one_does_not(wait: object) -> None:
    x = torch.ones(3)

    def step() -> Tensor:
        wait(x)  # type: ignore[operator]
        return x * 2

    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        capture(step, warm_ups=0)
    assert not torch.cuda.is_current_stream_capturing()
    captured = capture(lambda: x * 3, warm_ups=0)
    captured.graph.replay()
    assert captured.result.tolist() == [3, 3, 3]
