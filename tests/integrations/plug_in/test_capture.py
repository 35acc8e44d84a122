"""What is captured into a graph: never what the mapping of the capture happens to be, always what
the server asked its dummy run for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.integrations.vllm.declaration import DECLARATION  # noqa: E402
from lorakernels.integrations.vllm.launches import launch_counts  # noqa: E402
from lorakernels.integrations.vllm.registration import _declaring  # noqa: E402

KERNELS = ["lora_shrink_kernel", "lora_expand_kernel"]
BASE, MIXED = (-1, -1, -1), (1, -1, 0)


class Recording:
    """The launches of a capture, to be done again with the same arguments."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []
        self.names: list[str] = []
        self.is_open = False

    def replay(self) -> None:
        for call in self.calls:
            call()

    @contextmanager
    def capture(self) -> Iterator[None]:
        self.calls.clear()
        self.names.clear()
        self.is_open = True
        yield
        self.is_open = False


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Recording:
    """Gives the CPU a graph of the launches of Triton's interpreter."""
    from triton.runtime.interpreter import GridExecutor

    from lorakernels.integrations.vllm import declaration

    recording, launch = Recording(), GridExecutor.__call__

    def noting(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        if recording.is_open:
            recording.names.append(self.fn.__name__)
            recording.calls.append(lambda: launch(self, *args, **kwargs))
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", noting)
    monkeypatch.setattr(declaration, "is_capturing", lambda device: recording.is_open)
    return recording


class Runner:
    """vLLM's model runner, as far as dummy runs go; a dummy run with `forgets` lacks its adapters,
    as in vllm #43139."""

    def __init__(self, server: Any, *, forgets: bool = False) -> None:
        self.server, self.forgets = server, forgets

    @contextmanager
    def maybe_select_dummy_loras(
        self,
        lora_config: Any,
        num_scheduled_tokens: int,
        mapping_type: object = None,
        num_sampled_tokens: object = None,
        num_active_loras: int = 0,
    ) -> Iterator[None]:
        slots = BASE if self.forgets or not num_active_loras else MIXED
        self.server.step(slots)
        yield


select_dummies = _declaring(Runner.maybe_select_dummy_loras)


@pytest.fixture
def linear(server: Any, make_linear: Any) -> Any:
    made = make_linear(server)
    made.load(0, seed=1)
    made.load(1, seed=2)
    return made


def flag_of(server: Any) -> torch.Tensor:
    flag: torch.Tensor = server.wrapper.token_mapping_meta.no_lora_flag_cpu
    return flag


def captured(graph: Recording, linear: Any, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output of a graph of the layer; a replay adds the delta to the output."""
    x, out = torch.randn(rows, 24), torch.zeros(rows, 32)
    layer = linear.layer
    with graph.capture():
        layer.punica_wrapper.add_lora_linear(
            out, x, layer.lora_a_stacked, layer.lora_b_stacked, 1.0, layer.output_slices
        )
    return x, out


def check_replay(
    graph: Recording, linear: Any, x: torch.Tensor, out: torch.Tensor, slots: Sequence[int]
) -> None:
    """A replay of what `captured` returned adds the delta of the mapping, of the graph's rows."""
    out.zero_()
    graph.replay()
    wanted = linear.wanted(x, slots[: len(x)]) - x @ linear.layer.weight.T
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("inside", [True, False])
def test_a_graph_for_adapters_has_their_kernels_whatever_its_dummy_run_mapped(
    server: Any, linear: Any, graph: Recording, inside: bool, forgets: bool
) -> None:
    runner = Runner(server, forgets=forgets)
    # the first runner of vLLM captures within the dummy selection, the second one behind it
    with select_dummies(runner, None, 3, num_active_loras=2):
        if inside:
            captured(graph, linear)
    if not inside:
        captured(graph, linear)
    assert graph.names == KERNELS
    assert launch_counts()["linear"].captured == 1


@pytest.mark.parametrize("inside", [True, False])
def test_a_graph_for_no_adapters_has_no_kernel(
    server: Any, linear: Any, graph: Recording, inside: bool
) -> None:
    with select_dummies(Runner(server), None, 3, num_active_loras=0):
        if inside:
            captured(graph, linear)
    if not inside:
        captured(graph, linear)
    assert graph.names == []
    assert launch_counts()["linear"].left_out == 1


def test_a_graph_for_no_adapters_has_no_kernel_of_logits(server: Any, graph: Recording) -> None:
    a, b = torch.randn(3, 1, 4, 24), torch.randn(3, 1, 32, 4)
    x, out = torch.randn(3, 24), torch.zeros(3, 32)
    for adapters, kernels in ((0, []), (2, KERNELS)):
        with select_dummies(Runner(server), None, 3, num_active_loras=adapters):
            pass
        with graph.capture():
            server.wrapper.add_lora_logits(out, x, a, b, 1.0)
        assert graph.names == kernels


@pytest.fixture
def tower(make_server: Any, make_linear: Any) -> tuple[Any, Any]:
    """A second wrapper, and a layer of it with adapters in two slots."""
    server = make_server()
    linear = make_linear(server)
    linear.load(0, seed=3)
    linear.load(1, seed=4)
    return server, linear


@pytest.mark.parametrize("adapters", [0, 2])
@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_graph_of_a_tower_has_its_kernels_whatever_the_language_model_declared(
    server: Any, tower: tuple[Any, Any], graph: Recording, adapters: int, is_mapped: bool
) -> None:
    wrapper, linear = tower
    if is_mapped:
        wrapper.step(MIXED)
    # graphs of towers are captured behind those of the language model, without a dummy selection
    with select_dummies(Runner(server), None, 3, num_active_loras=adapters):
        pass
    x, out = captured(graph, linear)
    assert graph.names[-2:] == KERNELS
    # steps of fewer images than the graph has rows, of as many and of more
    for slots in ((1,), (1, 0, 1), (0, 1, -1, 1, 1, 0)):
        wrapper.step(slots)
        check_replay(graph, linear, x, out, slots)


def test_a_replay_of_a_tower_writes_nothing_behind_its_rows(
    server: Any, tower: tuple[Any, Any], graph: Recording
) -> None:
    wrapper, linear = tower
    server.step(BASE)
    layer, x, out = linear.layer, torch.randn(8, 24), torch.zeros(8, 32)
    with graph.capture():
        layer.punica_wrapper.add_lora_linear(
            *(out[:3], x[:3], layer.lora_a_stacked, layer.lora_b_stacked),
            *(1.0, layer.output_slices),
        )
    out.zero_()
    wrapper.step((1,) * 6)
    graph.replay()
    assert out[:3].any(dim=1).all()
    assert not out[3:].any()


def test_a_dummy_run_whose_mapping_is_there_already_declares_for_the_wrapper_that_has_it(
    server: Any, linear: Any, tower: tuple[Any, Any], graph: Recording
) -> None:
    server.step(BASE)
    # vLLM skips a mapping that equals the last one
    with DECLARATION.dummy_run(0):
        pass
    captured(graph, linear)
    assert graph.names == []
    captured(graph, tower[1])
    assert graph.names[-2:] == KERNELS


def test_a_capture_that_no_dummy_run_precedes_has_the_kernels(
    server: Any, linear: Any, graph: Recording
) -> None:
    server.step(BASE)
    captured(graph, linear)
    assert graph.names == KERNELS


def test_what_a_dummy_run_declares_ends_with_the_next_step(
    server: Any, linear: Any, graph: Recording
) -> None:
    with select_dummies(Runner(server), None, 3, num_active_loras=0):
        pass
    assert DECLARATION.without_adapters(flag_of(server))
    server.step(BASE)
    captured(graph, linear)
    assert graph.names == KERNELS


def test_the_number_of_adapters_may_be_given_by_place(server: Any) -> None:
    with select_dummies(Runner(server), None, 3, None, None, 0):
        assert DECLARATION.without_adapters(flag_of(server))
    with select_dummies(Runner(server), None, 3, None, None, 2):
        assert not DECLARATION.without_adapters(flag_of(server))


def test_a_declaration_is_of_its_dummy_run_even_if_that_fails(server: Any) -> None:
    with (
        pytest.raises(KeyError),
        select_dummies(Runner(server), None, 3, num_active_loras=0),
    ):
        raise KeyError
    server.step(BASE)
    assert not DECLARATION.without_adapters(flag_of(server))


def test_a_replay_serves_the_mapping_of_its_step_and_none_without_adapters(
    make_server: Any, make_linear: Any, graph: Recording
) -> None:
    server = make_server(rows=200)
    linear = make_linear(server)
    linear.load(0, seed=1)
    linear.load(2, seed=2)
    with select_dummies(Runner(server), None, 3, num_active_loras=2):
        # of another height than the live rows
        x, out = captured(graph, linear, rows=140)
    for slots in ([0, -1, 2], [-1] * 4, [2] * 100, [-1, 2]):
        server.step(slots)
        check_replay(graph, linear, x, out, slots)


def test_a_graph_of_fewer_rows_than_its_capture_mapped_serves_the_mapping_of_its_step(
    server: Any, linear: Any, graph: Recording
) -> None:
    linear.load(2, seed=3)
    server.step((2, 1, 0, -1, 2, 2))
    x, out = captured(graph, linear, rows=4)
    for slots in ((0, 1, -1, 2, 1, 1, 0), (-1, 2, 1), (1,) * 9):
        server.step(slots)
        check_replay(graph, linear, x, out, slots)


def test_adapters_are_reloaded_under_a_captured_graph(
    server: Any, linear: Any, graph: Recording
) -> None:
    with select_dummies(Runner(server), None, 3, num_active_loras=2):
        x, out = captured(graph, linear)
    server.step(MIXED)
    for seed in (7, 8):
        linear.load(1, seed=seed, rank=1)
        check_replay(graph, linear, x, out, MIXED)
