"""Linear layers and logits of vLLM with the plug-in's methods: rows get their own adapter, whatever
the step before was, however far a graph pads a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from loragate.core.machine import select_interpreter

select_interpreter()

from lorakernels.common.slice_stacks import pack  # noqa: E402
from lorakernels.dense.launch import TileTables  # noqa: E402
from lorakernels.integrations.vllm.launches import launch_counts  # noqa: E402
from lorakernels.integrations.vllm.linear import _launch_delta  # noqa: E402
from lorakernels.integrations.vllm.tables import HEIGHTS, tables_of_height  # noqa: E402

MIXED = (0, -1, 2, 2, -1, 1, 0)


@pytest.fixture
def linear(server: Any, make_linear: Any) -> Any:
    made = make_linear(server)
    made.load(0, seed=10)
    made.load(2, seed=20, rank=3)
    return made


def test_each_row_gets_its_own_adapter_and_a_base_row_none(server: Any, linear: Any) -> None:
    linear.load(1, seed=30, rank=1)
    server.step(MIXED)
    linear.check(MIXED)


def test_inputs_and_outputs_may_have_an_axis_of_batches(server: Any, linear: Any) -> None:
    server.step(MIXED)
    x = torch.randn(len(MIXED), linear.layer.k)
    wanted = linear.wanted(x, MIXED)
    found = linear.layer(x[None])
    assert found.shape == (1, *wanted.shape)
    torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-4)


def test_a_server_is_set_up_on_its_device_whatever_the_default_is(
    make_server: Any,
) -> None:
    with torch.device("meta"):
        wrapper = make_server().wrapper
    tables = [*wrapper.token_step.tensors, *wrapper.sample_step.tensors, *wrapper._constants]
    assert {tensor.device.type for tensor in tables} == {"cpu"}


@pytest.fixture
def default_dtype() -> Iterator[Callable[[torch.dtype], None]]:
    """Sets torch's default dtype, as vLLM does while it builds a model."""
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


def test_neither_a_server_nor_a_step_depends_on_the_default_dtype(
    make_server: Any, make_linear: Any, default_dtype: Callable[[torch.dtype], None]
) -> None:
    default_dtype(torch.bfloat16)
    server = make_server()
    default_dtype(torch.float32)
    linear = make_linear(server)
    linear.load(0, seed=10)
    x = torch.randn(len(MIXED), linear.layer.k)
    wanted = linear.wanted(x, MIXED)
    default_dtype(torch.bfloat16)
    server.step(MIXED)
    torch.testing.assert_close(linear.layer(x), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("short", ["ranks", "scales"])
def test_constants_of_fewer_slots_than_a_layer_has_are_refused(short: str) -> None:
    (a,), (b,) = pack([torch.zeros(3, 1, 4, 6)], [torch.zeros(3, 1, 5, 4)])
    constants = {"ranks": torch.zeros(3, dtype=torch.int32), "scales": torch.zeros(3)}
    constants[short] = constants[short][1:]
    tables = [torch.zeros(1, dtype=torch.int32)] * 3
    x, out = torch.zeros(1, 6), torch.zeros(1, 5)
    with pytest.raises(ValueError, match=rf"{short} must hold 3 values or more \(got 2\)"):
        _launch_delta(x, a, b, *constants.values(), *tables, out, [5])


def test_a_delta_is_not_added_to_its_own_input(server: Any, linear: Any) -> None:
    server.step(MIXED)
    layer, both = linear.layer, torch.randn(len(MIXED), 99)
    x, y = both[:, : layer.k], both[:, layer.k - 1 :][:, : sum(layer.output_slices)]
    stacks = layer.lora_a_stacked, layer.lora_b_stacked
    with pytest.raises(ValueError, match="out must not overlap x in memory"):
        server.wrapper.add_lora_linear(y, x, *stacks, 1.0, layer.output_slices)


def test_a_height_that_no_step_was_set_up_for_is_refused(server: Any) -> None:
    tensors = server.wrapper.token_step.tensors
    heights = len(tensors) // len(TileTables._fields)
    assert 0 < heights < len(HEIGHTS)
    tables_of_height(tensors, HEIGHTS[heights - 1])
    with pytest.raises(ValueError, match=f"got rows for tiles of {HEIGHTS[heights]}"):
        tables_of_height(tensors, HEIGHTS[heights])


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        # the most are 40
        (torch.zeros(41, dtype=torch.int64), r"may have 40 rows \(got 41\)"),
        (torch.tensor([1, 3]), r"must be -1 to 2 \(got 1 to 3\)"),
        (torch.zeros(2, 2, dtype=torch.int64), "with one dimension"),
    ],
)
def test_a_mapping_that_is_refused_leaves_the_step_before_it_in_force(
    server: Any, linear: Any, refused: torch.Tensor, message: str
) -> None:
    server.step(MIXED)
    step = server.wrapper.token_step
    before = [tensor.clone() for tensor in (step.live, step.row_slots, *step.tensors)]
    assert before[0].tolist() == [len(MIXED)]
    with pytest.raises(ValueError, match=message):
        step.prepare(refused)
    after = (step.live, step.row_slots, *step.tensors)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    linear.check(MIXED, rows=12)


@pytest.mark.parametrize("widths", [(20,), (20, 12), (16, 8, 8)])
def test_a_layer_may_have_any_number_of_slices(
    server: Any, make_linear: Any, widths: tuple[int, ...]
) -> None:
    made = make_linear(server, widths)
    for slot in range(3):
        made.load(slot, seed=11 * slot)
    server.step(MIXED)
    made.check(MIXED)


def test_a_slot_is_reloaded_and_emptied_in_place(server: Any, linear: Any) -> None:
    server.step(MIXED)
    linear.check(MIXED)
    linear.load(0, seed=99, rank=2)
    linear.check(MIXED)
    linear.evict(2)
    linear.check(MIXED)
    linear.load(2, seed=98)
    linear.check(MIXED)


def test_a_step_follows_another_one_of_any_mapping(server: Any, linear: Any) -> None:
    for slots in (MIXED, (-1,) * 5, (2,), (-1, 0), (0, -1), MIXED[::-1], (-1,), MIXED):
        server.step(slots)
        linear.check(slots)


@pytest.mark.parametrize(("live", "rows"), [(9, 9), (120, 136), (30, 1030), (2040, 2056)])
def test_a_padded_step_has_the_tiles_of_its_padded_rows(
    make_server: Callable[..., Any], make_linear: Any, live: int, rows: int
) -> None:
    server = make_server(rows=2100)
    linear = make_linear(server, (5,))
    linear.load(1, seed=3)
    # the tables of every height are those of this step, not of the one before
    for slots in ([1] * (live - 3), [-1, 1, 1] + [-1] * (live - 5) + [1, -1]):
        server.step(slots)
        linear.check(slots, rows=rows)


def test_a_server_that_slept_and_lost_its_memory_is_served(server: Any, linear: Any) -> None:
    server.step(MIXED)
    linear.check(MIXED)
    for lost in (*server.wrapper._constants, *server.wrapper.token_step.tensors):
        lost.fill_(1000)
    server.step(MIXED)
    linear.load(0, seed=5)
    linear.check(MIXED)


def test_more_rows_than_the_server_was_set_up_for_are_refused(server: Any, linear: Any) -> None:
    server.step(MIXED)
    with pytest.raises(ValueError, match="as the server was set up for"):
        linear.layer(torch.zeros(3000, 24))


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_a_scale_that_is_not_in_b_is_refused(scale: float, server: Any, linear: Any) -> None:
    server.step(MIXED)
    layer = linear.layer
    stacks = (layer.lora_a_stacked, layer.lora_b_stacked)
    with pytest.raises(ValueError, match="scale must be 1"):
        server.wrapper.add_lora_linear(
            torch.zeros(7, 32), torch.zeros(7, 24), *stacks, scale, (20, 12)
        )


def test_a_step_without_adapters_launches_nothing(server: Any, linear: Any) -> None:
    server.step(MIXED)
    linear.check(MIXED)
    server.step((-1, -1))
    linear.check((-1, -1))
    counts = launch_counts()["linear"]
    assert (counts.launched, counts.captured, counts.left_out) == (1, 0, 1)


@pytest.fixture
def stacks() -> tuple[torch.Tensor, torch.Tensor]:
    """A head of 10 words, whose logits are padded to 16."""
    generator = torch.Generator().manual_seed(4)
    return (
        torch.randn(3, 1, 4, 24, generator=generator),
        torch.randn(3, 1, 10, 4, generator=generator),
    )


def check_logits(server: Any, stacks: Any, slots: tuple[int, ...]) -> None:
    a, b = stacks
    # behind the rows of the call are those of others
    x = torch.randn(len(slots) + 40, 24, generator=torch.Generator().manual_seed(6))
    y, wanted = torch.ones(len(x), 16), torch.ones(len(x), 16)
    for row, slot in enumerate(slots):
        if slot >= 0:
            wanted[row, :10] += b[slot, 0] @ (a[slot, 0] @ x[row])
    server.wrapper.add_lora_logits(y[: len(slots)], x[: len(slots)], a, b, 1.0)
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)


def test_logits_have_the_adapters_of_the_samples(server: Any, stacks: Any) -> None:
    server.step((0, 0, 0, 1, 1, -1), samples=(2, -1, 1))
    check_logits(server, stacks, (2, -1, 1))
    assert launch_counts()["logits"].launched == 1


def test_logits_of_a_prompt_have_the_adapters_of_the_first_samples(
    server: Any, stacks: Any
) -> None:
    server.step((0, 1, 2, 1), samples=(1, 0, 2, 2))
    check_logits(server, stacks, (1, 0))
    check_logits(server, stacks, (1, 0, 2, 2))


def test_samples_may_lack_adapters_that_rows_have(server: Any, stacks: Any) -> None:
    server.step((0, 1), samples=(-1,))
    check_logits(server, stacks, (-1,))
    assert launch_counts()["logits"].left_out == 1


def test_logits_of_a_higher_precision_are_left_to_vllm(plain: Any) -> None:
    plain.step((0,))
    y, x = torch.zeros(1, 8), torch.zeros(1, 4).half()
    a, b = torch.zeros(3, 1, 4, 4).half(), torch.zeros(3, 1, 8, 4).half()
    buffer = torch.zeros(1)
    plain.wrapper.add_lora_logits(y, x, a, b, 1.0, buffer=buffer, more=2)
    assert plain.wrapper.own_calls == ["logits"]
    handed_on = plain.wrapper.own_arguments[0]
    assert same_things(handed_on, (y, x, a, b, 1.0), {"buffer": buffer, "more": 2})
    assert launch_counts()["logits"].launched == 0


def test_outputs_of_a_higher_precision_are_left_to_vllm_by_layers_of_one_slice(plain: Any) -> None:
    plain.step((0,))
    y, x = torch.zeros(1, 8), torch.zeros(1, 4).half()
    a, b = (torch.zeros(3, 1, 4, 4).half(),), (torch.zeros(3, 1, 8, 4).half(),)
    buffer = torch.zeros(1)
    plain.wrapper.add_lora_linear(y, x, a, b, 1.0, (8,), buffer=buffer, add_inputs=False)
    assert plain.wrapper.own_calls == ["linear"]
    handed_on = plain.wrapper.own_arguments[0]
    assert same_things(handed_on, (y, x, a, b, 1.0, (8,)), {"buffer": buffer, "add_inputs": False})
    assert launch_counts()["linear"].launched == 0


def test_packed_slices_are_never_left_to_vllm_which_could_not_read_them(
    plain: Any, make_linear: Any
) -> None:
    layer = make_linear(plain, (8, 4)).layer
    plain.step((0,))
    y, x = torch.zeros(1, 12).double(), torch.zeros(1, 24)
    with pytest.raises(ValueError, match="float64"):
        plain.wrapper.add_lora_linear(y, x, layer.lora_a_stacked, layer.lora_b_stacked, 1.0, (8, 4))
    assert plain.wrapper.own_calls == []


def same_things(
    handed_on: tuple[tuple[Any, ...], dict[str, Any]], args: tuple[Any, ...], named: dict[str, Any]
) -> bool:
    """Tensors are compared by what they are, not by their values."""
    found, found_named = handed_on
    return [id(arg) for arg in found] == [id(arg) for arg in args] and {
        name: id(value) for name, value in found_named.items()
    } == {name: id(value) for name, value in named.items()}
